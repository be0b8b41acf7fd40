"""vInference on text: prompts, streams, many prompts at once, and what is counted."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay_vinference import PromptOutput, SampleState, vInference, vInferencePreCompileConfig
from tests.unit.vinference.small import CONFIG, MODEL, TEXTS, drain

pytestmark = pytest.mark.xdist_group("vinference")

GREEDY = SamplingParams(max_tokens=20)
CHAT = [{"role": "user", "content": "Hello!"}]
BYTES = "Zażółć 🦊 日本"


# holds V33


def test_tokens_are_counted_as_the_tokenizer_makes_them(inference: vInference) -> None:
    for text in (*TEXTS, BYTES):
        assert inference.count_tokens(text) == len(inference.tokenizer.encode(text))
    ids = inference.tokenizer.apply_chat_template(CHAT)
    assert inference.count_tokens(CHAT) == len(ids)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]}]
    assert inference.count_tokens(parts, oai_like=True) == len(ids)
    with pytest.raises(ValueError, match="no model with vision"):
        inference.count_tokens([{"role": "user", "content": [{"type": "image_url"}]}], True)
    with pytest.raises(TypeError, match="a prompt of type int"):
        inference.count_tokens(3)  # type: ignore[arg-type]


# holds V38


def test_prompts_get_the_text_that_llm_gives(inference: vInference) -> None:
    with LLM(config=EngineConfig(**MODEL, engine="vinference")) as llm:  # type: ignore[arg-type]
        for params in (
            GREEDY,
            SamplingParams(max_tokens=20, temperature=0.9, seed=3),
            SamplingParams(max_tokens=5),
        ):
            expected = llm.generate(TEXTS[0], params)[0].outputs[0]
            found = inference.process_prompt(TEXTS[0], params)
            assert isinstance(found, PromptOutput)
            assert (found.text, found.generated_tokens) == (expected.text, len(expected.token_ids))
            assert found.finish_reason == expected.finish_reason
            assert found.error is None
        assert inference.process_prompt(CHAT, GREEDY).text == llm.chat(CHAT, GREEDY).get_text()


def test_parts_of_a_stream_are_the_text_and_it_returns_the_state(inference: vInference) -> None:
    for prompt in (TEXTS[0], CHAT, BYTES):
        parts, state = drain(inference.process_prompt(prompt, GREEDY, stream=True))
        whole = inference.process_prompt(prompt, {"max_tokens": 20})
        assert "".join(parts) == whole.text
        assert len(parts) > 1
        assert isinstance(state, SampleState)
        assert state.generated_tokens == whole.generated_tokens


def test_characters_of_several_bytes_are_never_split(inference: vInference) -> None:
    """At this temperature every token is as likely as any other, so many are parts of characters."""
    hot = SamplingParams(max_tokens=20, temperature=50.0, ignore_eos=True, seed=1)
    for seed in range(4):
        params = hot.model_copy(update={"seed": seed})
        parts, _ = drain(inference.process_prompt(BYTES, params, stream=True))
        assert "".join(parts) == inference.process_prompt(BYTES, params).text


def test_lists_are_answered_in_order(inference: vInference) -> None:
    outputs = inference.process_prompt(list(TEXTS), GREEDY)
    assert [o.text for o in outputs] == [inference.process_prompt(text, GREEDY).text for text in TEXTS]
    streams = inference.process_prompt(list(TEXTS), GREEDY, stream=True)
    assert ["".join(drain(parts)[0]) for parts in streams] == [o.text for o in outputs]
    assert inference.process_prompt([], GREEDY) == []


def test_a_stop_text_ends_the_text(inference: vInference) -> None:
    whole = inference.process_prompt(TEXTS[0], GREEDY).text
    stop = whole[10:14]
    params = SamplingParams(max_tokens=20, stop=(stop,))
    found = inference.process_prompt(TEXTS[0], params)
    assert (found.text, found.finish_reason) == (whole[: whole.index(stop)], "stop")
    parts, state = drain(inference.process_prompt(TEXTS[0], params, stream=True))
    assert "".join(parts) == found.text
    assert int(state.current_length) < int(state.padded_length) + 20


@pytest.mark.parametrize("prompt", [3, None, [3], b"bytes", [[{"role": "user", "content": "x"}]]])
def test_a_prompt_of_another_type_is_a_type_error(inference: vInference, prompt: Any) -> None:
    with pytest.raises(TypeError, match="a prompt of type"):
        inference.process_prompt(prompt, GREEDY)


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        (3, TypeError, "sampling parameters of type int"),
        ({"temperature": -1}, ValueError, "temperature"),
        ({"nothing": 1}, ValueError, "nothing"),
        ({"n": 2}, ValueError, "num_return_sequences"),
        ({"regex": "a+"}, ValueError, "regex in the vInference API.*masks come from the host"),
        ({"logprobs": 0}, ValueError, "logprobs = 0.*no place for log-probabilities"),
        ({"prompt_logprobs": 1}, ValueError, "prompt_logprobs = 1.*no place for log-probabilities"),
        ({"best_of": 2}, ValueError, "best_of = 2.*no place for log-probabilities"),
        ({"stop_words_ids": [[5, 6]]}, ValueError, "stop_words_ids = .*single token ids"),
    ],
)
def test_wrong_parameters_are_refused(inference: vInference, params: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        inference.process_prompt(TEXTS[0], params)


def test_what_cannot_be_tokenised_is_a_value_error(inference: vInference) -> None:
    for prompt in ("\ud800", "", [{"role": "user"}], [{"role": 3, "content": "x"}]):
        with pytest.raises(ValueError, match="Allowed"):
            inference.process_prompt(prompt, GREEDY)


def test_a_conversation_without_a_chat_template_is_a_type_error(inference: vInference) -> None:
    inner = inference.tokenizer.inner

    class Plain:
        chat_template = None
        encode, decode = inner.encode, inner.decode

    made = vInference(MODEL, Plain(), CONFIG)
    with pytest.raises(TypeError, match="chat template"):
        made.process_prompt(CHAT, GREEDY)


def test_an_error_in_a_stream_is_raised(inference: vInference, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = inference.process_prompt(TEXTS[0], GREEDY, stream=True)
    next(parts)
    monkeypatch.setattr(
        inference._stepper, "run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("device lost"))
    )
    with pytest.raises(RuntimeError, match="device lost"):
        next(parts)


def test_metrics_count_prompts_and_tokens() -> None:  # holds V31
    pytest.importorskip("prometheus_client")
    made = vInference(MODEL, None, CONFIG, inference_name="mine")
    made.precompile(vInferencePreCompileConfig(1, 16))
    metrics = made.enable_metrics()
    assert made.metrics is metrics
    made.process_prompt([TEXTS[0]] * 2, SamplingParams(max_tokens=3, ignore_eos=True))
    value = metrics.registry.get_sample_value
    assert value("vinference_prompts_total", {"inference": "mine", "outcome": "length"}) == 2
    assert value("vinference_generated_tokens_total", {"inference": "mine"}) == 6
    assert value("vinference_prompt_seconds_count", {"inference": "mine"}) == 2
    assert value("vinference_running_prompts", {"inference": "mine"}) == 0
    assert made.enable_metrics() is metrics
    other = vInference(MODEL, None, CONFIG, inference_name="other")
    other.precompile(vInferencePreCompileConfig(1, 16))
    other.enable_metrics(shared=metrics)
    parts = other.process_prompt(TEXTS[0], stream=True)
    next(parts)
    parts.close()
    assert value("vinference_prompts_total", {"inference": "other", "outcome": "abandoned"}) == 1


# holds V39


def together(inference: vInference, prompts: Any, limit: Any = 2, **options: Any) -> list[PromptOutput]:
    return asyncio.run(inference.process_prompts_concurrently(prompts, limit, GREEDY, **options))


@pytest.mark.parametrize("limit", [0, -3, 1, 2, 10])
def test_results_come_in_the_order_of_the_prompts(inference: vInference, limit: int) -> None:
    prompts = [*TEXTS, CHAT]
    calls: list[tuple[int, int]] = []
    outputs = together(inference, prompts, limit, progress_callback=lambda *done: calls.append(done))
    assert [o.text for o in outputs] == [inference.process_prompt(p, GREEDY).text for p in prompts]
    assert calls == [(number, 5) for number in range(1, 6)]


def test_no_more_than_the_limit_run_at_once(inference: vInference, monkeypatch: pytest.MonkeyPatch) -> None:
    start = inference.start_prompt
    lock, seen = threading.Lock(), [0, 0]

    def counted(*args: Any) -> Any:
        text, parts = start(*args)

        def run() -> Any:
            with lock:
                seen[0] += 1
                seen[1] = max(seen)
            try:
                yield from parts
            finally:
                with lock:
                    seen[0] -= 1

        return text, run()

    monkeypatch.setattr(inference, "start_prompt", counted)
    for limit, most in ((0, 1), (1, 1), (3, 3)):
        seen[:] = [0, 0]
        together(inference, list(TEXTS) * 3, limit)
        assert 1 <= seen[1] <= most


def test_a_failing_prompt_fails_alone(inference: vInference) -> None:
    outputs = together(inference, [TEXTS[0], 7, "", TEXTS[1]])
    assert [o.error is None for o in outputs] == [True, False, False, True]
    assert "a prompt of type int" in str(outputs[1].error)
    assert (outputs[1].text, outputs[1].finish_reason) == (None, "error")


def test_a_stream_gives_each_prompts_events_in_order_and_ends(inference: vInference) -> None:
    prompts: list[Any] = [*TEXTS, 7]
    calls: list[tuple[int, int]] = []

    async def collect() -> list[tuple[int, str, Any]]:
        events = await inference.process_prompts_concurrently(
            prompts, 3, GREEDY, stream=True, progress_callback=lambda *done: calls.append(done)
        )
        return [event async for event in events]

    found: dict[int, list[tuple[str, Any]]] = {index: [] for index in range(len(prompts))}
    for index, kind, data in asyncio.run(collect()):
        found[index].append((kind, data))
    assert [kind for kind, _ in found.pop(4)] == ["error"]
    for index, events in found.items():
        *texts, (kind, final) = events
        assert [k for k, _ in texts] == ["text"] * len(texts)
        assert kind == "final"
        assert (
            "".join(data for _, data in texts)
            == final.text
            == inference.process_prompt(prompts[index], GREEDY).text
        )
    assert calls == [(number, 5) for number in range(1, 6)]


def test_a_reader_that_stops_at_the_last_event_has_every_call(inference: vInference) -> None:
    calls: list[tuple[int, int]] = []

    async def read() -> None:
        events = await inference.process_prompts_concurrently(
            TEXTS[:2], 2, GREEDY, stream=True, progress_callback=lambda *done: calls.append(done)
        )
        ended = 0
        while ended < 2:
            ended += (await anext(events))[1] == "final"
        await events.aclose()

    asyncio.run(read())
    assert calls == [(1, 2), (2, 2)]


def test_cancelling_the_call_ends_what_is_under_way(inference: vInference) -> None:
    async def cancel() -> None:
        call = asyncio.ensure_future(inference.process_prompts_concurrently(list(TEXTS) * 50, 2, GREEDY))
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel())
    for thread in threading.enumerate():
        if thread.name.startswith("vinference"):
            thread.join(60)
            assert not thread.is_alive()


def test_leaving_a_stream_ends_what_is_under_way(
    inference: vInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    start = inference.start_prompt

    def watched(*args: Any) -> Any:
        text, parts = start(*args)

        def run() -> Any:
            try:
                yield from parts
            finally:
                ended.set()

        return text, run()

    monkeypatch.setattr(inference, "start_prompt", watched)

    async def leave() -> None:
        events = await inference.process_prompts_concurrently(list(TEXTS) * 50, 1, GREEDY, stream=True)
        async for _ in events:
            break
        await events.aclose()

    asyncio.run(leave())
    assert ended.wait(60)
    assert not [
        t
        for t in threading.enumerate()
        if t.name.startswith("vinference") and t.join(60) is None and t.is_alive()
    ]


def test_no_prompts_are_no_results(inference: vInference) -> None:
    assert together(inference, []) == []
    for arguments in (("text", 2), (list(TEXTS), "2"), (list(TEXTS), True)):
        with pytest.raises(ValueError, match="Allowed"):
            together(inference, *arguments)
    with pytest.raises(ValueError, match="progress_callback"):
        together(inference, [TEXTS[0]], progress_callback=3)


def test_without_parameters_the_configurations_hold(inference: vInference) -> None:
    (output,) = asyncio.run(inference.process_prompts_concurrently([TEXTS[0]], 1))
    assert output.text == inference.process_prompt(TEXTS[0]).text


def test_the_event_loop_is_free_while_threads_generate(inference: vInference) -> None:
    """That it is on time is measured by the benchmark; here, that other tasks run at all in between."""

    async def count() -> int:
        task = asyncio.ensure_future(inference.process_prompts_concurrently(list(TEXTS) * 4, 0, GREEDY))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0)
            ticks += 1
        assert len(task.result()) == 16
        return ticks

    assert asyncio.run(count()) > 16


def test_a_dict_without_a_length_has_the_configurations(inference: vInference) -> None:
    made = vInference(MODEL, None, CONFIG.replace(max_new_tokens=70))  # more than the default of requests
    assert made._requests.params({"ignore_eos": True}).max_tokens == 70
    assert inference.process_prompt(TEXTS[0], {"ignore_eos": True}).generated_tokens == CONFIG.max_new_tokens
