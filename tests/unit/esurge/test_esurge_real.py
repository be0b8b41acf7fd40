"""eSurge on a real engine: LLM's tokens, programs that are compiled ahead, a cache that is freed,
and other weights in place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest

from enginebay import LLM
from enginebay.contracts.model import Model
from enginebay_esurge import NotRunningError, eSurge
from enginebay_models.source import CheckpointSource
from tests.brief import BRIEF
from tests.unit.esurge.small import (
    GREEDY_ON,
    HOT,
    HOT_ON,
    LONG,
    PROMPT,
    PROMPTS,
    REAL,
    Preemptions,
    Slow,
    token_ids,
    with_,
)

if TYPE_CHECKING:
    from tests.pool import EnginePool

pytestmark = pytest.mark.xdist_group("esurge")
Make = Callable[..., AbstractContextManager[eSurge]]


def test_tokens_and_texts_are_those_of_an_llm(
    make_real: Make, engine_pool: EnginePool
) -> None:  # holds S05, S06
    several = with_(HOT, n=2, seed=5)
    both = [GREEDY_ON, HOT_ON]
    with make_real() as engine:
        config = engine.plan.config
        alone = [engine.generate(prompt, params)[0] for params in both for prompt in PROMPTS]
        together = [output for params in both for output in engine.generate(PROMPTS, params)]
        streams = [engine.stream(prompt, params) for params in both for prompt in PROMPTS]
        streamed = ["".join(update.delta_text for update in stream) for stream in streams]
        made = engine.generate(PROMPT, several)[0]
    with engine_pool.leases(), LLM(config=config) as llm:
        expected = [out.outputs[0] for params in both for out in llm.generate(PROMPTS, params)]
        expected_several = llm.generate(PROMPT, several)[0]
    assert token_ids(alone) == token_ids(together) == [one.token_ids for one in expected]
    assert streamed == [one.text for one in expected]
    assert [(c.index, c.token_ids) for c in made.outputs] == [
        (c.index, c.token_ids) for c in expected_several.outputs
    ]


def test_too_few_pages_preempt_and_known_beginnings_are_not_computed_again(
    real_engine: eSurge,
) -> None:  # holds S19, S20
    params = with_(HOT_ON, max_tokens=None)
    alone = [real_engine.generate(prompt, params)[0] for prompt in PROMPTS]
    preemptions = Preemptions(real_engine)
    together = real_engine.generate(PROMPTS, params)
    assert max(preemptions.fewest) > 0, "some had tokens"
    assert token_ids(together) == token_ids(alone)
    ids = list(range(500, 560))
    cold, warm = (real_engine.generate([ids], HOT_ON)[0] for _ in range(2))
    assert [o.metrics["cached_tokens"] for o in (cold, warm) if o.metrics] == [0, 48]
    assert token_ids([warm]) == token_ids([cold])


def test_every_program_is_compiled_ahead_and_another_is_an_error(real_engine: eSurge) -> None:
    compilations = real_engine.engine.compilations
    count = compilations.count
    assert count >= len(real_engine.engine.geometry.all_steps())
    real_engine.generate(
        [*PROMPTS, "The little fox and the dog ran up the hill to see the sun"], HOT
    )
    real_engine.generate([list(range(500, 560))], with_(LONG, n=4))
    assert (compilations.count, compilations.forbidden) == (count, True)


def test_stopping_and_starting_compiles_nothing_and_an_idle_pause_frees_the_cache(
    real_engine: eSurge,
) -> None:  # holds S09
    engine = real_engine.engine
    wanted = token_ids(real_engine.generate(PROMPTS, HOT_ON))
    count = engine.compilations.count
    for go_on in (real_engine.resume, real_engine.initiate):
        real_engine.pause()
        real_engine.pause()
        assert not engine.executor.has_state
        go_on()
        assert token_ids(real_engine.generate(PROMPTS, HOT_ON)) == wanted
    real_engine.pause()
    real_engine.terminate()
    real_engine.initiate()
    assert token_ids(real_engine.generate(PROMPTS, HOT_ON)) == wanted
    slow = Slow()
    real_engine.audience.add(slow)
    stream = real_engine.stream(PROMPT, LONG)
    next(stream)
    real_engine.pause()
    assert real_engine.num_running_requests == 1
    assert engine.executor.has_state, "a row is running: its cache stays"
    stream.close()
    real_engine.resume()
    real_engine.audience.remove(slow)
    assert engine.compilations.count == count


class Shrunk(CheckpointSource):
    """The model, whose feed-forward weights are half of what they are."""

    def load_weights(self, model: Model, **how: Any) -> dict[str, Any]:
        return {p: change(p, w) for p, w in super().load_weights(model, **how).items()}


def change(path: str, weight: jax.Array) -> jax.Array:
    """Computed on the host, and put where it was: no program is compiled for it."""
    return jax.device_put(np.asarray(weight) * 0.5, weight.sharding) if "mlp" in path else weight


def shrink(engine: eSurge) -> dict[str, Any]:
    """The weights that Shrunk has and an engine has not, by path."""
    weights = engine.engine.executor.weights()
    return {path: change(path, weight) for path, weight in weights.items() if "mlp" in path}


@pytest.mark.long
def test_new_weights_give_what_a_fresh_engine_gives_and_compile_nothing(
    real_engine: eSurge,
) -> None:  # holds S17
    ids = list(range(500, 560))
    params = with_(HOT_ON, max_tokens=8)
    model = Shrunk(BRIEF)
    with pytest.raises(ValueError, match="tokenizer"):
        eSurge(model, **REAL)
    with eSurge(model, model.load_tokenizer().inner, **REAL | {"compile_runner": False}) as fresh:
        wanted = fresh.generate([ids], params)[0]
    old = real_engine.generate([ids], params)[0]
    assert token_ids([wanted]) != token_ids([old])
    count = real_engine.engine.compilations.count
    real_engine.update_model_weights(graphstate=shrink(real_engine))
    new = real_engine.generate([ids], params)[0]
    assert token_ids([new]) == token_ids([wanted])
    assert new.metrics is not None
    assert new.metrics["cached_tokens"] == 0, "nothing is found of what the old weights computed"
    real_engine.terminate()
    real_engine.update_model_weights(BRIEF)
    assert_stopped(real_engine)
    real_engine.initiate()
    assert token_ids(real_engine.generate([ids], params)) == token_ids([old])
    assert real_engine.engine.compilations.count == count
    real_engine.update_model_weights(BRIEF, restart_scheduler=False)
    assert_stopped(real_engine)
    real_engine.initiate()


def assert_stopped(engine: eSurge) -> None:
    with pytest.raises(NotRunningError, match=r"initiate\(\)"):
        engine.generate(PROMPT)


def test_weights_that_do_not_fit_are_refused(real_engine: eSurge) -> None:  # holds S17
    wanted = token_ids(real_engine.generate(PROMPT, HOT_ON))
    with pytest.raises(ValueError, match="no weights"):
        real_engine.update_model_weights()
    path, weight = next(iter(real_engine.engine.executor.weights().items()))
    for wrong in ({"no.such": weight}, {path: np.zeros((3, 3), np.float32)}):
        with pytest.raises(ValueError, match="weight"):
            real_engine.update_model_weights(graphdef=object(), graphother=wrong)
    real_engine.update_model_weights(graphdef=object())
    assert token_ids(real_engine.generate(PROMPT, HOT_ON)) == wanted
