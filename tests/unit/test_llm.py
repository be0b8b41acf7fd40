"""LLM: what generate, stream and chat return, alone and together, as streams and by asyncio."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM
from enginebay.contracts.engine import StepPlan
from enginebay.errors import RequestError, StoppedError
from enginebay.outputs import RequestOutput, StreamChunk
from enginebay.serving.events import Events
from tests.brief import BRIEF
from tests.unit.loops import Pauses, go_on, seeing
from tests.unit.serving import DEADLOCK_S, GREEDY, HOT, SIZES, assert_idle, with_

MESSAGES = [{"role": "user", "content": "What color is the sky?"}]
pytestmark = pytest.mark.xdist_group("llm")


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    """The whole demo model, which answers, and ends its answers."""
    with LLM("demo", **SIZES) as llm:
        yield llm


def unfinished(llm: LLM) -> int:
    """The number of requests that have not ended."""
    return llm.counts().waiting + llm.counts().running


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def joined(chunks: Sequence[StreamChunk], index: int = 0) -> str:
    return "".join(chunk.delta_text for chunk in chunks if chunk.index == index)


PROMPTS = [
    "Once upon a time",
    "The little fox",
    "A",
    "In the morning, the baker opened the shop and",
]


def test_one_text_and_a_list_of_texts_and_ids_mean_the_same(fake_llm: LLM) -> None:
    whole = fake_llm.generate(PROMPTS, GREEDY)
    ids = [fake_llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [output.prompt for output in whole] == PROMPTS
    assert [output.prompt_token_ids for output in whole] == ids
    assert token_ids(fake_llm.generate(ids, GREEDY)) == token_ids(whole)
    assert token_ids(fake_llm.generate([np.array(i) for i in ids], GREEDY)) == token_ids(whole)
    assert token_ids(fake_llm.generate([PROMPTS[0], ids[1]], GREEDY)) == token_ids(whole)[:2]
    assert token_ids(fake_llm.generate(PROMPTS[0], GREEDY)) == token_ids(whole)[:1]
    assert token_ids(fake_llm.generate(ids[1], GREEDY)) == token_ids(whole)[1:2]
    assert fake_llm.generate([], GREEDY) == []


def test_an_output_says_all_about_its_completion(fake_llm: LLM) -> None:
    output = fake_llm.generate("Once upon a time", GREEDY)[0]
    completion = output.outputs[0]
    assert output.finished
    assert completion.text == fake_llm.tokenizer.decode(completion.token_ids) == output.get_text()
    assert completion.finish_reason == "length"
    assert output.num_generated_tokens == len(completion.token_ids) == 16
    assert output.metrics is not None
    assert output.metrics.num_generated_tokens == 16
    assert output.tokens_per_second > 0


def test_without_max_tokens_a_completion_fills_the_context(fake_llm: LLM) -> None:
    output = fake_llm.generate("Once upon a time", with_(GREEDY, max_tokens=None, ignore_eos=True))[
        0
    ]
    assert len(output.prompt_token_ids) + output.num_generated_tokens == SIZES["max_model_len"]


def test_each_prompt_may_have_its_own_parameters(fake_llm: LLM) -> None:
    params = [with_(GREEDY, max_tokens=n) for n in (9, 1, 5)]
    outputs = fake_llm.generate(PROMPTS[:3], params)
    assert [len(ids) for ids in token_ids(outputs)] == [9, 1, 5]
    alone = [fake_llm.generate(p, one)[0] for p, one in zip(PROMPTS, params, strict=False)]
    assert token_ids(outputs) == token_ids(alone)


def test_a_prompt_gets_the_same_tokens_alone_and_in_a_batch(llm: LLM) -> None:
    for params in (GREEDY, with_(HOT, seed=5)):
        together = llm.generate(PROMPTS * 2, params)
        alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
        assert token_ids(together) == token_ids(alone) * 2


def test_several_completions_differ_and_each_is_repeatable(llm: LLM) -> None:
    three = llm.generate("Once", with_(HOT, n=3, seed=11))[0]
    assert [completion.index for completion in three.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in three.outputs}) == 3
    assert three.num_generated_tokens == 48
    again = llm.generate(["The", "Once"], with_(HOT, n=3, seed=11))[1]
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in three.outputs]
    one = llm.generate("Once", with_(HOT, seed=11))[0]
    assert one.outputs[0].token_ids == three.outputs[0].token_ids


def test_unseeded_requests_differ(fake_llm: LLM) -> None:
    runs = [tuple(token_ids(fake_llm.generate("Once", HOT))[0]) for _ in range(3)]
    assert len(set(runs)) == 3


@pytest.mark.usefixtures("faked")
def test_a_configured_seed_makes_unseeded_requests_repeatable() -> None:
    runs = []
    for _ in range(2):
        with LLM(BRIEF, seed=3, **SIZES) as llm:
            runs.append(token_ids(llm.generate(["Once", "Once"], HOT)))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_a_stop_text_ends_the_completion_wherever_tokens_end(fake_llm: LLM) -> None:
    whole = fake_llm.generate("Once upon a time", GREEDY)[0]
    text = whole.get_text()
    for start, end in ((6, 9), (3, 12), (10, 11), (0, 2)):
        stop = text[start:end]
        cut = text.index(stop)
        for include in (False, True):
            params = with_(GREEDY, stop=["never there", stop], include_stop_str_in_output=include)
            output = fake_llm.generate("Once upon a time", params)[0]
            assert output.get_text() == text[: cut + len(stop) if include else cut]
            assert output.outputs[0].finish_reason == "stop"
            given = output.outputs[0].token_ids
            assert given == whole.outputs[0].token_ids[: len(given)]
            assert output.metrics is not None
            assert output.metrics.num_generated_tokens == len(given)
            assert output.metrics.finished_s >= output.metrics.first_token_s


def test_what_might_have_become_a_stop_text_is_given_at_the_end(fake_llm: LLM) -> None:
    text = fake_llm.generate("Once upon a time", GREEDY)[0].get_text()
    output = fake_llm.generate("Once upon a time", with_(GREEDY, stop=text[-3:] + "\x00"))[0]
    assert (output.get_text(), output.outputs[0].finish_reason) == (text, "length")


def test_a_stop_token_ends_the_completion_and_is_no_part_of_the_text(llm: LLM) -> None:
    whole = token_ids(llm.generate("Once upon a time", GREEDY))[0]
    stop = whole[5]
    first = whole.index(stop)
    output = llm.generate("Once upon a time", with_(GREEDY, stop_token_ids=[stop]))[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (whole[: first + 1], "stop")
    assert output.text == llm.tokenizer.decode(whole[:first])


def test_the_end_of_the_model_counts_unless_it_is_ignored(demo: LLM) -> None:
    ended = demo.chat(MESSAGES, with_(GREEDY, max_tokens=60))
    assert ended.outputs[0].finish_reason == "stop"
    ignored = demo.chat(MESSAGES, with_(GREEDY, max_tokens=60, ignore_eos=True))
    assert ignored.outputs[0].finish_reason == "length"
    assert len(ignored.outputs[0].token_ids) == 60
    num = len(ended.outputs[0].token_ids)
    assert ignored.outputs[0].token_ids[:num] == ended.outputs[0].token_ids


def test_generation_ends_where_the_context_does(llm: LLM) -> None:
    prompt = [5] * 150
    output = llm.generate(prompt, with_(GREEDY, max_tokens=1000, ignore_eos=True))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (10, "length")
    assert len(llm.generate([5] * 159, with_(GREEDY, ignore_eos=True))[0].outputs[0].token_ids) == 1


def test_a_streams_parts_joined_are_what_generate_returns(llm: LLM) -> None:
    params = with_(HOT, seed=2, stop=["zzz"], max_tokens=40)
    whole = llm.generate("Once upon a time", params)[0]
    chunks = list(llm.stream("Once upon a time", params))
    assert joined(chunks) == whole.get_text()
    assert [t for chunk in chunks for t in chunk.delta_token_ids] == whole.outputs[0].token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].metrics is not None
    assert len(chunks) > 2


def test_a_stream_of_several_completions_has_all_of_each(fake_llm: LLM) -> None:
    params = with_(HOT, n=3, seed=2)
    whole = fake_llm.generate("Once", params)[0]
    chunks = list(fake_llm.stream("Once", params))
    assert [joined(chunks, i) for i in range(3)] == [
        completion.text for completion in whole.outputs
    ]
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 3


def test_leaving_a_stream_frees_its_row(fake_llm: LLM) -> None:
    pauses = Pauses(fake_llm.loop, after=4)
    with seeing(fake_llm.engine, launch=pauses):
        for chunk in fake_llm.stream("Once", with_(HOT, max_tokens=150, n=2)):
            assert chunk.delta_token_ids
            pauses.wait()  # so that the requests cannot reach their own ends
            break
        gc.collect()
        assert_idle(fake_llm)
        go_on(fake_llm.loop)


def test_a_stream_that_nobody_reads_is_ended_with_it(fake_llm: LLM) -> None:
    stream = fake_llm.stream("Once", with_(HOT, max_tokens=150, n=4))
    del stream
    gc.collect()
    assert_idle(fake_llm)


def test_an_interrupted_stream_frees_its_row(
    fake_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Events) -> None:
        raise KeyboardInterrupt

    pauses = Pauses(fake_llm.loop, after=4)
    with seeing(fake_llm.engine, launch=pauses):
        stream = fake_llm.stream("Once", with_(HOT, max_tokens=150))
        assert next(stream).delta_token_ids
        pauses.wait()
        with monkeypatch.context() as patch:
            patch.setattr(Events, "__next__", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        assert_idle(fake_llm)
        go_on(fake_llm.loop)
    assert next(stream, None) is None


def test_an_interrupted_generate_ends_its_requests(fake_llm: LLM) -> None:
    pauses = Pauses(fake_llm.loop, after=4)

    def interrupt(what: str, done: int, total: int) -> None:
        pauses.wait()  # so that the other request cannot reach its own end
        raise KeyboardInterrupt

    params = [with_(GREEDY, max_tokens=1), with_(HOT, max_tokens=150)]
    with seeing(fake_llm.engine, launch=pauses):
        with pytest.raises(KeyboardInterrupt) as caught:
            fake_llm.generate(["A", "B"], params, progress=interrupt)
        assert_idle(fake_llm)
        go_on(fake_llm.loop)
    del caught  # its traceback refers to all that generate() had: nothing has ended by itself


def test_chat_answers_by_the_template(demo: LLM) -> None:
    answer = demo.chat(MESSAGES, with_(GREEDY, max_tokens=40))
    assert "blue" in answer.get_text()
    assert answer.prompt_token_ids == demo.tokenizer.apply_chat_template(MESSAGES)
    assert (
        joined(list(demo.chat_stream(MESSAGES, with_(GREEDY, max_tokens=40)))) == answer.get_text()
    )


def test_every_chat_hands_its_options_to_the_template(
    fake_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{{ tools[0].name }} {{ mood }} {% for m in messages %}{{ m.content }}{% endfor %}{% if "
        "add_generation_prompt %} now{% endif %}"
    )
    options: dict[str, Any] = {
        "tools": [{"name": "weather"}],
        "chat_template": template,
        "chat_template_kwargs": {"mood": "calm"},
    }
    prompts: list[list[int]] = []
    submit = fake_llm.loop.submit

    def noted(requests: Any, *others: Any) -> Any:
        listed = list(requests)
        prompts.extend(request.prompt_token_ids.tolist() for request in listed)
        return submit(listed, *others)

    monkeypatch.setattr(fake_llm.loop, "submit", noted)
    talk, one = [{"role": "user", "content": "Hello"}], with_(GREEDY, max_tokens=1)
    ends: list[tuple[dict[str, Any], str]] = [
        ({}, "weather calm Hello now"),
        ({"add_generation_prompt": False}, "weather calm Hello"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "weather calm Hello"),
    ]
    for more, text in ends:
        fake_llm.chat(talk, one, **options, **more)
        list(fake_llm.chat_stream(talk, one, **options, **more))
        asyncio.run(fake_llm.achat(talk, one, **options, **more))
        assert prompts == [fake_llm.tokenizer.encode(text, add_special_tokens=False)] * 3
        prompts.clear()
    with pytest.raises(RequestError, match="continue_final_message with add_generation_prompt"):
        fake_llm.chat(talk, one, continue_final_message=True)


def test_the_asyncio_twins_give_the_same(fake_llm: LLM) -> None:
    expected = fake_llm.generate(PROMPTS, GREEDY)

    async def everything() -> tuple[Any, ...]:
        async def stream(prompt: str) -> list[StreamChunk]:
            return [chunk async for chunk in fake_llm.astream(prompt, GREEDY)]

        return await asyncio.gather(
            fake_llm.agenerate(PROMPTS, GREEDY),
            fake_llm.achat(MESSAGES, GREEDY),
            *(stream(prompt) for prompt in PROMPTS),
        )

    outputs, answer, *streams = asyncio.run(asyncio.wait_for(everything(), DEADLOCK_S))
    assert token_ids(outputs) == token_ids(expected)
    assert answer.outputs[0].token_ids == fake_llm.chat(MESSAGES, GREEDY).outputs[0].token_ids
    assert [joined(chunks) for chunks in streams] == [output.get_text() for output in expected]


def test_cancelling_ends_the_requests(llm: LLM) -> None:
    kept: list[Any] = []  # one that nobody refers to ends anyhow

    async def cancel() -> None:
        begun = asyncio.Event()

        async def stream() -> None:
            kept.append(llm.astream("Once", with_(HOT, max_tokens=150)))
            async for _ in kept[0]:
                begun.set()

        async def generate() -> None:
            try:
                await llm.agenerate(["A", "B"], with_(HOT, max_tokens=150))
            except asyncio.CancelledError as error:
                kept.append(error)  # its traceback refers to all that agenerate() had
                raise

        tasks = [asyncio.ensure_future(one()) for one in (stream, generate)]
        await begun.wait()
        while unfinished(llm) < 3:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)

    with seeing(llm.engine, launch=Pauses(llm.loop, after=4)):
        asyncio.run(asyncio.wait_for(cancel(), DEADLOCK_S))
        assert_idle(llm)
        assert unfinished(llm) == 0
        go_on(llm.loop)


def test_a_step_takes_the_cache_over(llm: LLM) -> None:  # holds F50
    """Each step, of a prompt and of decoding: its cache is gone when the next one begins."""
    before: list[tuple[bool, list[jax.Array]]] = []
    kinds: set[bool] = set()

    def look(plan: StepPlan) -> None:
        for is_decode, arrays in before:
            assert arrays
            assert all(array.is_deleted() for array in arrays), "a second copy of the cache"
            kinds.add(is_decode)
        before[:] = [(plan.is_decode, jax.tree.leaves(llm.engine.executor.arrays().cache))]

    with seeing(llm.engine, launch=look):
        for _ in range(2):
            llm.generate("Once", GREEDY)
    assert kinds == {True, False}


def test_an_event_loop_that_is_closed_over_a_request_harms_nobody(fake_llm: LLM) -> None:
    params = with_(GREEDY, max_tokens=100, ignore_eos=True)
    expected = token_ids(fake_llm.generate("The little fox", params))
    loop = asyncio.new_event_loop()
    left = fake_llm.astream("Once", with_(HOT, max_tokens=100))
    loop.run_until_complete(anext(left))
    loop.close()
    assert token_ids(fake_llm.generate("The little fox", params)) == expected
    with pytest.raises(StopIteration):
        left.aclose().send(None)
    assert_idle(fake_llm)


@pytest.mark.long
def test_values_beyond_what_the_device_can_hold_are_served_all_the_same(llm: LLM) -> None:
    everything = llm.generate("Once", with_(HOT, seed=1, top_k=2**40))
    assert token_ids(everything) == token_ids(llm.generate("Once", with_(HOT, seed=1, top_k=-1)))
    for temperature in (1e300, 1e-300):
        assert (
            len(
                token_ids(
                    llm.generate("Once", with_(HOT, seed=2**63 - 1, temperature=temperature))
                )[0]
            )
            == 16
        )
    for penalty in (1e300, 1e-300):
        params = with_(GREEDY, repetition_penalty=penalty, ignore_eos=True)
        (tokens,) = token_ids(llm.generate("Once", params))
        assert len(set(tokens)) == (16 if penalty > 1 else 1)


def test_changing_parameters_later_changes_nothing_under_way(fake_llm: LLM) -> None:
    params = with_(GREEDY, max_tokens=100, ignore_eos=True)
    pauses = Pauses(fake_llm.loop, after=4)
    with seeing(fake_llm.engine, launch=pauses):
        stream = fake_llm.stream("Once", params)
        first = next(stream)
        pauses.wait()  # so that the request cannot reach its end
        params.max_tokens = 1
        go_on(fake_llm.loop)
        assert len(first.delta_token_ids) < 100
        assert sum(len(chunk.delta_token_ids) for chunk in (first, *stream)) == 100


@pytest.mark.usefixtures("faked")
def test_a_closed_llm_says_so() -> None:
    llm = LLM(BRIEF, **SIZES)
    stream = llm.stream("Once", HOT)
    llm.close()
    llm.close()
    with pytest.raises(StoppedError):
        list(stream)
    with pytest.raises(StoppedError, match="make a new one"):
        llm.generate("Once", GREEDY)


@pytest.mark.usefixtures("faked")
def test_an_llm_that_nobody_holds_ends_its_threads() -> None:
    before = set(threading.enumerate())
    llm = LLM(BRIEF, **SIZES)
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"enginebay-loop", "enginebay-delivery"}
    del llm
    gc.collect()
    for thread in threads:
        thread.join(DEADLOCK_S)
        assert not thread.is_alive()
