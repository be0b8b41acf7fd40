"""The figures that `enginebay explain` prints are those of a running engine of the same plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from enginebay.compose.composition import build, make_plan
from enginebay.compose.stored_bytes import count_stored_bytes
from enginebay.config import EngineConfig
from tests.brief import BRIEF

Run = Callable[..., tuple[int, str, str]]
ENGINES = ["oengine", "vinference"]


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_of_a_token_times_the_tokens_is_the_cache(engine: str) -> None:
    plan = make_plan(EngineConfig(model=BRIEF, engine=engine, max_model_len=1024))
    made = build(plan).engine
    try:
        stored = count_stored_bytes(plan)
        held = made.ledger.num_free_tokens * stored.cache_of_token
        assert stored.cache_of_token > 0
        assert held == pytest.approx(made.memory.cache_bytes, rel=0.01)
        assert stored.weights == made.memory.weights_bytes
    finally:
        made.close()


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_cache_that_does_not_fit_is_refused_as_generate_does(
    run: Run, more: tuple[str, ...]
) -> None:
    flags = ("--set", "engine.cache_bytes=900000000000000", "--max-model-len", "64")
    code, out, err = run("explain", *flags, *more)
    assert code == 2
    assert "do not fit the device" in err
    assert "cache" in out
    code, _, same = run("generate", "x", *flags)
    # Engines of other tests in this process are named by generate alone.
    assert (code, same.partition(" do not fit")[0]) == (2, err.partition(" do not fit")[0])
