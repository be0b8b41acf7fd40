"""Adapters over HTTP: served names, loading and unloading, errors and metrics."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.adapters import change_config, change_tensors, write_adapter
from tests.brief import TINY
from tests.server.in_process_client import Asker, error_of
from tests.server.test_metrics import ends_between, samples

if TYPE_CHECKING:
    from enginebay import LLM

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TEXT = "/v1/completions"
WRONG = (400, 400, 400, 400, 404, 404)
HELD = "tales"
ASKED: dict[str, Any] = {"prompt": "A B C", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapted_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """TINY with two slots, three adapters at most, and one of them loaded."""
    from enginebay import LLM
    from tests.pool import few_sizes

    folder = write_adapter(tmp_path_factory.mktemp("adapters") / HELD, TINY, seed=1, scale=2.0)
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    limits: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3}
    with few_sizes(), LLM(TINY, **sizes, **limits, lora={HELD: str(folder)}) as made:
        yield made


@pytest.fixture
def adapted(adapted_llm: LLM) -> Iterator[Asker]:
    """A client that may load adapters; only HELD is left at the end."""
    asker = Asker(adapted_llm, lora_routes=True)
    yield asker
    assert list(asker.model.adapters) == [HELD]
    # An abort before this is in the engine's inbox.
    assert not adapted_llm.run_on_engine(adapted_llm.engine.rows.adapters.any)


def text_of(asker: Asker, model: str | None = None) -> str:
    named = {} if model is None else {"model": model}
    answer = asker.ok("/v1/completions", **ASKED, **named)
    assert answer["model"] == (model or "demo")
    text: str = answer["choices"][0]["text"]
    return text


def test_an_adapter_is_a_model_of_its_own_name(adapted: Asker) -> None:
    base, told = text_of(adapted), text_of(adapted, HELD)
    assert base == text_of(adapted, "demo") != told
    assert text_of(adapted, f"demo:{HELD}") == told
    events = adapted.events("/v1/completions", **ASKED, model=HELD)
    assert "".join(one["choices"][0]["text"] for one in events if one["choices"]) == told
    listed = adapted.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [("demo", None), (HELD, "demo")]
    assert adapted.get(f"/v1/models/demo:{HELD}").json()["root"] == HELD
    vectors = [
        adapted.ok("/v1/embeddings", input="A B", model=name)["data"][0]["embedding"]
        for name in ("demo", HELD)
    ]
    assert vectors[0] != vectors[1]


def test_an_unknown_name_is_not_found(adapted: Asker) -> None:
    for name in ("other", "demo:other", f"other:{HELD}"):
        error = adapted.refused("/v1/completions", 404, **ASKED, model=name)
        assert f"Served: demo, {HELD}." in error["message"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_folder_without_regular_files_is_refused_at_once(
    adapted: Asker, tmp_path: Path, kind: str
) -> None:
    """Reading a pipe would wait for a writer, and a device would be read without end."""
    if kind == "pipe":
        os.mkfifo(tmp_path / "adapter_config.json")
    else:
        (tmp_path / "adapter_config.json").symlink_to("/dev/zero")
    error = adapted.refused(LOAD, 400, lora_name="strange", lora_path=str(tmp_path))
    assert re.search("no regular file|is a link to", error["message"])
    assert adapted.get("/health").status_code == 200


def test_a_path_with_a_nul_is_a_wrong_request(adapted: Asker) -> None:
    error = adapted.refused(LOAD, 400, lora_name="strange", lora_path="a\x00b")
    assert "embedded null" in error["message"]


def test_clients_load_and_unload_adapters(adapted: Asker, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", TINY, seed=2, scale=2.0))
    assert adapted.ok(LOAD, lora_name="a", lora_path=folder)["status"] == "loaded"
    assert len({text_of(adapted, name) for name in ("demo", HELD, "a")}) == 3
    assert adapted.refused(LOAD, 409, lora_name="a", lora_path=folder)["code"] == (
        "adapter_already_loaded"
    )
    assert adapted.refused(LOAD, 409, lora_name="demo", lora_path=folder)["param"] == "lora_name"
    adapted.ok(LOAD, lora_name="b", lora_path=folder)
    assert adapted.refused(LOAD, 409, lora_name="c", lora_path=folder)["code"] == (
        "adapter_count_exceeded"
    )
    for name in "ab":
        adapted.ok(UNLOAD, lora_name=name)
        assert adapted.refused(UNLOAD, 404, lora_name=name)["code"] == "adapter_not_found"
        assert adapted.refused("/v1/completions", 404, **ASKED, model=name)


def test_no_counter_goes_down_when_adapters_come_and_go(adapted: Asker, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", TINY, seed=2, scale=2.0))
    load, ask = {"lora_name": "a", "lora_path": folder}, {**ASKED, "model": "a"}
    before = samples(adapted)
    for path, body, status, ends in (
        (LOAD, load, 200, {}),
        (TEXT, ask, 200, {"length": 1}),
        (TEXT, {**ask, "stream": True}, 200, {"length": 1}),
        (LOAD, load, 409, {}),
        (UNLOAD, {"lora_name": "a"}, 200, {}),
        (UNLOAD, {"lora_name": "a"}, 404, {}),
        (TEXT, ask, 404, {}),
        (LOAD, load, 200, {}),  # the same name again
        (UNLOAD, {"lora_name": "a"}, 200, {}),
    ):
        assert adapted.post(path, body).status_code == status, path
        found = samples(adapted)
        assert ends_between(before, found) == ends, path
        before = found


def test_adapters_that_cannot_be_served_are_refused(adapted: Asker, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", TINY, rank=9)
    error = adapted.refused(LOAD, 400, lora_name="a", lora_path=str(folder))
    assert error["code"] == "adapter_rank_exceeded"
    change_config(folder, r=4)
    assert (
        "has shape" in adapted.refused(LOAD, 400, lora_name="a", lora_path=str(folder))["message"]
    )
    (folder / "adapter_model.safetensors").write_bytes(b"\x08")
    adapted.refused(LOAD, 400, lora_name="a", lora_path=str(folder))
    adapted.refused(LOAD, 400, lora_name="a", lora_path=str(tmp_path / "none"))
    adapted.refused(LOAD, 400, lora_name="", lora_path=str(folder))
    adapted.refused(LOAD, 404, lora_name="a", lora_path=str(folder), model="other")
    assert adapted.refused(LOAD, 400, lora_name="a", lora_dir="x")["param"] == "lora_path"


def test_wrong_adapters_do_not_disturb_running_requests(adapted: Asker, tmp_path: Path) -> None:
    body = {**ASKED, "max_tokens": 30}
    alone = [adapted.ok(TEXT, **body, model=name)["choices"][0]["text"] for name in ("demo", HELD)]
    folders = [write_adapter(tmp_path / name, TINY, rank=2) for name in ("cut", "shape", "rank")]
    tensors = folders[0] / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-9])
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    change_tensors(folders[1], {f"{module}.lora_A.weight": np.ones((2, 3), np.float32)})
    change_config(folders[2], r=9)
    wrong = [
        (LOAD, {"lora_name": "a", "lora_path": str(folder)})
        for folder in (*folders, tmp_path / "none")
    ]
    wrong += [(TEXT, {**ASKED, "model": "other"}), (UNLOAD, {"lora_name": "other"})]
    right = [(TEXT, {**body, "model": name}) for name in ("demo", HELD)]
    each = [*right, *wrong, *right]
    answers = adapted.all(*(("POST", path, {"json": record}) for path, record in each))
    texts = [answer.json()["choices"][0]["text"] for answer in (*answers[:2], *answers[-2:])]
    assert texts == alone * 2
    refused = [error_of(a, status) for a, status in zip(answers[2:-2], WRONG, strict=True)]
    assert len({error["message"] for error in refused}) == len(wrong), "an error of its own"


def test_an_adapter_in_use_stays(adapted: Asker) -> None:
    llm, refused = adapted.llm, []
    stream = llm.stream("A B C", lora=HELD)
    next(stream)
    refused.append(adapted.refused(UNLOAD, 409, lora_name=HELD))
    found = samples(adapted)
    stream.close()
    assert refused[0]["code"] == "adapter_in_use"
    assert found["enginebay:lora_requests_running lora_name=tales"] == 1
    info = next(name for name in found if name.startswith("enginebay:lora_requests_info"))
    assert "running_lora_adapters=tales" in info


def test_what_happens_in_slots_is_counted(adapted: Asker, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path / "a", TINY, seed=3))
    before = samples(adapted)
    for name in "ab":
        adapted.ok(LOAD, lora_name=name, lora_path=folder)
    assert samples(adapted)["enginebay:lora_adapters_loaded"] == 3
    for name in (HELD, "a", "b"):
        text_of(adapted, name)
    after = samples(adapted)
    assert (
        after["enginebay:lora_slot_evictions_total"] > before["enginebay:lora_slot_evictions_total"]
    )
    assert (
        after["enginebay:lora_slot_writes_total"] >= before["enginebay:lora_slot_writes_total"] + 2
    )
    for name in "ab":
        adapted.ok(UNLOAD, lora_name=name)


def test_the_routes_are_off_unless_they_are_allowed(adapted_llm: LLM, asker: Asker) -> None:
    closed = Asker(adapted_llm)
    for path in (LOAD, UNLOAD):
        closed.refused(path, 404, lora_name="a", lora_path="b")
        assert path not in closed.get("/openapi.json").json()["paths"]
    allowed = Asker(asker.llm, lora_routes=True)  # an engine without slots
    assert allowed.refused(LOAD, 409, lora_name="a", lora_path="b")["code"] == (
        "adapter_count_exceeded"
    )
    assert not [name for name in samples(allowed) if name.startswith("enginebay:lora")]
