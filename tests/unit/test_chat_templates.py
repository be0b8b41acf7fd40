"""Chat templates are rendered as transformers renders them, in a worker process that no template
outlives.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from enginebay.config_sections import TemplateLimits
from enginebay.contracts.text import Tokenizer
from enginebay.errors import RequestError, UnsupportedError
from enginebay.text.tokenizer import TextTokenizer
from enginebay.text.worker.process import LimitedWorker, LimitError, WorkerError, WorkerLimits
from enginebay_models.checkpoint import find_folder
from enginebay_models.tokenizer import load_tokenizer
from tests.unit.test_text import byte_level

HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
SMALL = TemplateLimits(time_s=1.0, memory_bytes=64 << 20, max_output_chars=1000)
TALK = [
    {"role": "system", "content": "  be brief  ", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "hi "}]},
    {"role": "assistant", "content": "ho", "reasoning": "hm"},
    {"role": "user", "content": "naïve 日本 <b>&"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, None, True]}}}]
TEMPLATES = [
    (
        "{% for m in messages %}\n  {% if m.name is defined %}named{% endif %}\n{{ m | "
        "tojson }}\n{% endfor %}"
    ),
    (
        "{{ bos_token }}{{ eos_token }}{{ messages | map(attribute='role') | "
        "join(',') }}{{ tools | tojson(indent=2) }}"
    ),
    "{% generation %}{% set x = 1 %}{{ messages[2].reasoning_content }}{% endgeneration %}{{ x }}",
    (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.last %}{% break %}{% "
        "endif %}{% set ns.n = 3 %}{% endfor %}{{ ns.n }}"
    ),
    "{{ dict(a=1) }}{{ strftime_now('%Y') }}",
    "{{ messages[3].content.split(' ')[0] | upper }}{{ messages[0].content.strip() }}{{ more }}",
    "{{ add_generation_prompt }}{{ tools is none }}{{ ''.__class__ }}{{ nothing }}",
]


@pytest.fixture(scope="module")
def own() -> Iterator[Tokenizer]:
    """A tokenizer whose templates have small limits."""
    made = TextTokenizer(byte_level().inner)
    made.limit_templates(SMALL)
    yield made
    made.close()


@functools.cache
def theirs() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(find_folder("demo"))


def text_of(tokenizer: Tokenizer, messages: Any = HELLO, **fields: Any) -> str:
    return tokenizer.decode(
        tokenizer.apply_chat_template(messages, **fields), skip_special_tokens=False
    )


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_templates_are_rendered_as_by_transformers(own: Tokenizer, template: str) -> None:
    wanted = own.inner.apply_chat_template(  # type: ignore[attr-defined]
        TALK,
        tools=TOOLS,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        more=7,
    )
    given = {"chat_template": template, "chat_template_kwargs": {"more": 7}}
    assert text_of(own, TALK, tools=TOOLS, **given) == wanted


@pytest.mark.parametrize("field", [True, "reasoning_content"])
@pytest.mark.parametrize("strip", ["", ".strip()"])
def test_a_final_message_is_continued_as_by_transformers(
    own: Tokenizer, strip: str, field: bool | str
) -> None:
    template = (
        "{% for m in messages %}<{{ (m.reasoning_content or '')"
        + strip
        + " }}|{{ m.content"
        + strip
        + " }}>{% endfor %}"
    )
    talk = [*TALK[:1], {"role": "assistant", "content": "so  ", "thinking": "hm  "}]
    fields = {
        "chat_template": template,
        "add_generation_prompt": False,
        "continue_final_message": field,
    }
    wanted = own.inner.apply_chat_template(talk, tokenize=False, **fields)  # type: ignore[attr-defined]
    assert text_of(own, talk, **fields) == wanted
    parts = [*TALK[:1], {"role": "user", "content": [{"text": "a"}, {"text": "b"}, {"image": 1}]}]
    fields = {
        "chat_template": "{{ messages[1].content[1].text" + strip + " }}!",
        "add_generation_prompt": False,
    }
    assert text_of(own, parts, **fields, continue_final_message=True) == "b"


def test_special_tokens_of_a_plain_tokenizer_are_those_of_transformers() -> None:
    inner: Any = load_tokenizer(find_folder("demo")).inner
    assert inner.special_tokens_map == theirs().special_tokens_map


@pytest.mark.parametrize(
    ("template", "limit"),
    [
        (ENDLESS, r"limit of time. Allowed: 1 seconds \(template_limits.time_s"),
        ("{{ 'a' * 10**9 }}", r"limit of memory. Allowed: 67108864 bytes.*memory_bytes"),
        (
            "{% for i in range(999) %}ab{% endfor %}",
            r"limit of output. Allowed: 1000 .*max_output_chars",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "limit of depth"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "limit of depth"),
        ("{{ 1 / 0 }}", "refuses: the template raised ZeroDivisionError"),
        ("{% if", "refuses: line 1 of the template"),
        ("{{ nothing.at.all }}", "refuses: .*'nothing' is undefined"),
        ("{{ raise_exception('no, never') }}", "refuses: no, never"),
        ("{% include 'x' %}", "refuses: the template raised TypeError"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "refuses: .*__class__"),
        (7, "chat_template of type int"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_whatever_a_template_does_is_a_refused_request(
    own: Tokenizer, template: Any, limit: str
) -> None:
    with pytest.raises(RequestError, match=limit):
        own.apply_chat_template(HELLO, chat_template=template)
    assert text_of(own) == "<|user|>hello<|assistant|>"


def test_a_template_that_exceeds_a_limit_is_ended_with_its_process(own: Tokenizer) -> None:
    own.apply_chat_template(HELLO)
    worker = own._chats._worker
    before = worker.pid
    assert before is not None
    with pytest.raises(RequestError, match="limit of memory"):
        own.apply_chat_template(HELLO, chat_template="{{ 'a' * 10**9 }}")
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    own.apply_chat_template(HELLO)
    assert worker.pid not in (None, before)
    os.kill(int(worker.pid or 0), 9)
    assert (
        text_of(own) == "<|user|>hello<|assistant|>"
    )  # one that died while it was idle is replaced unseen
    own.close()
    assert worker.pid is None


def test_values_that_json_has_not(own: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x", "n": np.int32(3), "t": (1, 2), "o": object()}]
    assert (
        text_of(own, messages, chat_template="{{ messages[0].n + 1 }}{{ messages[0].o }}")
        == "4<object>"
    )
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        own.apply_chat_template([{"role": "user", "content": deep}])
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(RequestError, match="Circular"):
        own.apply_chat_template([{"role": "user", "content": knot}])
    while deep:
        deep = deep.pop()  # not by recursion


def test_an_assistants_message_with_calls_needs_no_content(own: Tokenizer) -> None:
    """As transformers renders it; a message without calls needs a content."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    template = "{% for m in messages %}[{{ m.role }}{{ m.content }}{{ m.tool_calls }}]{% endfor %}"
    chat = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    ids = own.apply_chat_template(chat, chat_template=template)
    assert "[assistant[{'type': 'function'" in own.decode(ids)
    for message in ({"role": "assistant"}, {"role": "user", "tool_calls": [call]}):
        with pytest.raises(RequestError, match="without a text or list as content"):
            own.apply_chat_template([*HELLO, message])
    with pytest.raises(RequestError, match="no text in"):
        own.apply_chat_template(
            chat,
            chat_template=template,
            continue_final_message=True,
            add_generation_prompt=False,
        )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tools": "f"}, "tools with a str"),
        ({"tools": [print]}, "tools with a builtin_function"),
        ({"chat_template_kwargs": {"messages": []}}, "messages in chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs of type list"),
        ({"continue_final_message": True}, "continue_final_message with add_generation_prompt"),
        ({"continue_final_message": "no", "add_generation_prompt": False}, "no text in no"),
    ],
)
def test_what_no_template_could_take_is_refused(
    own: Tokenizer, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        own.apply_chat_template(HELLO, **fields)


class Named:
    """A tokenizer whose model has several templates."""

    def __init__(self) -> None:
        self.chat_template: Any = {"default": "D", "tool_use": "T", "other": "O"}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]

    def decode(self, token_ids: Any, **_: Any) -> str:
        return "".join(map(chr, token_ids))


class Renders(Named):
    """A tokenizer with a renderer of its own, which is no Jinja text."""

    def __init__(self) -> None:
        self.chat_template = True

    def apply_chat_template(self, messages: Any, **fields: Any) -> Any:
        if messages[0]["content"] == "exit":
            raise SystemError("out of order")
        assert fields.pop("tokenize") is False
        return json.dumps(fields) if messages[0]["content"] == "hello" else 5


def test_a_model_may_have_several_templates() -> None:
    tokenizer = TextTokenizer(Named())  # type: ignore[arg-type]
    assert text_of(tokenizer) == "D"
    assert text_of(tokenizer, tools=TOOLS) == "T"
    assert text_of(tokenizer, chat_template="other") == "O"
    assert text_of(tokenizer, chat_template="{{ messages[0].content }}") == "hello"
    tokenizer.inner.chat_template = {"other": "O"}
    with pytest.raises(RequestError, match="with chat templates other"):
        tokenizer.apply_chat_template(HELLO)
    tokenizer.inner.chat_template = [1]
    with pytest.raises(RequestError, match="a chat template of type list"):
        tokenizer.apply_chat_template(HELLO)
    tokenizer.inner.chat_template = None
    with pytest.raises(UnsupportedError, match="without a chat template"):
        tokenizer.apply_chat_template(HELLO)
    tokenizer.close()


def test_a_renderer_of_a_tokenizers_own_still_works() -> None:
    tokenizer = TextTokenizer(Renders())  # type: ignore[arg-type]
    got = json.loads(text_of(tokenizer, chat_template_kwargs={"more": 1}))
    assert got == {"tools": None, "chat_template": None, "add_generation_prompt": True, "more": 1}
    with pytest.raises(RequestError, match="SystemError: out of order"):
        tokenizer.apply_chat_template([{"role": "user", "content": "exit"}])
    with pytest.raises(RequestError, match="returned a int"):
        tokenizer.apply_chat_template([{"role": "user", "content": "five"}])
    assert tokenizer._chats._worker.pid is None


LIMITS = WorkerLimits(time_s=30.0, memory_bytes=64 << 20, stack_bytes=8 << 20)


def test_a_worker_has_not_imported_jax_and_hears_nothing_of_prints() -> None:
    worker = LimitedWorker("tests.unit.worker_tasks:Tasks", {"base": 3}, LIMITS)
    assert worker.ask({"do": "add", "value": 4}) == 7
    assert worker.ask({"do": "print"}) == "printed"
    assert not {"jax", "jaxlib", "numpy", "transformers"} & set(worker.ask({"do": "modules"}))
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        worker.ask({"do": "exit"})
    assert worker.ask({"do": "add", "value": 1}) == 4
    with pytest.raises(WorkerError, match="ended with code 9"):
        worker.ask({"do": "die"})
    with pytest.raises(LimitError, match="stack"):
        worker.ask({"do": "crash"})
    assert worker.ask({"do": "add", "value": 1}) == 4
    worker.close()
    with pytest.raises(WorkerError, match="No module named"):
        LimitedWorker("tests.unit.nowhere:Tasks", {}, LIMITS).ask(1)


def test_several_threads_share_a_worker(own: Tokenizer) -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = text_of(own, [{"role": "user", "content": f"n{number}"}])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: f"<|user|>n{n}<|assistant|>" for n in range(4)}


def test_a_worker_ends_with_its_parent() -> None:
    """The first worker is idle, and the second one is within a request that it does not finish."""
    program = (
        "import os; from enginebay.text.worker.process import *\n"
        "def make(): return LimitedWorker('tests.unit.worker_tasks:Tasks', {'base': 1}, "
        "WorkerLimits(9, 1 << 28, 1 << 23))\n"
        "idle, busy = make(), make(); idle.start(); busy.start()\n"
        "print(idle.pid, busy.pid, flush=True)\n"
        "busy._process.send(frame({'do': 'sleep'}), 9); os._exit(0)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    waiting, left = threading.Event(), set(map(int, said.split()))
    for _ in range(600):
        for pid in [*left]:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                left.remove(pid)
        if not left:
            return
        waiting.wait(0.05)
    pytest.fail("the worker is still there")
