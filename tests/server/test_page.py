"""The page's files and the figures that it draws."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from enginebay_server.routes_page import FILES, SCRIPTS

if TYPE_CHECKING:
    from enginebay import LLM
    from enginebay.contracts.cache import Lease
    from tests.server.in_process_client import Asker


def test_page_and_the_files_that_it_names_are_served_with_a_policy(asker: Asker) -> None:
    assert asker.get("/ui").headers["location"] == "/ui/"
    page = asker.get("/ui/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'"} <= set(
        policy.split("; ")
    )
    assert "unsafe" not in policy
    assert "http" not in policy
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    files = [name for name in named if not name.startswith("data:")]
    assert files == [
        *("vendor/uplot.css", "vendor/code-light.css", "vendor/code-dark.css", "page.css"),
        "page.js",
    ]
    scripts = ["page.js"]
    for script in scripts:  # which grows
        imported = re.findall(r'from "\./([^"]+)"', asker.get(f"/ui/{script}").text)
        scripts += [name for name in imported if name not in scripts]
    assert {f"{name}.js" for name in SCRIPTS} == set(scripts)
    for name in {*files, *scripts, *FILES}:
        answer = asker.get(f"/ui/{name}")
        assert (answer.status_code, answer.content[:1] != b"") == (200, True)
    assert not re.search(r"https?://", page.text)


def test_other_files_are_not_served(asker: Asker) -> None:
    for name in ("../plugin.py", "%2e%2e/plugin.py", "page.py", "ui/index.html"):
        assert asker.get(f"/ui/{name}").status_code == 404


def test_figures_say_what_is_compiled_and_what_waits(asker: Asker) -> None:
    assert asker.get("/ui/data").json()["queued"] == 0
    before = asker.get("/ui/data").json()["models"][0]["compile_s"]
    assert asker.get("/ui/data").json()["models"][0]["compiling_s"] is None
    with asker.llm.engine.compilations.timed(), asker.llm.engine.compilations.timed():
        first = asker.get("/ui/data").json()["models"][0]["compiling_s"]
        assert asker.get("/ui/data").json()["models"][0]["compiling_s"] > first > 0
    after = asker.get("/ui/data").json()["models"][0]
    assert after["compiling_s"] is None
    assert after["compile_s"] > before


def test_it_is_shown_what_comes_and_what_stands_in(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilations = asker.llm.engine.compilations
    [first, *_], later = asker.llm.engine.warmup_steps()
    figures = asker.get("/ui/data").json()["models"][0]
    assert (figures["coming"], figures["num_stand_ins"]) == ([], 0)
    monkeypatch.setattr(compilations, "coming", tuple(later))
    monkeypatch.setattr(compilations, "stand_ins", Counter({(later[0], first): 3}))
    figures = asker.get("/ui/data").json()["models"][0]
    assert (figures["coming"], figures["num_stand_ins"]) == ([str(key) for key in later], 3)
    found = asker.get("/metrics").text
    assert f'enginebay:programs_coming{{model_name="demo"}} {len(later)}.0' in found
    assert 'enginebay:stand_in_steps_total{model_name="demo"} 3.0' in found
    shown = asker.get("/explain").json()["demo"]["stand_ins"]
    assert shown == [{"step": str(later[0]), "ran": str(first), "count": 3}]


def test_figures_have_the_steps_and_endings_since_a_number(asker: Asker) -> None:
    before = asker.get("/ui/data").json()["models"][0]
    asker.ok("/v1/completions", model="demo", prompt="Once upon a time", max_tokens=5)
    model = asker.get(f"/ui/data?since={before['next']}").json()["models"][0]
    kinds = [record["kind"] for record in model["records"]]
    assert kinds[0] == "prefill"
    assert kinds[-1] == "end"
    prefill, end = model["records"][0], model["records"][-1]
    assert prefill["prompt_tokens"] + end["cached"] == 4
    assert end["tokens"] == 5
    assert sum(r["tokens"] for r in model["records"] if r["kind"] in ("prefill", "decode")) >= 5
    assert 0 < end["first_s"] <= end["s"]
    assert model["next"] == model["records"][-1]["number"] + 1
    again = asker.get(f"/ui/data?since={model['next']}").json()["models"][0]
    assert again["records"] == []


@pytest.mark.parametrize("since", ["9" * 5000, "-1", "nan", "1,,x"])
def test_a_strange_number_has_the_figures_from_the_first_on(asker: Asker, since: str) -> None:
    assert asker.get("/ui/data", params={"since": since}).status_code == 200


def test_figures_have_the_holders_of_pages(asker: Asker) -> None:
    pages = asker.get("/ui/data").json()["models"][0]["pages"]
    assert list(pages) == ["full"]
    assert all(holders <= 0 for holders in pages["full"])  # nothing runs; prefixes are kept


def test_a_page_that_two_rows_share_has_two_holders(asker: Asker) -> None:
    ledger, prompt = asker.llm.engine.ledger, np.arange(20, 20 + 100, dtype=np.int32)

    def hold() -> tuple[Lease, Lease]:
        first = ledger.admit(0, prompt, 110)
        assert first is not None
        ledger.commit(first, prompt)
        second = ledger.admit(1, prompt, 110)
        assert second is not None
        return first, second

    leases = asker.llm.run_on_engine(hold)
    pages = asker.get("/ui/data").json()["models"][0]["pages"]["full"]
    asker.llm.run_on_engine(lambda: [ledger.release(lease) for lease in leases])
    first, second = (set(lease.pages["full"]) - {0} for lease in leases)
    assert first & second
    assert {page for page, holders in enumerate(pages) if holders == 2} == first & second
    assert {page for page, holders in enumerate(pages) if holders == 1} == first ^ second


def test_figures_have_the_rate_of_reads_and_its_limit(asker: Asker) -> None:
    asker.ok("/v1/completions", model="demo", prompt="Once upon a time", max_tokens=5)
    model = asker.get("/ui/data").json()["models"][0]
    metrics = asker.state.metrics.of["demo"]
    assert model["gigabytes_per_s"] == metrics.achieved_gigabytes_per_s > 0
    assert model["roofline_gigabytes_per_s"] == metrics.roofline_gigabytes_per_s > 0.1


def test_page_needs_no_key_and_its_figures_do(llm: LLM) -> None:
    from tests.server.in_process_client import Asker

    asker = Asker(llm, api_keys=("a-secret-key",))
    assert asker.get("/ui/").status_code == 200
    assert asker.get("/ui/page.js").status_code == 200
    assert asker.get("/ui/data").status_code == 401
    headers = {"Authorization": "Bearer a-secret-key"}
    assert asker.get("/ui/data", headers=headers).status_code == 200
