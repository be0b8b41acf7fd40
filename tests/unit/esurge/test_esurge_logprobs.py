"""eSurge's log-probabilities: asked for by a request or told of every one, whole and in parts, preempted or not."""

from __future__ import annotations

import pytest

from enginebay.loop.book import Tracked
from enginebay.types import CompletionOutput
from enginebay_esurge import eSurge
from tests.unit.esurge.small import (
    GREEDY_ON,
    HOT,
    LONG,
    OPTIONS,
    PROMPT,
    PROMPTS,
    assert_idle,
    token_ids,
    with_,
)

pytestmark = pytest.mark.xdist_group("esurge")


def assert_complete(completion: CompletionOutput, num_best: int) -> None:
    """An entry for each token, with it among as many as were asked for, and their sum."""
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert {len(one) for one in completion.logprobs} <= {max(num_best, 1), num_best + 1}
    chosen = [one[token] for one, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == sum(chosen)
    assert all(value <= 0 for value in chosen)


def assert_close(one: CompletionOutput, other: CompletionOutput) -> None:
    """The same values but for what neighbours in a batch change in a sum's order."""
    for told, expected in zip(one.logprobs or (), other.logprobs or (), strict=True):
        assert list(told.values()) == pytest.approx(list(expected.values()), abs=1e-4)


def test_outputs_and_parts_of_a_stream_tell_the_same(engine: eSurge) -> None:  # holds S01
    whole = engine.generate([PROMPT, "A"], with_(HOT, seed=4, n=2, logprobs=2))
    for output in whole:
        for completion in output.outputs:
            assert_complete(completion, 2)
    updates = list(engine.stream(PROMPT, with_(HOT, seed=4, n=2, logprobs=2)))
    for streamed, one in zip(updates[-1].outputs, whole[0].outputs, strict=True):
        assert streamed.token_ids == one.token_ids
        assert_close(streamed, one)
    for update in updates:
        for completion in update.outputs:
            assert_complete(completion, 2)
    plain = engine.generate(PROMPT, GREEDY_ON)[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_the_callback_can_ask_for_them(engine: eSurge) -> None:  # holds S01
    engine.set_sampling_params_callback(lambda params, _: setattr(params, "logprobs", 1))
    try:
        assert_complete(engine.generate(PROMPT, GREEDY_ON)[0].outputs[0], 1)
    finally:
        engine.set_sampling_params_callback(None)


def test_preempted_requests_keep_what_they_were_told(
    engine: eSurge, monkeypatch: pytest.MonkeyPatch
) -> None:  # holds S01
    params = with_(LONG, logprobs=3)
    alone = [engine.generate(prompt, params)[0] for prompt in PROMPTS]
    preempted = []
    book = engine._service._loop._book  # type: ignore[union-attr]
    requeue = book.requeue

    def counted(tracked: Tracked) -> None:
        preempted.append(len(tracked.output))
        requeue(tracked)

    monkeypatch.setattr(book, "requeue", counted)
    together = engine.generate(PROMPTS, params)
    assert max(preempted, default=0) > 0, "some had been told tokens"
    assert token_ids(together) == token_ids(alone)
    for one, other in zip(together, alone, strict=True):
        assert_complete(one.outputs[0], 3)
        assert_close(one.outputs[0], other.outputs[0])


def test_sampler_metrics_tell_the_chosen_tokens_of_every_request(engine: eSurge) -> None:  # holds S01, S03
    options = OPTIONS | {"compile_runner": False}
    with eSurge("demo", sampler_metrics=True, **options) as telling:
        every, asked = (
            telling.generate([PROMPT, PROMPT], GREEDY_ON)[0],
            telling.generate(PROMPT, with_(GREEDY_ON, logprobs=2))[0],
        )
        assert_idle(telling)
    assert_complete(every.outputs[0], 0)
    assert_complete(asked.outputs[0], 2)
    assert token_ids([every]) == token_ids([asked]) == token_ids(engine.generate(PROMPT, GREEDY_ON))
    assert every.outputs[0].cumulative_logprob == pytest.approx(asked.outputs[0].cumulative_logprob, abs=1e-3)
