"""LoRA on real engines: rows of one batch over several adapters give the tokens of merged
weights.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay_runtime.engine import StepEngine
from enginebay_testing.recording import recorded
from enginebay_testing.replay import replay_here
from tests.adapters import write_adapter, write_merged
from tests.brief import LEAST, TINY
from tests.unit.test_embed import GREEDY, PROMPTS, SIZES, PreemptsOnce

NAMES = ["a", "b", None, "c", "b"]
pytestmark = pytest.mark.usefixtures("few_sizes_module")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of different ranks, factors and layers."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_adapter(folder / "a", TINY, seed=1, rank=4, scale=2.0),
        "b": write_adapter(folder / "b", TINY, seed=2, rank=8, scale=2.0, use_rslora=True),
        "c": write_adapter(
            folder / "c", TINY, seed=3, rank=3, scale=4.0, targets=["v_proj", "down_proj"]
        ),
    }


@pytest.fixture(scope="module")
def expected(
    adapters: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, list[tuple[int, ...]]]:
    """The tokens of every prompt alone on merged weights, by name of the adapter."""
    folder = tmp_path_factory.mktemp("merged")
    models: dict[str | None, Any] = {
        name: write_merged(folder / name, TINY, adapter) for name, adapter in adapters.items()
    }
    found = {}
    for name, model in (models | {None: TINY}).items():
        with LLM(str(model), **SIZES) as llm:
            found[name] = tokens_of(llm)
    return found


def tokens_of(
    llm: LLM, names: Any = None, params: SamplingParams = GREEDY
) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, GREEDY, lora=names)
    return [tuple(one.outputs[0].token_ids) for one in outputs]


def make_llm(adapters: Mapping[str, Path], **fields: Any) -> LLM:
    folders = {name: str(folder) for name, folder in adapters.items()}
    return LLM(TINY, **(SIZES | {"lora": folders} | fields))


def mixed(expected: Mapping[str | None, list[tuple[int, ...]]], names: Any) -> list[Any]:
    """The tokens of prompt i on the merged weights of names[i]."""
    return [expected[name][i] for i, name in enumerate(names)]


@pytest.mark.long
def test_rows_over_several_adapters_give_the_tokens_of_merged_weights(
    adapters: Mapping[str, Path], expected: Mapping[str | None, list[tuple[int, ...]]]
) -> None:
    assert len({tuple(expected[name]) for name in expected}) == 4, "the adapters change the tokens"
    with make_llm(adapters, max_loras=2) as llm:  # three adapters take turns in two slots
        assert tokens_of(llm, NAMES) == mixed(expected, NAMES)
        assert tokens_of(llm, NAMES[::-1]) == mixed(expected, NAMES[::-1])
        assert tokens_of(llm) == expected[None]
        llm.generate(PROMPTS[4], GREEDY, lora="a")
        cached = [
            llm.generate(PROMPTS[4][:80], GREEDY, lora=name)[0].metrics.num_cached_tokens
            for name in ("a", "c", "c")
        ]
        assert cached == [64, 0, 64], "prefixes are not shared across adapters"


def calls_of(folder: Path, *, adapts: bool) -> dict[str, Counter[str]]:
    """The custom calls of the compiled steps by kind; of those with or those without adapters."""
    return {
        path.name.partition("-")[0]: Counter(
            re.findall(r'custom_call_target="([^"]+)"', path.read_text())
        )
        for path in folder.glob("*.hlo.txt")
        if ("adapters" in path.name) == adapts
    }


@pytest.mark.slow
def test_rows_without_adapters_run_the_steps_of_the_model_alone(
    adapters: Mapping[str, Path], tmp_path: Path
) -> None:
    params = GREEDY.model_copy(update={"max_tokens": 2})
    calls = {}
    for name, loaded in (("slots", adapters), ("none", {})):
        folder = tmp_path / name
        with make_llm(loaded, dump_step=str(folder)) as llm:
            [first] = llm.generate([PROMPTS[0]], params)
            calls[name] = calls_of(folder, adapts=False)
            if loaded:
                [told] = llm.generate([PROMPTS[0]], params, lora="a")
                [again] = llm.generate([PROMPTS[0]], params)
                assert first.outputs[0].token_ids == again.outputs[0].token_ids
                assert told.outputs[0].token_ids != again.outputs[0].token_ids
    assert calls["slots"] == calls["none"]
    of_adapters = calls_of(tmp_path / "slots", adapts=True)
    assert of_adapters["decode"] > calls["slots"]["decode"], "the op lora"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"engine": "vinference"},
        {"engine": {"name": "oengine", "page_size": 8, "num_pages": 40}},
        {"proposer": "ngram"},
        {"mesh": {"tensor": 2}},
        {"mixed_steps": "on"},
        {"kernels": {"linear": "native"}},
        {"max_loras": 8},
        {"max_num_seqs": 1, "max_loras": 1},
    ],
    ids="-".join,
)
def test_other_engines_and_settings_give_the_same_tokens(
    adapters: Mapping[str, Path],
    expected: Mapping[str | None, list[tuple[int, ...]]],
    fields: dict[str, Any],
) -> None:
    with make_llm(adapters, **fields) as llm:
        for names in (NAMES, NAMES[::-1]):
            assert tokens_of(llm, names) == mixed(expected, names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"engine": "vinference"},
        {"proposer": "ngram"},
        {"mesh": {"tensor": 2}},
        {"mixed_steps": "on"},
        {"quantization": "int8"},
    ],
    ids="-".join,
)
def test_embeddings_and_heads_take_adapters(fields: dict[str, Any], tmp_path: Path) -> None:
    targets = ("embed_tokens", "lm_head", "v_proj")
    params = GREEDY.model_copy(update={"logprobs": 0, "prompt_logprobs": 0})
    folders = {
        name: write_adapter(tmp_path / name, TINY, seed=i, rank=3, scale=2.0, targets=targets)
        for i, name in enumerate("ab")
    }

    def found(llm: LLM, names: Any = None) -> list[Any]:
        outputs = llm.generate(PROMPTS, params, lora=names)
        return [(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    sizes = {**SIZES, "quantization": fields.get("quantization", "none")}
    expected: dict[str | None, list[Any]] = {}
    if "quantization" not in fields:
        for name, folder in folders.items():
            with LLM(str(write_merged(tmp_path / f"m-{name}", TINY, folder)), **sizes) as llm:
                expected[name] = found(llm)
    with LLM(TINY, **sizes) as llm:
        expected[None] = found(llm)
    lora = {name: str(folder) for name, folder in folders.items()}
    with LLM(TINY, **SIZES | fields, lora=lora, lora_targets=targets) as llm:
        names = ["a", "b", None, "a", "b"]
        each = found(llm, names)
        alone = [found(llm, name)[i] for i, name in enumerate(names)]
    for i, name in enumerate(names):
        wanted = expected[name][i] if name in expected else alone[i]
        assert each[i][1] == wanted[1]
        for one, other in zip((each[i][0], each[i][2]), (wanted[0], wanted[2]), strict=True):
            for told, asked in zip(one, other, strict=True):
                assert told == (None if asked is None else pytest.approx(asked, abs=1e-4))
    assert len({str(one[1]) for one in (each[3], expected[None][3])}) == 2


@pytest.mark.slow
def test_preempted_rows_find_their_adapter_again(
    adapters: Mapping[str, Path], expected: Mapping[str | None, list[tuple[int, ...]]]
) -> None:
    with make_llm(adapters, max_loras=3) as llm:
        llm.loop.scheduler = PreemptsOnce(llm.loop.scheduler)
        assert tokens_of(llm, NAMES) == mixed(expected, NAMES)
        assert not llm.engine.rows.adapters.any()


@pytest.mark.slow
def test_every_program_is_compiled_ahead(
    adapters: Mapping[str, Path], expected: Mapping[str | None, list[tuple[int, ...]]]
) -> None:
    with make_llm(adapters, max_loras=2, forbid_compiling=True) as llm:
        llm.warmup()
        assert tokens_of(llm, NAMES) == mixed(expected, NAMES)


@pytest.mark.slow
def test_hidden_states_are_those_of_the_adapter(
    adapters: Mapping[str, Path], tmp_path: Path
) -> None:
    merged = write_merged(tmp_path / "merged", TINY, adapters["a"])
    with LLM(str(merged), **SIZES) as llm:
        wanted = llm.embed(PROMPTS)
    with make_llm(adapters) as llm:
        for one, other in zip(llm.embed(PROMPTS, lora="a"), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_completions_of_a_prompt_share_its_adapter(adapters: Mapping[str, Path]) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3, ignore_eos=True)
    with make_llm(adapters) as llm:
        first, second = (
            [one.token_ids for one in llm.generate(PROMPTS[4], params, lora=name)[0].outputs]
            for name in ("a", "a")
        )
        other = [one.token_ids for one in llm.generate(PROMPTS[4], params)[0].outputs]
    assert first == second != other


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_weights_take_adapters(adapters: Mapping[str, Path], quantization: str) -> None:
    with make_llm(adapters, quantization=quantization) as llm:
        alone = [tokens_of(llm, name) for name in ("a", None)]
        assert alone[0] != alone[1]
        batch = tokens_of(llm, ["a", None, "a", None, "a"])
    assert batch == [alone[i % 2][i] for i in range(5)]


@pytest.mark.slow
def test_a_recorded_run_with_adapters_replays_bit_by_bit(
    adapters: Mapping[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "recording"
    with make_llm(adapters, max_loras=2) as llm, contextlib.ExitStack() as stack:
        engine = llm.engine
        assert isinstance(engine, StepEngine)
        llm.run_on_engine(lambda: stack.enter_context(recorded(engine, path)))
        tokens_of(llm, NAMES)
        llm.run_on_engine(stack.close)
    found = replay_here(path)
    assert found.num_steps > 0
    assert not found.different_steps
    assert found.arrays_are_equal


@pytest.mark.slow
def test_commands_use_the_adapter_of_the_command_line(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", LEAST, scale=2.0)
    merged = write_merged(tmp_path / "merged", LEAST, adapter)
    sizes = ("--max-model-len", "64", "--max-num-seqs", "1", "--dtype", "float32", "--json")
    models = {
        "plain": ("--model", LEAST),
        "merged": ("--model", str(merged)),
        "adapted": ("--model", LEAST, "--lora", f"tales={adapter}"),
    }

    def printed(*command: str) -> dict[str, Any]:
        found = {}
        for name, flags in models.items():
            code, out, err = run(*command, *flags, *sizes)
            assert code == 0, err
            found[name] = json.loads(out)
        return found

    texts = printed("generate", "Once upon a time", "--max-tokens", "6", "--temperature", "0")
    assert texts["adapted"]["token_ids"] == texts["merged"]["token_ids"]
    assert texts["adapted"]["token_ids"] != texts["plain"]["token_ids"]
    vectors = {
        name: np.asarray(one["embedding"]) for name, one in printed("embed", "Once upon").items()
    }
    np.testing.assert_allclose(vectors["adapted"], vectors["merged"], atol=1e-4)
    assert np.abs(vectors["adapted"] - vectors["plain"]).max() > 1e-2
    more = ("--lora", f"other={adapter}")
    code, _, err = run("generate", "Once", *models["adapted"], *more, *sizes[:-1])
    assert code == 2
    assert "2 adapters: tales, other. Allowed: one adapter for this command" in err
    code, _, err = run("generate", "Once", "--model", LEAST, "--lora", f"a={tmp_path}", *sizes[:-1])
    assert code == 2
    assert "adapter_config.json cannot be read" in err
