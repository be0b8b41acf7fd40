"""vInference on text: prompts, streams, and what is counted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError
from enginebay_vinference import PromptOutput, SampleState, vInference
from enginebay_vinference.prompts import as_params
from tests.unit.serving import DEADLOCK_S
from tests.unit.vinference.numpy_inference import HostFunctions, make_hostside
from tests.unit.vinference.small import CONFIG, MODEL, TEXTS, drain, encode

pytestmark = [pytest.mark.xdist_group("vinference"), pytest.mark.usefixtures("pooled")]

GREEDY = SamplingParams(max_tokens=20)
CHAT = [{"role": "user", "content": "Hello!"}]
BYTES = "Zażółć 🦊 日本"


# holds V33


def test_tokens_are_counted_as_the_tokenizer_makes_them(
    on_host: vInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = on_host.tokenizer.encode

    def with_beginning(
        text: str, *, add_special_tokens: bool = True, max_prompt_tokens: int | None = None
    ) -> list[int]:
        """As of a tokenizer that puts a special token before a text."""
        return [1] * add_special_tokens + plain(text, add_special_tokens=False)

    monkeypatch.setattr(on_host.tokenizer, "encode", with_beginning)
    for text in (*TEXTS, BYTES):
        assert on_host.count_tokens(text) == len(on_host.tokenizer.encode(text))
    ids = on_host.tokenizer.apply_chat_template(CHAT)
    assert on_host.count_tokens(CHAT) == len(ids)
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}],
        }
    ]
    assert on_host.count_tokens(parts, oai_like=True) == len(ids)
    with pytest.raises(ValueError, match="no model has vision"):
        on_host.count_tokens([{"role": "user", "content": [{"type": "image_url"}]}], True)
    with pytest.raises(TypeError, match="a prompt of type int"):
        on_host.count_tokens(3)  # type: ignore[arg-type]


# holds V38


def test_prompts_get_the_text_that_llm_gives(inference: vInference) -> None:
    kinds = [
        GREEDY,
        SamplingParams(max_tokens=20, temperature=0.9, top_k=50, seed=3, repetition_penalty=1.1),
        SamplingParams(max_tokens=5),
    ]
    asked = [(TEXTS[0], params) for params in kinds] + [(TEXTS[2], GREEDY)]  # one batch
    with LLM(engine="vinference", **MODEL) as llm:
        outputs = llm.generate([text for text, _ in asked], [params for _, params in asked])
        chat = llm.chat(CHAT, GREEDY).get_text()
    for (text, params), output in zip(asked[:3], outputs, strict=False):
        expected, found = output.outputs[0], inference.process_prompt(text, params)
        assert isinstance(found, PromptOutput)
        assert (found.text, found.generated_tokens) == (expected.text, len(expected.token_ids))
        assert found.finish_reason == expected.finish_reason
        assert found.error is None
    assert inference.process_prompt(CHAT, GREEDY).text == chat


def test_parts_of_a_stream_are_the_text_and_it_returns_the_state(inference: vInference) -> None:
    for prompt in (TEXTS[0], CHAT, BYTES):
        parts, state = drain(inference.process_prompt(prompt, GREEDY, stream=True))
        whole = inference.process_prompt(prompt, {"max_tokens": 20})
        assert "".join(parts) == whole.text
        assert len(parts) > 1
        assert isinstance(state, SampleState)
        assert state.generated_tokens == whole.generated_tokens


def test_characters_of_several_bytes_are_never_split(
    on_host: vInference, functions: HostFunctions
) -> None:
    """The model answers a text whose characters have up to four tokens each."""
    text = "żó 🦊 日本"
    functions.script = on_host.tokenizer.encode(text, add_special_tokens=False)
    assert len(text) < len(functions.script) < 20
    parts, _ = drain(on_host.process_prompt(TEXTS[0], GREEDY, stream=True))
    assert "".join(parts) == text
    del functions.script[-1]
    parts, _ = drain(on_host.process_prompt(TEXTS[0], GREEDY, stream=True))
    assert "".join(parts) == text[:-1] + "\ufffd", "a character that never ends, at the very end"


def test_lists_are_answered_in_order(on_host: vInference) -> None:
    outputs = on_host.process_prompt(list(TEXTS), GREEDY)
    assert [o.text for o in outputs] == [
        on_host.process_prompt(text, GREEDY).text for text in TEXTS
    ]
    streams = on_host.process_prompt(list(TEXTS), GREEDY, stream=True)
    assert ["".join(drain(parts)[0]) for parts in streams] == [o.text for o in outputs]
    assert on_host.process_prompt([], GREEDY) == []


def test_a_stop_text_ends_the_text(on_host: vInference) -> None:
    whole = on_host.process_prompt(TEXTS[0], GREEDY).text
    stop = whole[10:14]
    params = SamplingParams(max_tokens=20, stop=(stop,))
    found = on_host.process_prompt(TEXTS[0], params)
    assert (found.text, found.finish_reason) == (whole[: whole.index(stop)], "stop")
    parts, state = drain(on_host.process_prompt(TEXTS[0], params, stream=True))
    assert "".join(parts) == found.text
    assert int(state.current_length) < int(state.padded_length) + 20


@pytest.mark.parametrize("prompt", [3, None, [3], b"bytes", [[{"role": "user", "content": "x"}]]])
def test_a_prompt_of_another_type_is_a_type_error(on_host: vInference, prompt: Any) -> None:
    with pytest.raises(TypeError, match="a prompt of type"):
        on_host.process_prompt(prompt, GREEDY)


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        (3, TypeError, "sampling parameters of type int"),
        ({"temperature": -1}, ValueError, "temperature"),
        ({"nothing": 1}, ValueError, "nothing"),
        ({"n": 2}, ValueError, "num_return_sequences"),
        ({"regex": "a+"}, ValueError, "regex in the vInference API.*masks come from the host"),
        ({"logprobs": 0}, ValueError, "logprobs = 0.*do not store log-probabilities"),
        ({"prompt_logprobs": 1}, ValueError, "prompt_logprobs = 1.*do not store log-probabilities"),
        ({"best_of": 2}, ValueError, "best_of = 2.*do not store log-probabilities"),
        ({"stop_words_ids": [[5, 6]]}, ValueError, "stop_words_ids = .*single token ids"),
    ],
)
def test_wrong_parameters_are_refused(
    on_host: vInference, params: Any, error: type, text: str
) -> None:
    with pytest.raises(error, match=text):
        on_host.process_prompt(TEXTS[0], params)


def test_what_cannot_be_tokenised_is_a_value_error(on_host: vInference) -> None:
    for prompt in ("\ud800", "", [{"role": "user"}], [{"role": 3, "content": "x"}]):
        with pytest.raises(ValueError, match="Allowed"):
            on_host.process_prompt(prompt, GREEDY)


def test_a_conversation_without_a_chat_template_is_a_type_error(on_host: vInference) -> None:
    inner = on_host.tokenizer.inner

    class Plain:
        chat_template = None
        encode, decode = inner.encode, inner.decode

    made = vInference(MODEL, Plain(), CONFIG)
    with pytest.raises(TypeError, match="chat template"):
        made.process_prompt(CHAT, GREEDY)


def test_an_error_in_a_stream_is_raised(on_host: vInference, functions: HostFunctions) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("device lost")

    parts = on_host.process_prompt(TEXTS[0], GREEDY, stream=True)
    next(parts)
    functions.before = fail
    with pytest.raises(RuntimeError, match="device lost"):
        next(parts)


@pytest.mark.parametrize("way", ["states", "resumed", "text"])
def test_another_thread_closes_a_generator_that_is_running(
    on_host: vInference, functions: HostFunctions, way: str
) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    ids, mask = encode(on_host, TEXTS[0])
    if way == "text":
        parts: Any = on_host.process_prompt(TEXTS[0], params, stream=True)
    elif way == "states":
        parts = on_host.generate(ids, mask, sampling_params=params)
    else:
        parts = on_host.resume(on_host.init_state(ids, mask, sampling_params=params))
    next(parts)
    runs, goes_on = threading.Event(), threading.Event()

    def wait(kind: str) -> None:
        runs.set()
        assert goes_on.wait(DEADLOCK_S)

    functions.before = wait
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(next, parts, "ended")
        assert runs.wait(DEADLOCK_S)
        try:
            parts.close()
            parts.close()
        finally:
            goes_on.set()
        assert reader.result(DEADLOCK_S) == "ended"
    assert next(parts, "ended") == "ended"
    with on_host.override(attention="xla", check=False):
        pass  # refused while a generation is under way


def test_metrics_count_prompts_and_tokens() -> None:  # holds V31
    pytest.importorskip("prometheus_client")
    made, _ = make_hostside(inference_name="mine")
    metrics = made.enable_metrics()
    assert made.metrics is metrics
    made.process_prompt([TEXTS[0]] * 2, SamplingParams(max_tokens=3, ignore_eos=True))
    value = metrics.registry.get_sample_value
    assert value("vinference_prompts_total", {"inference": "mine", "outcome": "length"}) == 2
    assert value("vinference_generated_tokens_total", {"inference": "mine"}) == 6
    assert value("vinference_prompt_seconds_count", {"inference": "mine"}) == 2
    assert value("vinference_running_prompts", {"inference": "mine"}) == 0
    assert made.enable_metrics() is metrics
    other, _ = make_hostside(inference_name="other")
    other.enable_metrics(shared=metrics)
    parts = other.process_prompt(TEXTS[0], stream=True)
    next(parts)
    parts.close()
    assert value("vinference_prompts_total", {"inference": "other", "outcome": "abandoned"}) == 1


def test_a_request_without_a_length_has_the_configurations() -> None:
    made, _ = make_hostside(CONFIG.replace(max_new_tokens=70))  # more than the default of requests
    assert made.process_prompt(TEXTS[0], SamplingParams(ignore_eos=True)).generated_tokens == 70
    assert made.process_prompt(TEXTS[0], {"ignore_eos": True}).generated_tokens == 70
    assert (
        made.process_prompt(TEXTS[0], {"ignore_eos": True, "max_tokens": 7}).generated_tokens == 7
    )


def test_a_prompt_that_is_only_scored_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens = 0"):
        as_params({"max_tokens": 0}, SamplingParams())
