"""eSurge's log-probabilities: asked for by a request or told of every one, whole and in parts,
preempted or not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from enginebay.errors import RequestError
from enginebay.outputs import CompletionOutput
from enginebay_esurge import eSurge
from tests.brief import BRIEF
from tests.unit.esurge.small import (
    GREEDY_ON,
    HOT,
    HOT_ON,
    PROMPT,
    PROMPTS,
    REAL,
    Preemptions,
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
    chosen = [
        one[token] for one, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    assert completion.cumulative_logprob == sum(chosen)
    assert all(value <= 0 for value in chosen)


def assert_close(one: CompletionOutput, other: CompletionOutput) -> None:
    """The same values but for what neighbours in a batch change in a sum's order."""
    for told, expected in zip(one.logprobs or (), other.logprobs or (), strict=True):
        assert list(told.values()) == pytest.approx(list(expected.values()), abs=1e-4)


@pytest.mark.long
def test_outputs_and_parts_of_a_stream_tell_the_same(real_engine: eSurge) -> None:  # holds S01
    whole = real_engine.generate([PROMPT, "A"], with_(HOT, seed=4, n=2, logprobs=2))
    for output in whole:
        for completion in output.outputs:
            assert_complete(completion, 2)
    updates = list(real_engine.stream(PROMPT, with_(HOT, seed=4, n=2, logprobs=2)))
    for streamed, one in zip(updates[-1].outputs, whole[0].outputs, strict=True):
        assert streamed.token_ids == one.token_ids
        assert_close(streamed, one)
    for update in updates:
        for completion in update.outputs:
            assert_complete(completion, 2)
    plain = real_engine.generate(PROMPT, GREEDY_ON)[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_the_callback_can_ask_for_them(real_engine: eSurge) -> None:  # holds S01
    real_engine.set_sampling_params_callback(lambda params, _: setattr(params, "logprobs", 1))
    try:
        assert_complete(real_engine.generate(PROMPT, GREEDY_ON)[0].outputs[0], 1)
    finally:
        real_engine.set_sampling_params_callback(None)


def test_preempted_requests_keep_what_they_were_told(real_engine: eSurge) -> None:  # holds S01
    params = with_(HOT_ON, max_tokens=None, logprobs=3)
    alone = [real_engine.generate(prompt, params)[0] for prompt in PROMPTS]
    preemptions = Preemptions(real_engine)
    together = real_engine.generate(PROMPTS, params)
    assert max(preemptions.fewest) > 0, "some had been told tokens"
    assert token_ids(together) == token_ids(alone)
    for one, other in zip(together, alone, strict=True):
        assert_complete(one.outputs[0], 3)
        assert_close(one.outputs[0], other.outputs[0])


def test_sampler_metrics_tell_the_chosen_tokens_of_every_request(
    make_real: Callable[..., AbstractContextManager[eSurge]],
) -> None:  # holds S01, S03
    with make_real() as engine:
        plain = token_ids(engine.generate(PROMPT, HOT_ON))
    with make_real(sampler_metrics=True) as telling:
        every = telling.generate([PROMPT, PROMPT], HOT_ON)[0]
        asked = telling.generate(PROMPT, with_(HOT_ON, logprobs=2))[0]
    assert_complete(every.outputs[0], 0)
    assert_complete(asked.outputs[0], 2)
    assert token_ids([every]) == token_ids([asked]) == plain
    assert every.outputs[0].cumulative_logprob == pytest.approx(
        asked.outputs[0].cumulative_logprob, abs=1e-3
    )


def test_the_likeliest_completions_and_stop_sequences(
    real_engine: eSurge,
) -> None:  # holds G103, G104
    params = with_(HOT, seed=4, n=3, logprobs=0)
    made = real_engine.generate(PROMPT, params)[0]
    ranked = sorted(
        made.outputs, key=lambda one: -(one.cumulative_logprob or 0.0) / len(one.token_ids)
    )
    [chosen] = real_engine.generate(PROMPT, with_(HOT, seed=4, best_of=3))
    assert [(one.index, one.token_ids) for one in chosen.outputs] == [(0, ranked[0].token_ids)]
    assert (chosen.get_text(), chosen.outputs[0].logprobs) == (ranked[0].text, None)
    assert chosen.num_generated_tokens == made.num_generated_tokens
    with pytest.raises(RequestError, match="best_of = 3 with n = 1 in a stream"):
        real_engine.stream(PROMPT, with_(HOT, best_of=3))
    whole = made.outputs[0].token_ids
    ended = with_(HOT, seed=4, stop_words_ids=[whole[3:5]])
    assert real_engine.generate(PROMPT, ended)[0].outputs[0].token_ids == whole[:5]
    *_, last = real_engine.stream(PROMPT, ended)
    assert (last.outputs[0].token_ids, last.outputs[0].finish_reason) == (whole[:5], "stop")
    assert_idle(real_engine)


def test_prompts_are_told_where_programs_may_be_compiled(
    real_engine: eSurge,
) -> None:  # holds G101, G105
    for changes in ({"prompt_logprobs": 2}, {"logprobs": -1}):
        with pytest.raises(
            RequestError, match=r"with forbid_compiling.*full_vocab_logprobs = true"
        ):
            real_engine.generate(PROMPT, with_(GREEDY_ON, **changes))
    compiling = REAL | {"use_aot_forward": False, "compile_runner": False}
    with eSurge(BRIEF, **compiling) as free:
        params = with_(GREEDY_ON, max_tokens=3, prompt_logprobs=2)
        [output] = free.generate(PROMPT, params)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        for token, one in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert one is not None
            assert token in one
            assert len(one) in (2, 3)
        for update in free.stream(PROMPT, params):
            assert update.prompt_logprobs is not None
            assert [set(one or ()) for one in update.prompt_logprobs] == [
                set(one or ()) for one in output.prompt_logprobs
            ]
