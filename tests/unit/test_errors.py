"""The exception tree: exit codes, three-part messages, and the nearest match."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from enginebay import errors
from enginebay.config import make_config
from enginebay.errors import (
    ConfigError,
    EnginebayError,
    InputError,
    InternalError,
    UnsupportedError,
    explain,
    shown,
    unknown_name,
)
from enginebay.plugins.blame import failure

EVERY_ERROR = [
    e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, EnginebayError)
]


@pytest.mark.parametrize("error", EVERY_ERROR)
def test_an_error_belongs_to_one_branch_and_its_exit_code_follows(
    error: type[EnginebayError],
) -> None:
    branches = [
        b
        for b in (InputError, UnsupportedError, InternalError, errors.StoppedError)
        if issubclass(error, b)
    ]
    assert len(branches) == (0 if error is EnginebayError else 1)
    users_own = issubclass(error, InputError | UnsupportedError)
    assert error.exit_code == (2 if users_own else 1)


def test_wrong_input_is_a_value_error() -> None:
    assert issubclass(InputError, ValueError)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    message = str(unknown_name("scheduler", "fcsf", ["static_batch", "fcfs", "fcfs"]))
    assert message == (
        "unknown scheduler 'fcsf'. Allowed: fcfs, static_batch. "
        "Did you mean 'fcfs'? Choose one of these."
    )


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    assert "Did you mean" not in str(unknown_name("engine", "zzz", ["vinference"]))


def test_a_quoted_sentence_ends_once() -> None:
    assert explain("it says 'no.'.", "yes", "Ask.") == "it says 'no.'. Allowed: yes. Ask."
    assert explain("a text, cut...", "yes", "Ask.") == "a text, cut.... Allowed: yes. Ask."
    assert "failed: KeyboardInterrupt. Allowed" in str(failure("it", KeyboardInterrupt()))


def test_nothing_installed_is_said() -> None:
    assert "Allowed: none is installed." in str(unknown_name("engine", "x", []))


LONG = "x" * 10_000 + "\n" + "y" * 10_000


@pytest.mark.parametrize(
    "values",
    [
        {LONG: 1},
        {"seed": LONG},
        {"seed": int("9" * 4000)},
        {"mesh": {LONG: "many"}},
        {"kernels": {LONG: {"decod": "xla"}}},
        {"kernels": {"attention": {LONG: "xla"}}},
        {"axis_rules": {LONG: "tensor"}},
        {"engine": {"name": "oengine", "options": LONG}},
        {f"key{i}" * 100: i for i in range(200)},
    ],
)
def test_a_message_about_a_wrong_value_quotes_at_most_a_line_of_it(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    assert len(str(caught.value)) < 2000
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_quoted_in_part() -> None:
    message = str(unknown_name("engine", LONG, ["oengine"]))
    assert len(message) < 300
    assert "\n" not in message


def test_what_repr_cannot_write_is_named_by_its_type() -> None:
    nested: list[object] = []
    for _ in range(200_000):
        nested = [nested]
    assert len(shown(nested)) <= 103
    assert shown(10**5000) == "a value of type int"


VAGUE = re.compile(
    r'"(Correct|Choose|Name|Give|Pass|Install|Simplify|Convert|Lower|Raise|Sort|Save|Add|Change) '
    r'(it|them|one|another|others|fewer|less|more|as many|anew)\."'
)
"""A third part of an error that does not say what to do it to."""


def test_errors_name_what_to_change() -> None:
    roots = [Path(__file__).resolve().parents[2] / top for top in ("core", "backends", "samplers")]
    files = [file for root in roots for file in root.rglob("*.py")]
    found = [
        f"{file.name}: {match[0]}" for file in files for match in VAGUE.finditer(file.read_text())
    ]
    assert len(files) > 300
    assert found == []


class Counted:
    """Counts how often it is shown."""

    num_shown = 0

    def __repr__(self) -> str:
        type(self).num_shown += 1
        return "x"


def test_only_the_beginning_of_a_large_value_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Showing all of a body of megabytes would hold up everybody else."""
    monkeypatch.setattr(Counted, "num_shown", 0)
    for value in ([Counted()] * 100_000, {n: Counted() for n in range(9_999)}, [[Counted()] * 999]):
        assert shown(value).endswith("...")
    assert 100 < Counted.num_shown < 1_000


@pytest.mark.parametrize(
    "value",
    [
        [], {}, (), (1,), [1, [2, {"a": None}]], ["a" * 94], ["a" * 95], ["a" * 200],
        {"k" * 99: 1}, [[[0] * 40] * 3] * 2, {"a": [1.5, True, "\n b"]}, [" " * 500],
        list(range(34)), [b"\0" * 300],
    ],
)  # fmt: skip
def test_what_is_shown_is_the_beginning_of_the_repr(value: object) -> None:
    text = " ".join(repr(value).split())
    assert shown(value).removesuffix("...") == text[:100].removesuffix("...")[: len(shown(value))]
    assert shown(value).endswith("...") == (len(text) > 100 or value == [" " * 500])
