"""eSurge's requests on a fake engine: generate, stream and chat, by id, together, made to fit,
aborted, and their outputs.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from enginebay import SamplingParams
from enginebay_esurge import CompletionOutput, NoTemplateError, RequestOutput, eSurge
from tests.unit.esurge.small import (
    BUDGET,
    GREEDY,
    GREEDY_ON,
    HOT,
    LONG,
    PROMPT,
    PROMPTS,
    WAIT_S,
    Preemptions,
    assert_idle,
    foretold,
    token_ids,
    until,
    with_,
)
from tests.unit.serving import Endings

pytestmark = pytest.mark.xdist_group("esurge")
CHAT = [{"role": "user", "content": "Who are you?"}]


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions that run at once."""
    results: list[Any] = [None] * len(works)

    def run(place: int) -> None:
        results[place] = works[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return results


def test_outputs_have_the_documented_fields_and_defaults() -> None:  # holds S02
    wanted = {
        "finished": False,
        "metrics": None,
        "accumulated_text": "",
        "delta_text": "",
        "tokens_per_second": 0.0,
        "num_generated_tokens": 0,
        "time_spent_generating": 0.0,
        "first_token_time": None,
        "processing_time": 0.0,
        "update_seq": 0,
        "delta_seq": 0,
    }
    output = RequestOutput("a", "b", [1], [])
    names = [field.name for field in dataclasses.fields(output)]
    # prompt_logprobs is ours, behind those that are documented.
    first = ["request_id", "prompt", "prompt_token_ids", "outputs"]
    assert names == [*first, *wanted, "prompt_logprobs"]
    assert {name: getattr(output, name) for name in wanted} == wanted
    assert (output.get_text(), output.get_summary()["finish_reason"]) == ("", None)
    output.outputs = [CompletionOutput(0, "c", [3], finish_reason="stop")]
    summary = output.get_summary()
    assert (output.get_text(), summary["text"], summary["finish_reason"]) == ("c", "c", "stop")
    keys = [
        "request_id",
        "text",
        "tokens_per_second",
        "num_generated_tokens",
        "time_spent_generating",
    ]
    assert list(summary) == [*keys, "finished", "finish_reason"]


def test_outputs_come_in_the_order_of_the_prompts(engine: eSurge) -> None:  # holds S05
    for round_ in range(2):
        ids = [f"r{i}" for i in range(4)]
        outputs = engine.generate(PROMPTS, GREEDY, ids, use_tqdm=False)
        assert [output.request_id for output in outputs] == ids, (
            f"round {round_}: ids are free again"
        )
        assert [output.prompt for output in outputs] == PROMPTS
        assert all(output.finished and output.metrics for output in outputs)
    first = engine.generate(PROMPT, GREEDY)
    assert token_ids(first) == token_ids(outputs)[:1]
    assert token_ids(outputs) == [foretold(output) for output in outputs]
    assert len(engine.generate(PROMPT)[0].outputs[0].token_ids) == 128, "the documented default"
    assert engine.generate([]) == []


def test_the_last_to_finish_may_be_the_first_prompt(engine: eSurge) -> None:  # holds S05
    lengths = iter((40, 1))
    engine.set_sampling_params_callback(lambda params, _: with_(params, max_tokens=next(lengths)))
    try:
        outputs = engine.generate(PROMPTS[:2], GREEDY_ON)
    finally:
        engine.set_sampling_params_callback(None)
    assert [output.prompt for output in outputs] == PROMPTS[:2]
    assert [len(ids) for ids in token_ids(outputs)] == [40, 1]


def test_wrong_ids_prompts_and_parameters_are_refused_before_anything_is_queued(
    slow_engine: eSurge,
) -> None:  # holds S05
    before = slow_engine.get_metrics_summary()
    for prompts, ids in (
        (PROMPTS, ["a"]),
        (PROMPTS[:2], ["a", "a"]),
        (PROMPT, ["a", "b"]),
        (PROMPT, ""),
    ):
        with pytest.raises(ValueError, match="request id"):
            slow_engine.generate(prompts, GREEDY, ids)
    for wrong in ([PROMPT, ""], [PROMPT, 3.5], 7):
        with pytest.raises(ValueError, match="prompt"):
            slow_engine.generate(wrong, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="SamplingParams"):
        slow_engine.generate(PROMPT, 3)  # type: ignore[arg-type]
    updates = slow_engine.stream(PROMPT, LONG, "mine")
    for call in (slow_engine.generate, slow_engine.stream):
        with pytest.raises(ValueError, match="'mine', which an unfinished request has"):
            call(PROMPT, GREEDY, "mine")
    with pytest.raises(ValueError, match="an unfinished request has"):
        slow_engine.generate(PROMPTS[:2], GREEDY, ["free", "mine"])
    slow_engine.abort_request("mine")
    assert list(updates)[-1].outputs[0].finish_reason == "abort"
    assert slow_engine.generate(PROMPT, GREEDY, "free")[0].finished, (
        "nothing of the refused ones was kept"
    )
    after = slow_engine.get_metrics_summary()
    assert (after["total_failed"], after["total_completed"]) == (
        before["total_failed"] + 1,
        before["total_completed"] + 1,
    )


def test_parts_of_a_stream_are_the_text_however_slow_the_reader(
    slow_engine: eSurge,
) -> None:  # holds S06
    whole = slow_engine.generate(PROMPT, GREEDY_ON)[0]
    for pause_s in (0.0, 0.05):
        updates: list[RequestOutput] = []
        for update in slow_engine.stream(PROMPT, GREEDY_ON):
            updates.append(update)
            time.sleep(pause_s)
        assert "".join(update.delta_text for update in updates) == whole.get_text()
        assert updates[-1].accumulated_text == updates[-1].get_text() == whole.get_text()
        assert [update.finished for update in updates] == [False] * (len(updates) - 1) + [True]
        if not pause_s:
            assert updates[0].num_generated_tokens < 16, "text is shown when it is there"
        assert updates[-1].num_generated_tokens == 16


def test_sequence_numbers_rise_with_updates_and_with_text(slow_engine: eSurge) -> None:  # holds S02
    text, num_silent = "", 0
    seen = (0, 0)
    whole = slow_engine.generate(PROMPTS[3], with_(GREEDY_ON, max_tokens=24))[0].get_text()
    # All but the last character may become this stop text, and is held back.
    stop = (f"{whole[:-1]}never there",)
    for update in slow_engine.stream(PROMPTS[3], with_(GREEDY_ON, max_tokens=24, stop=stop)):
        num_silent += not update.delta_text
        text += update.delta_text
        assert update.accumulated_text == text
        assert update.update_seq == seen[0] + 1
        assert update.delta_seq == seen[1] + bool(update.delta_text)
        seen = (update.update_seq, update.delta_seq)
        kept = list(update.outputs[0].token_ids)
        assert update.num_generated_tokens == len(kept)
    assert seen[0] > seen[1] > 0
    assert num_silent == seen[0] - seen[1]


def test_a_stream_takes_one_prompt(engine: eSurge) -> None:  # holds S06
    for prompts in ([], PROMPTS[:2]):
        with pytest.raises(ValueError, match="prompts to stream"):
            engine.stream(prompts)
    assert [u.finished for u in engine.stream([PROMPT], GREEDY)][-1]


def test_leaving_a_stream_ends_its_request(engine: eSurge) -> None:  # holds S06
    begun = engine.stream(PROMPT, LONG)
    next(begun)
    begun.close()
    engine.stream(PROMPT, LONG).close()
    never_begun = engine.stream(PROMPT, LONG, "never begun")
    del never_begun
    gc.collect()
    assert_idle(engine)


def test_chat_applies_template_and_tools(engine: eSurge) -> None:  # holds S07
    answer = engine.chat(CHAT, sampling_params=GREEDY)
    assert answer.prompt.startswith("<|im_start|>user\nWho are you?")
    *_, last = engine.chat(CHAT, sampling_params=GREEDY, stream=True)
    assert last.get_text() == answer.get_text()
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    template = "{% for t in tools %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}"
    custom = engine.chat(CHAT, tools, GREEDY, "chat", chat_template=template)
    assert (custom.request_id, custom.prompt) == ("chat", "get_weather;Who are you?")


class Bare:
    """A tokenizer without a chat template."""

    chat_template = None
    eos_token_id = None

    def encode(self, text: str, **how: Any) -> list[int]:
        return [5 + ord(letter) % 90 for letter in text]

    def decode(self, token_ids: Any, **how: Any) -> str:
        return "x" * len(token_ids)


def test_wrong_messages_and_a_missing_template(
    engine: eSurge, make_faked: Callable[..., eSurge]
) -> None:  # holds S07
    for wrong in ([], [{"role": "user"}], [{"content": "x"}], "text", [3]):
        with pytest.raises(ValueError, match=r"message|messages"):
            engine.chat(wrong)  # type: ignore[arg-type]
    with make_faked(tokenizer=Bare()) as bare:
        with pytest.raises(NoTemplateError) as caught:
            bare.chat(CHAT)
        assert bare.generate("as it is", GREEDY)[0].get_text() == "x" * 16
    assert isinstance(caught.value, RuntimeError)


def test_several_completions_are_one_output(engine: eSurge) -> None:
    output = engine.generate(PROMPT, with_(HOT, n=3, seed=5))[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert output.num_generated_tokens == 48, "counts are those of all"
    last = list(engine.stream(PROMPT, with_(HOT, n=3, seed=5)))[-1]
    assert [c.token_ids for c in last.outputs] == [c.token_ids for c in output.outputs]
    assert last.accumulated_text == output.get_text()


def test_waiting_and_running_requests_are_aborted(slow_engine: eSurge) -> None:  # holds S10
    ids = [f"a{i}" for i in range(6)]
    streams = [slow_engine.stream(PROMPT, LONG, i) for i in ids]
    until(lambda: slow_engine.num_running_requests and slow_engine.num_pending_requests)
    slow_engine.abort_request("unknown")
    for request_id in ids[::-1]:
        slow_engine.abort_request(request_id)
    assert slow_engine.run_on_engine(lambda: slow_engine.engine.rows.num_reqs) == 0, "at once"
    lasts = [list(stream)[-1] for stream in streams]
    assert [last.outputs[0].finish_reason for last in lasts] == ["abort"] * 6
    assert all(last.finished for last in lasts)
    assert lasts[5].num_generated_tokens == 0
    assert lasts[5].first_token_time is None


def test_aborting_ends_every_completion_and_wakes_the_waiter(
    slow_engine: eSurge,
) -> None:  # holds S10
    counted: list[tuple[int, int]] = []

    def abort() -> None:
        until(lambda: slow_engine.run_on_engine(lambda: slow_engine.engine.rows.num_reqs) == 3)
        counted.append((slow_engine.num_pending_requests, slow_engine.num_running_requests))
        slow_engine.abort_request("three")

    [outputs, _] = in_threads(
        [lambda: slow_engine.generate(PROMPT, with_(LONG, n=3), "three"), abort]
    )
    assert [c.finish_reason for c in outputs[0].outputs] == ["abort"] * 3
    assert counted == [(0, 1)], "requests are counted, not completions"


def test_prompts_are_made_to_fit_and_metrics_tell(engine: eSurge) -> None:  # holds S04
    tokenizer, ids = engine.plan.checkpoint.load_tokenizer(), list(range(10, 210))
    output = engine.generate([ids], with_(GREEDY_ON, max_tokens=16))[0]
    assert output.prompt_token_ids == ids[200 - (BUDGET - 16) :]
    with pytest.MonkeyPatch.context() as patch:
        jobs = engine._jobs
        patch.setattr(jobs, "rules", dataclasses.replace(jobs.rules, truncate_mode="right"))
        [other] = engine.generate([ids], with_(GREEDY_ON, max_tokens=16))
        assert other.prompt_token_ids == ids[: BUDGET - 16]
    assert output.prompt == tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert output.metrics is not None
    assert (output.metrics["original_prompt_tokens"], output.metrics["tokens_dropped"]) == (200, 72)
    finals = ("requested_new_tokens_original", "requested_new_tokens_final")
    assert (
        tuple(output.metrics[name] for name in finals)
        == (16, 16)
        == (16, output.num_generated_tokens)
    )
    inferred = engine.generate(PROMPT, LONG)[0]
    assert inferred.metrics is not None
    assert tuple(inferred.metrics[name] for name in finals) == (None, BUDGET - 4)
    assert inferred.num_generated_tokens == BUDGET - 4


def test_the_callback_gets_a_copy_and_cannot_break_a_request(
    engine: eSurge, caplog: pytest.LogCaptureFixture
) -> None:  # holds S12
    seen: list[dict[str, Any]] = []

    def mutate(params: SamplingParams, about: dict[str, Any]) -> None:
        seen.append(about)
        params.max_tokens = 3

    def fail(params: SamplingParams, about: dict[str, Any]) -> None:
        params.max_tokens = 2
        raise KeyError("mine")

    cases: list[tuple[Any, int]] = [
        (mutate, 3),
        (lambda params, _: with_(params, max_tokens=5), 5),
        (lambda *_: None, 16),
        (fail, 16),
        (lambda *_: "no parameters", 16),
        (None, 16),
    ]
    try:
        for callback, wanted in cases:
            engine.set_sampling_params_callback(callback)
            with caplog.at_level(logging.ERROR, "enginebay.esurge"):
                output = engine.generate(PROMPT, GREEDY_ON, "mine")[0]
            assert output.num_generated_tokens == wanted
            assert GREEDY_ON.max_tokens == 16
    finally:
        engine.set_sampling_params_callback(None)
    assert seen == [{"request_id": "mine", "prompt": PROMPT, "engine": engine}]
    assert len(caplog.records) == 2


def test_requests_of_many_threads_get_what_they_get_alone(engine: eSurge) -> None:  # holds S18
    alone = [engine.generate(prompt, GREEDY_ON)[0].get_text() for prompt in PROMPTS]
    together = in_threads(
        [lambda p=p: engine.generate(p, GREEDY_ON)[0].get_text() for p in PROMPTS]
        + [lambda p=p: "".join(u.delta_text for u in engine.stream(p, GREEDY_ON)) for p in PROMPTS]
    )
    assert together == alone * 2


def test_a_known_beginning_is_not_computed_again(engine: eSurge) -> None:  # holds S19
    ids = list(range(500, 560))
    cold = engine.generate([ids], GREEDY_ON)[0]
    warm = engine.generate([ids], GREEDY_ON)[0]
    longer = engine.generate([[*ids[:50], 7, 8, 9]], GREEDY_ON)[0]
    assert [o.metrics["cached_tokens"] for o in (cold, warm, longer) if o.metrics] == [0, 48, 48]
    assert [o.metrics["cached_tokens_on_host"] for o in (warm, longer) if o.metrics] == [0, 0]
    assert token_ids([warm]) == token_ids([cold])


def test_too_few_pages_preempt_and_change_no_token(engine: eSurge) -> None:  # holds S20
    alone = [engine.generate(prompt, LONG)[0] for prompt in PROMPTS]
    assert sum(len(o.prompt_token_ids) + o.num_generated_tokens for o in alone) > 24 * 16
    preemptions = Preemptions(engine)
    together = engine.generate(PROMPTS, LONG)
    assert max(preemptions.fewest) > 0, "some had tokens"
    assert token_ids(together) == token_ids(alone) == [foretold(output) for output in together]


def test_times_are_told_apart(slow_engine: eSurge) -> None:  # holds S21
    outputs = slow_engine.generate([PROMPT] * 9, with_(GREEDY_ON, max_tokens=24))
    for output in outputs:
        assert output.first_token_time is not None
        assert output.metrics is not None
        queued = output.processing_time - output.time_spent_generating
        assert queued == pytest.approx(output.metrics["queue_time"], abs=1e-6)
        assert 0 < output.first_token_time <= output.processing_time
        after_first = output.processing_time - output.first_token_time
        assert output.tokens_per_second == pytest.approx(23 / after_first, rel=1e-6)
    queues = sorted(o.metrics["queue_time"] for o in outputs if o.metrics)
    earliest = min(o.first_token_time for o in outputs if o.first_token_time is not None)
    assert queues[0] < earliest < queues[-1], "the last ones waited for rows"


def test_priority_and_tenant_reach_the_scheduler(engine: eSurge) -> None:
    endings = Endings()
    engine.audience.add(endings)
    short = with_(GREEDY_ON, max_tokens=1)
    engine.generate(PROMPTS[:2], short, priority=[2, -1], tenant="a")
    list(engine.stream(PROMPT, short, priority=3, tenant="b"))
    engine.chat(CHAT, sampling_params=short, priority=4, tenant="c")
    list(engine.chat(CHAT, sampling_params=short, stream=True, priority=5, tenant="d"))
    engine.generate(PROMPT, short)
    assert sorted(endings.seen) == [(-1, "a"), (0, ""), (2, "a"), (3, "b"), (4, "c"), (5, "d")]
    for wrong in ({"priority": [1]}, {"priority": 0.5}, {"tenant": ""}, {"tenant": ["a", ""]}):
        with pytest.raises(ValueError, match="Allowed: "):
            engine.generate(PROMPTS[:2], short, **wrong)  # type: ignore[arg-type]
    engine.audience.remove(endings)
    assert len(endings.seen) == 6
