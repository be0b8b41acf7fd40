"""What LLM refuses: wrong prompts, parameters, messages and choices, each before anything is queued
or loaded.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.config import EngineConfig
from enginebay.errors import ConfigError, InputError, RequestError
from tests.brief import BRIEF
from tests.unit.serving import GREEDY, HOT, SIZES, assert_idle, forbid_requests, with_

pytestmark = pytest.mark.xdist_group("llm")

BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "an empty prompt"),
    ([[]], "an empty prompt"),
    ([5] * 160, "a prompt of 160 tokens. Allowed: at most 159"),
    ("word " * 300, "a prompt of .* tokens. Allowed: at most 159"),
    ([1, 2048], "token id 2048. Allowed: 0 to 2047"),
    ([1, -1], "token id -1"),
    (5, "a prompt of type int"),
    (None, "a prompt of type NoneType"),
    (b"bytes", "a prompt of type bytes"),
    ([b"bytes"], "a prompt of type bytes"),
    ({"prompt": "text"}, "a prompt of type dict"),
    ([1, "a"], "a prompt of type int"),
    ([[1.5]], "a prompt of type list with items that are not token ids"),
    (np.array(3), "a prompt of type ndarray"),
    ("lone \ud800", "lone surrogate"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_nothing_is_queued(
    fake_llm: LLM, monkeypatch: pytest.MonkeyPatch, prompts: Any, message: str
) -> None:
    forbid_requests(fake_llm, monkeypatch)
    with pytest.raises(RequestError, match=message):
        fake_llm.generate(prompts, GREEDY)
    holds_prompts = isinstance(prompts, list) and not isinstance(prompts[0], int)
    one = prompts[0] if holds_prompts else prompts
    with pytest.raises(RequestError):
        fake_llm.generate(["fine", one], with_(HOT, max_tokens=150))
    with pytest.raises(RequestError):
        fake_llm.stream(one, GREEDY)
    assert_idle(fake_llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "1 sampling parameters for 2 prompts"),
        ([GREEDY] * 3, "3 sampling parameters for 2 prompts"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ([GREEDY, 3], "sampling parameters of type int"),
        (SamplingParams(stop_token_ids=[2048]), "stop token id 2048"),
        (SamplingParams(stop_token_ids=[-1]), "stop token id -1"),
        (
            SamplingParams(stop_token_ids=list(range(10, 30))),
            "stop tokens, end-of-sequence tokens included",
        ),
    ],
)
def test_bad_parameters_are_refused_and_nothing_is_queued(
    fake_llm: LLM, monkeypatch: pytest.MonkeyPatch, params: Any, message: str
) -> None:
    forbid_requests(fake_llm, monkeypatch)
    with pytest.raises(RequestError, match=message):
        fake_llm.generate(["A", "B"], params)
    assert_idle(fake_llm)


def test_bad_messages_are_refused(fake_llm: LLM) -> None:
    for messages in ([], "hello", [{"content": "no role"}], [{"role": "user"}]):
        with pytest.raises(RequestError):
            fake_llm.chat(messages, GREEDY)
    with pytest.raises(RequestError, match="n = 2 in astream"):
        asyncio.run(anext(fake_llm.astream("A", with_(GREEDY, n=2))))


@pytest.mark.usefixtures("faked")
def test_a_greedy_sampler_refuses_temperatures_and_penalties() -> None:
    with LLM(BRIEF, sampler="greedy", processors=(), **SIZES) as llm:
        with pytest.raises(RequestError, match="greedy only"):
            llm.generate("Once", HOT)
        for penalty, neutral in (("presence", 0), ("frequency", 0), ("repetition", 1)):
            name = f"{penalty}_penalty"
            with pytest.raises(
                RequestError, match=rf"{name} = 0\.5 .*greedy only.*{name} = {neutral}\."
            ):
                llm.generate("Once", with_(GREEDY, **{name: 0.5}))
        assert_idle(llm)


@pytest.mark.usefixtures("faked")
def test_a_greedy_sampler_takes_penalties_that_a_processor_applies() -> None:
    with LLM(BRIEF, sampler="greedy", processors=("penalties",), **SIZES) as llm:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            [output] = llm.generate("Once", with_(GREEDY, **{name: 0.5}))
            assert output.outputs[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"config": EngineConfig(), "dtype": "float32"}, "config and model, dtype"),
        ({"max_seqs": 3}, "max_seqs"),
        ({"engine": "vinferense"}, "unknown engine 'vinferense'.*Did you mean 'vinference'"),
        ({"engine": {"name": "vinference", "pagesize": 8}}, "pagesize.*page_size"),
        ({"shadow": {"attn": "xla"}}, "unknown op to shadow 'attn'.*Did you mean 'attention'"),
        ({"kernels": {"atention": "xla"}}, "unknown op 'atention'.*Did you mean 'attention'"),
        ({"kernels": {"linear": "xls"}}, "unknown kernels.linear 'xls'"),
        (
            {"kernels": {"attention": {"decode": "xls"}}, "layout": "hnd"},
            "unknown kernels.attention.decode 'xls'",
        ),
        ({"mesh": {"tensor": 999}}, "needs 999 devices"),
        ({"max_model_len": 5000}, "at most 1024, the model's own"),
    ],
)
def test_a_wrong_choice_is_refused_before_anything_is_loaded(
    choices: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        LLM("demo", **choices)
    assert isinstance(refusal.value, ConfigError) or "unknown" in str(refusal.value)


METHODS = ["generate", "embed", "stream", "chat", "chat_stream", "submit", "astream"]


@pytest.mark.parametrize("method", METHODS)
def test_an_unknown_argument_names_the_method_and_what_was_meant(
    fake_llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    forbid_requests(fake_llm, monkeypatch)
    call: Any = getattr(fake_llm, method)
    with pytest.raises(TypeError, match=rf"LLM\.{method}\(\) with the argument max_tokens") as info:
        call("x", max_tokens=3)
    assert "Pass params=SamplingParams(max_tokens=...)" in str(info.value)
    assert "priorities_of" not in str(info.value)
    with pytest.raises(RequestError, match="Did you mean priority"):
        call("x", prioritiy=3)
    with pytest.raises(RequestError, match=r"Leave xyz out"):
        call("x", xyz=3)


def test_a_path_names_a_model() -> None:
    assert EngineConfig(model=Path("some/folder")).model == str(Path("some/folder"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no/such: there is no such folder|no.such"):
        LLM(Path("./no/such"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_forked_child_is_told_to_spawn(fake_llm: LLM) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        words = "returned"
        try:
            fake_llm.generate("Once", GREEDY)
        except BaseException as error:  # noqa: BLE001  # the child says what it was
            words = f"{type(error).__name__}: {error}"
        os.write(write, words.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert "StoppedError" in text
    assert 'get_context("spawn")' in text
