"""A step of small programs computes what the program of the whole step does, which takes its place
later.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.ops.bound import LAYER_CALL
from enginebay_runtime import local
from enginebay_runtime.background import AfterRuns, Background
from enginebay_runtime.compiling import is_final
from enginebay_runtime.layered import MIN_LAYERS, LayeredStep, split_step
from enginebay_runtime.local import LocalExecutor
from tests.brief import TINY
from tests.pool import few_sizes
from tests.unit.checkpoints import model_of, random_tensors, write

WIDTH = 4


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def step(layers: str) -> Any:
    """A function like a step: it donates a cache, and has a constant and an unchanged result.
    `layers`: a letter for each; those with the same letter compute the same.
    """
    table = np.arange(WIDTH, dtype=np.float32)
    num_layers = len(layers)

    def call(letter: str) -> Any:
        def layer(weight: jax.Array, x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(x @ weight) + ord(letter), cache.at[0].add(x[0])

        layer.__name__ = LAYER_CALL
        return jax.jit(layer)

    calls = {letter: call(letter) for letter in layers}

    def run(weights: Any, state: Any, changes: Any, inputs: jax.Array) -> Any:
        x = inputs + table
        caches = []
        for letter, weight, cache in zip(layers, weights, state["caches"], strict=True):
            x, cache = calls[letter](weight, x, cache)
            caches.append(cache)
        return {"caches": caches, "kept": state["kept"]}, (x * 2, 3, changes["a"])

    arguments = (
        [shape(WIDTH, WIDTH)] * num_layers,
        {"caches": [shape(3, WIDTH)] * num_layers, "kept": shape(2)},
        {"a": shape(1)},
        shape(2, WIDTH),
    )
    return run, jax.jit(run, donate_argnums=1).trace(*arguments), arguments


def values(arguments: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), arguments)


GROUPS = {
    "a" * 8: (4, 2),
    "a" * 30: (6, 5),
    "a" + "b" * 29: (8, 6),
    "aaaab" * 6: (6, 5),
    "abcdefgh": (1, 8),
    "abcdefghij": (1, 10),
}
"""Layers, how many calls they become, and how many layers the different groups have."""


@pytest.mark.parametrize("layers", GROUPS)
@pytest.mark.parametrize("waits", [False, True])
def test_a_layered_step_computes_the_same_in_place(layers: str, waits: bool) -> None:
    run, traced, arguments = step(layers)
    calls, pieces = split_step(traced)  # type: ignore[misc]
    calls = dataclasses.replace(calls, waits=waits)
    num_calls, num_layers = GROUPS[layers]
    assert len(calls.calls) == num_calls + 2, "something before the layers, and after them"
    _before, *groups, _after = pieces
    assert sum(len(group.shapes) // 2 for group in groups) == num_layers
    layered = LayeredStep(calls, [piece.lower().compile() for piece in pieces])
    given, wanted = values(arguments), run(*values(arguments))
    got = layered(*given)
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert all(cache.is_deleted() for cache in given[1]["caches"]), "the state is donated"
    others = jax.tree.leaves((given[0], given[2], given[3]))
    assert not any(array.is_deleted() for array in others)
    np.testing.assert_allclose(layered(*values(arguments))[1][0], wanted[1][0], rtol=1e-6)


def test_a_stored_step_computes_the_same() -> None:
    """Its constants survive pickle, which breaks those that JAX holds."""
    run, traced, arguments = step("a" * 8)
    calls, pieces = split_step(traced)  # type: ignore[misc]
    assert len(calls.constants) == 2, "an array and a number"
    programs = [piece.lower().compile() for piece in pieces]
    stored = LayeredStep(pickle.loads(pickle.dumps(calls)), programs)
    for one, other in zip(
        jax.tree.leaves(stored(*values(arguments))),
        jax.tree.leaves(run(*values(arguments))),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert {type(each) for each in calls.constants} == {np.ndarray}


def test_what_is_between_layers_is_not_shared() -> None:
    """Two pieces begin with the same jitted function, and go on differently."""
    same = jax.jit(lambda x: x + 1)

    def run(x: jax.Array) -> jax.Array:
        layer: Any = functools.partial(jnp.tanh)
        layer.__name__ = LAYER_CALL
        layer = jax.jit(layer)
        return same(layer(same(layer(same(x) * 2)) * 3)) * 5

    calls, pieces = split_step(jax.jit(run).trace(shape(2)))  # type: ignore[misc]
    assert [call.program for call in calls.calls] == [0, 1, 2, 1, 3]
    layered = LayeredStep(calls, [piece.lower().compile() for piece in pieces])
    x = jnp.asarray([0.1, -0.4])
    np.testing.assert_allclose(layered(x), run(x), rtol=1e-6)


def test_a_step_without_shared_calls_stays_whole() -> None:
    assert split_step(jax.jit(jnp.sin).trace(shape(2))) is None


def test_a_job_begins_after_its_runs() -> None:
    done: list[str] = []
    after = AfterRuns(3, "test")
    for _ in range(5):
        after.count("often", lambda: lambda: done.append("often"))
    after.count("once", lambda: lambda: done.append("once"))
    for _ in range(2):
        after.count("long", lambda: lambda: done.append("long"), 2)
    after.stop()
    assert sorted(done) == ["long", "often"]


IDS = ([1, 2, 3, 4, 5, 6, 7] * 5, [9, 10], [30])
REQUESTS = (
    SamplingParams(max_tokens=12, temperature=0, logprobs=2),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3, logit_bias={5: 1.0}),
)


def tokens(llm: LLM) -> list[Any]:
    found = [llm.generate([list(ids) for ids in IDS], one) for one in REQUESTS]
    return [o.outputs[0].token_ids for outputs in found for o in outputs]


def programs(llm: LLM) -> list[Any]:
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor)
    return [executor._programs[name] for name in executor._programs]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["oengine", pytest.param("vinference", marks=pytest.mark.slow)])
def test_requests_get_the_same_from_layered_and_whole_steps(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"num_hidden_layers": MIN_LAYERS, "vocab_size": 96}
    write(tmp_path, random_tensors(model_of(**fields)), **fields)
    shutil.copy(Path(TINY) / "tokenizer.json", tmp_path)
    sizes: dict[str, Any] = {
        "engine": engine,
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "decode_steps": 4,
    }
    with few_sizes(), LLM(str(tmp_path), **sizes, forbid_compiling=True) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(Background, "start", lambda _: None)
            llm.warmup(background=True)
        assert any(isinstance(each, LayeredStep) for each in programs(llm))
        first = tokens(llm)
        assert llm.later_compilation is not None
        llm.later_compilation.start()
        assert llm.later_compilation.wait()
        assert all(map(is_final, programs(llm))), "the whole programs took their places"
        assert tokens(llm) == first
    monkeypatch.setattr(local, "WHOLE_AFTER", 3)
    with few_sizes(), LLM(str(tmp_path), **sizes) as needed:
        executor = needed.engine.executor
        assert isinstance(executor, LocalExecutor)
        assert tokens(needed) == first
        assert any(isinstance(each, LayeredStep) for each in programs(needed))
        executor._layered_runs.stop()
        decodes = [key for key in executor.programs if key.kind != "prefill"]
        assert not any(map(executor._lacks, decodes)), "they ran often"
        assert tokens(needed) == first
