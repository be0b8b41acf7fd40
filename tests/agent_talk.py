"""A conversation of an agent: ten turns with 20 tools, over templates with the marks and the rules
of five models. Each is rendered by the code that a server uses.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enginebay.text.worker.templates import Renderer
from enginebay_models.checkpoint import find_folder
from enginebay_models.tokenizer import load_tokenizer

FOLDER = Path(__file__).parent / "server" / "agents" / "templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
MARK = re.compile(r"(</?\|?[a-z_]+\|?>)")
"""What a model of these templates has as one token."""

FIRST_MARK = 2048
VERBS, THINGS = ("read", "write", "find", "show", "drop"), ("file", "folder", "test", "issue")
NAMES = [f"{verb}_{thing}" for verb in VERBS for thing in THINGS]
RULES = (
    "Work until the task is done, and check each change with the tests of its part.",
    "Read a file before you edit it, and edit the smallest piece that mends the fault.",
    "Explain nothing that the user has not asked for, and ask when a wish has two meanings.",
    "Never remove a file or a branch that you have not made in this conversation.",
    "Write code in the style of the file around it, with the names that the project uses.",
)
NUM_TURNS = 10
ANSWERS = (3, 6, 9)
"""Turns that end with a text, after which the user writes again. The others call a tool."""


def _tool(name: str) -> dict[str, Any]:
    what = name.replace("_", " ")
    fields = {
        "path": (
            "string",
            f"The path below the project's root that this call works on, to {what}.",
        ),
        "limit": ("integer", "Max lines of the result. Leave it out for the first two hundred."),
        "mode": ("string", "How much of each result is shown: short, or full for all of its text."),
    }
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in fields.items()}
    text = (
        f"Use it to {what} in the user's project. It returns the text of the result, cut after two "
        "thousand characters, or an error that says what to change. Prefer it to a command of the "
        "shell that does the same."
    )
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [_tool(name) for name in NAMES]
SYSTEM = "\n".join(
    f"{number}. In {part}: {rule}"
    for number, (part, rule) in enumerate(
        itertools.product(
            ("every task", "tests", "code", "the shell", "git", "documents", "plans"), RULES
        ),
        1,
    )
)


def turns(*, reasons: bool) -> list[list[dict[str, Any]]]:
    """The messages of each turn, before the assistant's answer. With `reasons`, answers have
    reasoning.
    """
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "The tests of the parser fail since yesterday. Mend it."},
    ]
    found = []
    for turn in range(1, NUM_TURNS + 1):
        found.append(list(talk))
        thought = (
            f"Step {turn}: the last result names a file that I have not read, so I look at it."
        )
        answer: dict[str, Any] = {"role": "assistant", "content": f"I look at part {turn}."}
        if reasons:
            answer["reasoning_content"] = thought
        if turn in ANSWERS:
            answer["content"] = f"Part {turn} is done: the parser reads empty lines again."
            talk += [answer, {"role": "user", "content": f"Good. Now do part {turn + 1} too."}]
            continue
        arguments = {"path": f"src/parser_{turn}.py", "limit": 40 * turn}
        function = {"name": NAMES[turn], "arguments": arguments}
        called = f"call{turn:05d}"
        answer["tool_calls"] = [{"id": called, "type": "function", "function": function}]
        result = f"line {turn}: def parse(text):\n3 tests passed, {turn} failed"
        talk += [answer, {"role": "tool", "tool_call_id": called, "content": result}]
    return found


@functools.cache
def prompts(template: str, *, reasons: bool) -> Sequence[Sequence[int]]:
    """The token ids of the prompt of each turn, by the demo model's tokenizer but for marks."""
    render, inner = (
        Renderer({"max_output_chars": 1 << 20}),
        load_tokenizer(find_folder("demo")).inner,
    )
    given = {"tools": TOOLS, "add_generation_prompt": True}
    request = {"template": TEMPLATES[template], "variables": {"bos_token": ""}, "given": given}
    texts = [
        render({**request, "messages": messages, "continued": False})["text"]
        for messages in turns(reasons=reasons)
    ]
    marks: dict[str, int] = {}
    found = []
    for text in texts:
        ids: list[int] = []
        for part in filter(None, MARK.split(text)):
            if MARK.fullmatch(part):
                ids.append(marks.setdefault(part, FIRST_MARK + len(marks)))
            else:
                ids += inner.encode(part, add_special_tokens=False)
        found.append(ids)
    return found
