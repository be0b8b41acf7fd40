"""chat on a terminal: a banner, commands, tokens per second, and Ctrl-C that ends an answer."""

from __future__ import annotations

import builtins
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.outputs import StreamChunk

pytestmark = [pytest.mark.xdist_group("llm"), pytest.mark.usefixtures("faked")]
Run = Callable[..., tuple[int, str, str]]
MESSAGE = "What color is the sky?"


@pytest.fixture
def type_lines(run: Run, config: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Types lines at a terminal, then Ctrl-D; an exception among them is raised. What the terminal
    shows.
    """

    def call(*lines: Any, code: int = 0) -> str:
        waiting = iter(lines)

        def read(prompt: str = "") -> str:
            assert prompt == "> "
            assert signal.getsignal(signal.SIGINT) is not signal.SIG_DFL, "Ctrl-C would end all"
            line = next(waiting, EOFError())
            if isinstance(line, KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            if isinstance(line, BaseException):
                raise line
            return str(line)

        monkeypatch.setattr(builtins, "input", read)
        for stream in (sys.stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
        found, out, err = run(
            "chat", "--max-tokens", "8", "--system", "Be kind.", "--config", config
        )
        assert (found, err) == (code, "")
        return out

    return call


def answer(llm: LLM, *messages: str) -> str:
    roles = ("user", "assistant")
    told = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return llm.chat(
        [{"role": "system", "content": "Be kind."}, *told], SamplingParams(max_tokens=8)
    ).get_text()


def test_a_banner_answers_and_their_rates(type_lines: Callable[..., str], fake_llm: LLM) -> None:
    first = answer(fake_llm, MESSAGE)
    lines = type_lines(MESSAGE, "", "Really?").splitlines()
    assert "engine " in lines[0]
    assert "attention " in lines[0]
    assert "160 tokens" in lines[0]
    assert "/help" in lines[1]
    shown = "\n".join(lines[2:])
    assert shown.startswith(f"{first}\n[8 tokens, ")
    assert answer(fake_llm, MESSAGE, first, "Really?") in shown
    assert shown.count(" tokens/s, first token after ") == 2


def test_commands(type_lines: Callable[..., str], fake_llm: LLM) -> None:
    out = type_lines(
        "/help", "Hello", "/clear", MESSAGE, "/helo", "/exit", AssertionError("read on")
    )
    assert "/clear   forget the conversation" in out
    assert "The conversation starts again." in out
    assert answer(fake_llm, MESSAGE) in out, "as if it were the first message"
    assert "unknown command '/helo'" in out
    assert "Did you mean '/help'?" in out


def test_a_message_that_is_refused_is_no_end(type_lines: Callable[..., str], fake_llm: LLM) -> None:
    out = type_lines("word " * 400, MESSAGE)
    assert "a prompt of " in out
    assert "/clear starts the conversation again." in out
    assert answer(fake_llm, MESSAGE) in out, "the refused message is not in the conversation"


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT as Python handles it; it is ignored where a shell starts tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    type_lines: Callable[..., str], monkeypatch: pytest.MonkeyPatch, fake_llm: LLM
) -> None:
    real, histories = LLM.chat_stream, []

    def cut_short(llm: LLM, messages: Any, params: Any, **turn: Any) -> Iterator[StreamChunk]:
        histories.append([one["content"] for one in messages])
        chunks = real(llm, messages, params, **turn)
        yield next(chunks)
        if len(histories) < 3:
            signal.raise_signal(signal.SIGINT)
        yield from chunks

    monkeypatch.setattr(LLM, "chat_stream", cut_short)
    out = type_lines(KeyboardInterrupt(), MESSAGE, KeyboardInterrupt(), "Why?", "Really?")
    assert out.count("/exit or Ctrl-D ends the conversation.") == 2
    assert out.count("[interrupted]") == 2
    assert [len(one) for one in histories] == [2, 4, 6], "an answer that was cut short stays"
    assert out.count(" tokens/s") == 1
