"""Sampling that a checkpoint's generation_config.json recommends: read, applied per field in every
face, shown.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.sampling_defaults import choose_sampling_defaults
from enginebay.config import make_config
from enginebay.errors import CheckpointError
from enginebay.serving.loop import EngineLoop
from enginebay.types import FrozenSampling
from enginebay_esurge import eSurge
from enginebay_models.sampling_defaults import read_sampling_defaults
from enginebay_models.source import CheckpointSource
from enginebay_vinference import InferenceWarning, vInference
from tests.brief import BRIEF
from tests.unit.esurge.small import OPTIONS
from tests.unit.serving import SIZES, SIZES_OF_APIS
from tests.unit.vinference.small import CONFIG

pytestmark = pytest.mark.xdist_group("llm")

SAMPLED: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.25,
    "max_new_tokens": 9,
    "eos_token_id": 2,
}
READ = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.25, "max_tokens": 9}
IDS = [5, 6, 7]


def write(folder: Path, generation: object) -> Path:
    """A folder of the brief model with another generation_config.json."""
    folder.mkdir(exist_ok=True)
    for file in Path(BRIEF).iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("models") / "sampled", SAMPLED))


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch, faked: None) -> list[FrozenSampling]:
    """How each request was sampled that reached a loop; engines are fake ones."""
    found: list[FrozenSampling] = []
    submit = EngineLoop.submit

    def noted(loop: EngineLoop, requests: Any, *others: Any) -> Any:
        listed = list(requests)
        found.extend(request.sampling for request in listed)
        return submit(loop, listed, *others)

    monkeypatch.setattr(EngineLoop, "submit", noted)
    return found


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        (SAMPLED, READ),
        ({"temperature": 0.6, "top_p": 0.5}, {"top_p": 0.5}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": None, "top_k": None, "repetition_penalty": 1.0, "num_beams": 4}, {}),
        (
            {"typical_p": 0.5, "no_repeat_ngram_size": 3, "min_p": 0.1},
            {"typical_p": 0.5, "no_repeat_ngram_size": 3, "min_p": 0.1},
        ),
        ({}, {}),
    ],
)
def test_fields_that_the_file_names_are_read(
    tmp_path: Path, generation: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_sampling_defaults(tmp_path) == wanted


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_sample": True, "temperature": "hot"},
        {"do_sample": True, "temperature": float("inf")},
        {"do_sample": "yes"},
        {"top_p": 0.0},
        {"top_k": [5]},
        {"repetition_penalty": -1},
        {"max_new_tokens": 2.5},
    ],
)
def test_values_that_no_request_may_have_are_refused_unless_none_are_wanted(
    tmp_path: Path, wrong: Any
) -> None:
    source = CheckpointSource(str(write(tmp_path / "model", wrong)))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        choose_sampling_defaults(make_config({}), source, (), greedy_only=False)
    none = choose_sampling_defaults(
        make_config({"generation_config": "none"}), source, (), greedy_only=False
    )
    assert none.values == {}


def test_what_the_parts_cannot_apply_is_left_out_with_the_reason(tmp_path: Path) -> None:
    source = CheckpointSource(str(write(tmp_path / "model", SAMPLED | {"typical_p": 0.5})))
    found = choose_sampling_defaults(make_config({}), source, (), greedy_only=True)
    assert found.values == {name: READ[name] for name in ("top_k", "top_p", "max_tokens")}
    assert found.reason.chosen == "top_k 20, top_p 0.95, max_tokens 9"
    assert {name for name, _ in found.reason.refused} == {
        "temperature",
        "repetition_penalty",
        "typical_p",
    }
    able = choose_sampling_defaults(
        make_config({}), source, ("penalties", "typical"), greedy_only=False
    )
    assert able.values == READ | {"typical_p": 0.5}
    named = SamplingParams(processors={"typical": {"typical_p": 0.9}})
    assert "typical_p" not in able.missing_in(named), "the request asks for this processor itself"


def frozen(found: FrozenSampling) -> dict[str, Any]:
    values = {name: getattr(found.params, name) for name in READ}
    return values | {"max_tokens": found.max_tokens}


NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
PER_FIELD: list[tuple[Any, dict[str, Any]]] = [
    (None, READ),
    ({}, READ),
    (SamplingParams(), READ),
    (SamplingParams(temperature=0.0), READ | {"temperature": 0.0}),
    ({"top_p": 1.0, "top_k": 0}, READ | {"top_p": 1.0, "top_k": 0}),
    (SamplingParams(max_tokens=4), READ | {"max_tokens": 4}),
    (SamplingParams(**SamplingParams().model_dump()), NEUTRAL | {"max_tokens": 64}),
]


def test_a_field_that_the_caller_left_out_has_the_checkpoints_value(
    folder: str, queued: list[FrozenSampling]
) -> None:
    with LLM(folder, **SIZES) as llm:
        for params, wanted in PER_FIELD:
            before = params.model_copy() if isinstance(params, SamplingParams) else None
            llm.generate([IDS], params)
            assert frozen(queued.pop()) == wanted, params
            assert before is None or before.model_fields_set == params.model_fields_set
        llm.generate([IDS], SamplingParams(temperature=0.0))
        assert queued.pop().is_greedy
        [output] = llm.generate([[5] * 155], {"ignore_eos": True})
        assert queued.pop().max_tokens == output.num_generated_tokens == 5, (
            "what the context has room for"
        )
    with LLM(folder, generation_config="none", **SIZES) as llm:
        llm.generate([IDS])
        assert frozen(queued.pop()) == NEUTRAL | {"max_tokens": 64}


def test_every_call_of_an_llm_is_sampled_alike(folder: str, queued: list[FrozenSampling]) -> None:
    async def collect(chunks: Any) -> list[Any]:
        return [chunk async for chunk in chunks]

    chat = [{"role": "user", "content": "Hello"}]
    with LLM(folder, **SIZES) as llm:
        calls: list[Callable[[], Any]] = [
            lambda: llm.generate([IDS, IDS], [None, {}]),
            lambda: list(llm.stream(IDS)),
            lambda: llm.chat(chat),
            lambda: list(llm.chat_stream(chat)),
            lambda: asyncio.run(llm.agenerate([IDS])),
            lambda: asyncio.run(collect(llm.astream(IDS))),
            lambda: asyncio.run(llm.achat(chat)),
        ]
        for call in calls:
            call()
    assert [frozen(one) for one in queued] == [READ] * (len(calls) + 1)


@pytest.fixture
def service(folder: str, queued: list[FrozenSampling]) -> Iterator[eSurge]:
    with eSurge(folder, **OPTIONS) as made:
        yield made


def test_esurge_has_its_documented_length_and_the_checkpoints_sampling(
    service: eSurge, queued: list[FrozenSampling]
) -> None:  # holds S05
    sampled = READ | {"max_tokens": 128}
    for params in (None, {}, SamplingParams()):
        service.generate([IDS], params)
        assert frozen(queued.pop()) == sampled, params
    service.generate([IDS], SamplingParams(max_tokens=None))
    assert queued.pop().max_tokens == 144 - len(IDS), "what there is room for"
    list(service.stream([IDS], SamplingParams(temperature=0.0)))
    assert frozen(queued.pop()) == sampled | {"temperature": 0.0}
    service.set_sampling_params_callback(lambda params, _: setattr(params, "top_k", 3))
    service.generate([IDS])
    assert frozen(queued.pop()) == sampled | {"top_k": 3}, "what a callback sets counts as set"
    service.set_sampling_params_callback(lambda *_: SamplingParams())
    service.generate([IDS])
    assert frozen(queued.pop()) == sampled


def test_vinference_has_its_documented_length_and_the_checkpoints_sampling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # holds V21
    model = {"model": str(write(tmp_path / "m", SAMPLED | {"typical_p": 0.5}))} | SIZES_OF_APIS
    inference = vInference(model, None, CONFIG)
    assert "typical_p of generation_config.json is not applied" in caplog.text
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.25}
    for params, changed in ((None, {}), (SamplingParams(temperature=0.0), {"temperature": 0.0})):
        with pytest.warns(InferenceWarning, match="nothing is precompiled"):
            state = inference.init_state(np.asarray([IDS]), sampling_params=params)
        sampling = state.model_kwargs["sampling"]
        columns = {name: np.asarray(values)[0].item() for name, values in sampling.items()
                   if name in wanted or name == "max_length"}  # fmt: skip
        assert columns == pytest.approx(
            wanted | changed | {"max_length": len(IDS) + CONFIG.max_new_tokens}
        )


@pytest.mark.usefixtures("faked")
def test_explain_and_json_show_what_was_applied(
    folder: str, run: Callable[..., tuple[int, str, str]], config: str
) -> None:
    sizes = ("--config", config, "--model", folder)
    code, out, _ = run("explain", "--json", *sizes)
    assert code == 0
    [choice] = [one for one in json.loads(out)["choices"] if one["setting"] == "generation_config"]
    assert sorted(choice["chosen"].split(", ")) == sorted(f"{n} {v:g}" for n, v in READ.items())
    _, out, _ = run("generate", "Once", "--json", "--top-k", "5", *sizes)
    applied = json.loads(out)["sampling_defaults"]
    assert applied == {name: value for name, value in READ.items() if name != "top_k"}
    _, out, _ = run("generate", "Once", "--json", "--generation-config", "none", *sizes)
    assert "sampling_defaults" not in json.loads(out)


@pytest.mark.parametrize(
    ("has_file", "reason"),
    [
        (True, "generation_config.json names no sampling"),
        (False, "there is no generation_config.json"),
    ],
)
def test_explain_says_whether_there_is_a_file(
    run: Callable[..., tuple[int, str, str]],
    config: str,
    tmp_path: Path,
    has_file: bool,
    reason: str,
) -> None:
    folder = write(tmp_path / "model", {"eos_token_id": 2})
    if not has_file:
        (folder / "generation_config.json").unlink()
    code, out, _ = run("explain", "--json", "--config", config, "--model", str(folder))
    assert code == 0
    [choice] = [one for one in json.loads(out)["choices"] if one["setting"] == "generation_config"]
    assert (choice["chosen"], choice["why"]) == ("none", reason)


def test_the_demo_model_stays_greedy() -> None:
    assert read_sampling_defaults(CheckpointSource("demo").folder) == {}
