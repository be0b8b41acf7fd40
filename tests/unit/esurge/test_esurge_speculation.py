"""eSurge with a proposer: what was drafted and what held is counted alike in outputs, summary,
metrics, log, console and dashboard.
"""

from __future__ import annotations

import io
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from enginebay.config import MAX_PASSES
from enginebay_esurge import eSurge
from enginebay_esurge.console import figures_table
from enginebay_esurge.dashboard import make_dashboard
from enginebay_esurge.observing import Figures
from tests.unit.esurge.small import GREEDY_ON, PROMPT, until, with_

parser = pytest.importorskip("prometheus_client.parser")

pytestmark = pytest.mark.xdist_group("esurge")

STORY = "Tom has a red ball. Tom and the dog play. "
ONE_ROW: dict[str, Any] = {"compile_runner": False, "max_num_seqs": 1, "processors": ()}
NAMES = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@pytest.fixture
def drafting(make_real: Callable[..., AbstractContextManager[eSurge]]) -> Iterator[eSurge]:
    """Two layers of the demo model, which repeat themselves when they are greedy."""
    with make_real(proposer="ngram", draft_tokens=3, **ONE_ROW) as engine:
        yield engine
        engine.stop_monitoring()


def scrape(url: str) -> dict[str, float]:
    text = urllib.request.urlopen(url, timeout=30).read().decode()
    families = parser.text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def drafted(metrics: dict[str, Any] | None) -> tuple[int, int]:
    assert metrics is not None
    return metrics["draft_tokens"], metrics["accepted_tokens"]


def last_figures(log: Path) -> dict[str, Any]:
    """The last line of a log that is closed."""
    line: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    assert line.pop("event") == "figures"
    del line["time"]
    return line


def shown(figures: dict[str, Any]) -> str:
    terminal = io.StringIO()
    Console(file=terminal, width=120).print(
        figures_table("my engine", Figures(unix_s=0.0, **figures))
    )
    return terminal.getvalue()


@pytest.mark.long
def test_drafts_are_counted_everywhere(drafting: eSurge, tmp_path: Path) -> None:  # holds SG3
    path = tmp_path / "log.jsonl"
    before = drafting.get_metrics_summary()
    urls = drafting.start_monitoring(
        prometheus_port=0, start_grafana=False, log_file=str(path), log_interval=0.05
    )
    started = scrape(urls["prometheus"])
    assert [started[f"esurge_spec_decode_{name}_total"] for name in NAMES] == [0, 0, 0]
    # Behind the last prompt the model says 5 for ever, which was another token after two of them.
    prompts = [STORY * 2, PROMPT, [5, 5, 7, 1, 2, 3, 4, 5]]
    outputs = drafting.generate(prompts, with_(GREEDY_ON, max_tokens=24, n=2))
    seen = scrape(urls["prometheus"])
    num_drafts, num_drafted, num_accepted = (
        seen[f"esurge_spec_decode_{name}_total"] for name in NAMES
    )
    assert 0 < num_accepted < num_drafted <= (MAX_PASSES * (3 + 1) - 1) * num_drafts
    counts = [drafted(output.metrics) for output in outputs]
    assert counts[2][1] < counts[2][0]
    assert (num_drafted, num_accepted) == tuple(map(sum, zip(*counts, strict=True)))
    after = drafting.get_metrics_summary()
    assert [
        after[name] - before[name] for name in ("total_draft_tokens", "total_accepted_tokens")
    ] == [
        num_drafted,
        num_accepted,
    ]
    until(lambda: f'"num_accepted_tokens": {int(num_accepted)}' in path.read_text())
    drafting.stop_monitoring()
    figures = last_figures(path)
    assert (figures["num_draft_tokens"], figures["num_accepted_tokens"]) == (
        num_drafted,
        num_accepted,
    )
    assert f"{int(num_accepted)} of {int(num_drafted)} tokens held" in shown(figures)


def test_the_dashboard_shows_them(drafting: eSurge) -> None:  # holds SG3
    expressions = [
        target["expr"]
        for panel in make_dashboard("uid", speculates=True)["panels"]
        for target in panel["targets"]
    ]
    read = set(re.findall(r"esurge_spec_\w+", " ".join(expressions)))
    assert read == {f"esurge_spec_decode_{name}_total" for name in NAMES}
    url = drafting.start_monitoring(prometheus_port=0, start_grafana=False)["prometheus"]
    assert read <= scrape(url).keys()
    drafting.stop_monitoring()


def test_an_engine_without_a_proposer_has_none_of_them(
    engine: eSurge, tmp_path: Path
) -> None:  # holds SG3
    params = with_(GREEDY_ON, max_tokens=24)
    path = tmp_path / "log.jsonl"
    urls = engine.start_monitoring(prometheus_port=0, start_grafana=False, log_file=str(path))
    [output] = engine.generate(STORY * 2, params)
    assert not [name for name in scrape(urls["prometheus"]) if "spec_decode" in name]
    assert drafted(output.metrics) == (0, 0)
    assert "spec_decode" not in json.dumps(make_dashboard("uid"))
    engine.stop_monitoring()
    assert "held" not in shown(last_figures(path))
