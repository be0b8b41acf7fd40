"""A process whose memory maps are used up compiles nothing, and lives."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from enginebay import LLM, SamplingParams, memory_maps
from enginebay.contracts.compilations import Compilations
from enginebay.errors import CompilationError
from enginebay_oengine.compiling import cjit
from enginebay_runtime.shadow import Shadow
from enginebay_runtime.small_programs import compiled_program
from enginebay_vinference.state_steps import Programs
from tests.brief import BRIEF
from tests.unit.serving import SIZES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux limits memory maps")

PARAMS = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Callable[[], pytest.MonkeyPatch]]:
    """What sets a limit of 100 maps, until it is undone."""
    limit = tmp_path / "max_map_count"
    limit.write_text("100\n")
    with pytest.MonkeyPatch.context() as patch:

        def set_limit() -> pytest.MonkeyPatch:
            patch.setattr(memory_maps, "LIMIT", limit)
            return patch

        yield set_limit


def test_a_request_that_needs_a_program_ends_with_the_reason_and_the_next_one_is_served(
    few: Callable[[], pytest.MonkeyPatch],
) -> None:
    with LLM(BRIEF, engine="oengine", **SIZES) as llm:
        reason = r"this process has \d+ memory maps.* at most 90\. .*vm\.max_map_count=400"
        patch = few()
        with pytest.raises(CompilationError, match=reason):
            llm.generate("Once upon a time", PARAMS)
        patch.undo()
        assert len(llm.generate("Once upon a time", PARAMS)[0].outputs[0].token_ids) == 4


def small_program() -> Any:
    executor: Any = SimpleNamespace(store=None, compile_options={}, compilations=Compilations())
    return compiled_program(executor, ("double",), jnp.negative, (jnp.ones(3),))


def function_of_shapes() -> Any:
    return cjit(jax.jit(jnp.negative))(jnp.ones(3))


def candidate_of_a_shadow() -> Any:
    shadow: Any = SimpleNamespace(_programs={})
    executor: Any = SimpleNamespace(compile_options={})
    return Shadow._run(shadow, executor, "key", "what", jnp.negative, (jnp.ones(3),))


def generation_of_a_state() -> Any:
    lowered = jax.jit(jnp.negative).lower(jnp.ones(3))
    parts: Any = SimpleNamespace(platform=SimpleNamespace(compile_options=dict))
    engine: Any = SimpleNamespace(parts=parts, compilations=Compilations())
    return Programs.compile_lowered(SimpleNamespace(engine=engine), [lowered, lowered])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "compiles",
    [small_program, function_of_shapes, candidate_of_a_shadow, generation_of_a_state],
)
def test_nothing_else_that_serves_is_compiled_either(
    few: Callable[[], pytest.MonkeyPatch], compiles: Callable[[], Any]
) -> None:
    patch = few()
    with pytest.raises(CompilationError, match="memory maps"):
        compiles()
    patch.undo()
    assert compiles() is not None


def test_the_maps_that_there_are_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_maps.require_maps("a step")
    monkeypatch.setattr(memory_maps, "SHARE", 0.0)
    with pytest.raises(CompilationError, match=r"a step is not compiled") as raised:
        memory_maps.require_maps("a step")
    found = re.search(r"has (\d+) memory maps", str(raised.value))
    assert found
    assert 50 < int(found[1]) < 10**6


def test_where_no_limit_is_told_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_maps, "LIMIT", tmp_path / "none")
    monkeypatch.setattr(memory_maps, "SHARE", 0.0)
    memory_maps.require_maps("a step")
