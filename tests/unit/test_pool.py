"""The pool of engines that tests lease from: one engine for equal configurations, clean when it
comes back, never a fake one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import tests.pool as tests_pool
from enginebay import LLM, SamplingParams, memory_maps
from enginebay_oengine import SequenceBuffer
from tests.brief import TINY
from tests.fake_engine import FakeEngine
from tests.fakes import install
from tests.pool import EnginePool
from tests.unit.serving import SIZES

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPT = list(range(20))


def serve(**choices: Any) -> tuple[Any, list[int], int]:
    """The engine, the tokens of a prompt, and how many of the prompt were found in the cache."""
    engine = {"name": "oengine", "options": {"page_size": 8, "num_pages": 25}}
    with LLM(TINY, engine=engine, **(SIZES | choices)) as llm:
        [output] = llm.generate([PROMPT], PARAMS)
        return llm.engine, output.outputs[0].token_ids, output.metrics.num_cached_tokens


@pytest.mark.long
def test_an_engine_comes_back_with_its_programs_and_without_its_cache() -> None:
    pool = EnginePool()
    with pool.leases():
        engine, tokens, _ = serve()
        count = engine.compilations.count
        assert serve()[0] is not engine, "a leased engine is not leased again"
    with pool.leases():
        again, same_tokens, num_cached = serve()
        assert (same_tokens, num_cached) == (tokens, 0)
        assert again.compilations.count == count
    assert (pool.num_made, pool.num_leased) == (2, 3)


@pytest.mark.long
def test_other_choices_are_another_engine() -> None:
    pool = EnginePool()
    with pool.leases():
        first = serve(processors=())[0]
    with pool.leases():
        assert serve(processors=(), seed=5)[0] is not first
    assert pool.num_made == 2


@pytest.mark.long
def test_an_engine_that_is_not_idle_is_refused() -> None:
    leases = EnginePool().leases()
    leases.__enter__()
    engine = serve()[0]
    SequenceBuffer.of(engine.rows).begin_sequence("left behind", [1, 2, 3])
    with pytest.raises(AssertionError, match="comes back with 1 rows"):
        leases.__exit__(None, None, None)


def test_fake_engines_are_not_kept() -> None:
    pool = EnginePool()
    with pool.leases(), pytest.MonkeyPatch.context() as patch:
        install(patch)
        assert isinstance(serve()[0], FakeEngine)
    assert (pool.num_made, pool.num_leased) == (0, 0)


@pytest.mark.long
def test_the_engine_that_came_back_first_leaves_a_full_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.pool.MAX_IDLE", 1)
    pool = EnginePool()
    for choices in ({"seed": 1}, {"seed": 5}):
        with pool.leases():
            engine = serve(processors=(), **choices)[0]
    with pool.leases():
        assert serve(processors=(), seed=5)[0] is engine
    with pool.leases():
        assert serve(processors=(), seed=1)[0] is not engine
    assert (pool.num_made, pool.num_leased) == (3, 4)


ALONE = """
from tests.pool import EnginePool
with EnginePool().leases():
    pass
import enginebay.compose.composition, enginebay_vinference.loaded_model
found = enginebay_vinference.loaded_model.make_engine
assert found is enginebay.compose.composition.make_engine, found
"""


def test_idle_engines_leave_when_programs_take_most_memory_maps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each engine here takes a third of the maps, and a module leaves room for the next one."""
    pool, forgotten = EnginePool(), []
    monkeypatch.setattr(tests_pool, "POOLS", [pool])
    monkeypatch.setattr(tests_pool, "_counted", [0])
    monkeypatch.setattr(tests_pool, "num_programs", lambda: tests_pool.MANY_PROGRAMS)
    monkeypatch.setattr("gc.collect", lambda: 0)  # of the objects of all tests: seconds
    monkeypatch.setattr(jax, "clear_caches", lambda: forgotten.append(1))
    left = [f"engine {number}" for number in range(3)]

    class Idle:
        def __init__(self, name: str) -> None:
            self.close = lambda: left.remove(name)

    for name in left:
        engine: Any = Idle(name)
        pool._free[(name,)] = [engine]
        pool._idle.append(((name,), engine))
    monkeypatch.setattr(tests_pool, "share_of_maps", lambda: len(left) / 3)
    tests_pool.make_room()
    assert (left, forgotten) == (["engine 2"], [])
    monkeypatch.setattr(tests_pool, "share_of_maps", lambda: 0.7)
    tests_pool.make_room()
    assert (left, forgotten) == (["engine 2"], [])  # nothing was compiled meanwhile
    monkeypatch.setattr(tests_pool, "num_programs", lambda: 2 * tests_pool.MANY_PROGRAMS)
    tests_pool.make_room()
    assert (left, forgotten) == ([], [1])
    monkeypatch.undo()
    assert 0 < tests_pool.share_of_maps() < 1 or not memory_maps.LIMIT.exists()


@pytest.mark.long
def test_what_a_module_names_is_as_it_was_after_leases(repo_root: Path) -> None:
    """Also in a process that has not imported the module before."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=repo_root, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
