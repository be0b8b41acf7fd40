"""eSurge.override: the same swap as LLM's, whatever state the service is in."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

from enginebay.errors import IncorrectError, RequestError, StoppedError
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay_esurge import eSurge
from tests.unit.esurge.small import HOT_ON, LONG, PROMPT, token_ids, until, with_
from tests.unit.unregistered import garbage_attention, plain_attention

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("esurge")]
SHORT = with_(HOT_ON, max_tokens=6)


class Recorder:
    """The simple form, right, and the modes that it was traced for."""

    def __init__(self) -> None:
        self.modes: list[str] = []

    def __call__(
        self, q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, batch: AttnBatch, spec: AttnSpec
    ) -> jax.Array:
        self.modes.append(batch.bucket.mode)
        return plain_attention(q, k_pages, v_pages, batch, spec)


def tokens(engine: eSurge) -> list[list[int]]:
    return token_ids(engine.generate(PROMPT, SHORT))


def test_the_block_runs_the_function_through_pauses_and_the_former_programs_come_back(
    real_engine: eSurge,
) -> None:
    paged, plan = real_engine.engine, real_engine.plan
    expected = tokens(real_engine)
    function = Recorder()
    real_engine.pause()
    with real_engine.override(attention=function, check=False) as same:
        assert same is real_engine
        real_engine.resume()
        assert tokens(real_engine) == expected
        assert set(function.modes) == {"decode", "prefill"}
        assert real_engine.plan.kernels.names["attention.decode"] == "Recorder"
        real_engine.terminate()
    assert real_engine.plan is plan
    real_engine.initiate()
    compiled, traced = paged.compilations.count, len(function.modes)
    assert paged.compilations.forbidden
    assert tokens(real_engine) == expected
    assert (paged.compilations.count, len(function.modes)) == (compiled, traced), (
        "nothing is compiled anew"
    )


def test_a_wrong_one_is_refused_and_nothing_changes(real_engine: eSurge) -> None:
    parts = real_engine.engine.executor.parts
    with pytest.raises(IncorrectError, match="garbage_attention fails its quick check"):
        with real_engine.override(attention=garbage_attention):
            pytest.fail("the block was entered")
    assert real_engine.engine.executor.parts is parts


def test_requests_under_way_are_refused_at_the_beginning_and_ended_at_the_end(
    slow_real_engine: eSurge,
) -> None:
    ended: list[Any] = []

    def serve() -> None:
        try:
            ended.append(slow_real_engine.generate(PROMPT, LONG))
        except StoppedError as error:
            ended.append(error)

    stream = slow_real_engine.stream(PROMPT, LONG)
    next(stream)
    with (
        pytest.raises(RequestError, match="1 requests are running or waiting"),
        slow_real_engine.override(attention="xla"),
    ):
        pytest.fail("the block was entered")
    stream.close()
    until(lambda: not slow_real_engine.num_running_requests)
    with slow_real_engine.override(attention="xla"):
        other = threading.Thread(target=serve)
        other.start()
        until(lambda: slow_real_engine.num_running_requests)
    other.join(60)
    assert "the block of override" in str(ended[0])
