"""The program's argument parser: no abbreviated flags, a default in every help text, and errors of
one line that say what to do.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Sequence

from enginebay.errors import InputError, explain, nearest, shown
from enginebay.validation import other_program_hint

NUMBERS = {"int": "a whole number", "float": "a number"}
WRONG_VALUE = re.compile(
    r"argument (?P<name>.+?): invalid (?P<kind>\w+) value: (?P<value>.*)", re.DOTALL
)
WRONG_CHOICE = re.compile(
    r"argument (?P<name>.+?): invalid choice: (?P<value>.+) \(choose from (?P<choices>.*)\)",
    re.DOTALL,
)
MISSING = re.compile(r"the following arguments are required: (?P<names>.+)")
NO_VALUE = re.compile(r"argument (?P<name>.+?): expected (one|at least one) argument")


class HelpWithDefaults(argparse.HelpFormatter):
    """Help in which every flag has its default, from its help text or from the parser."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None = None,
    ) -> None:
        """Add a short usage line: positional words and required flags. The list below has all
        flags.
        """
        listed = list(actions)
        needed = [action for action in listed if action.required or not action.option_strings]
        if len(needed) < len(listed):
            self._prog = f"{self._prog} [flags]"
        super().add_usage(usage, needed, groups if len(needed) == len(listed) else (), prefix)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if not action.option_strings or action.required or "default" in text:
            return text
        if isinstance(action, argparse._HelpAction | argparse._VersionAction):
            return text
        if action.nargs == 0:  # a switch
            return f"{text} (default: off)"
        is_empty = action.default is None or action.default == []
        return f"{text} (default: {'none' if is_empty else '%(default)s'})"


class CommandParser(argparse.ArgumentParser):
    """A parser that raises InputError for wrong arguments and accepts no abbreviated flags."""

    def __init__(self, *, prog: str, description: str | None = None) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=HelpWithDefaults
        )

    def error(self, message: str) -> None:  # type: ignore[override]
        raise InputError(_missing(self, message) or _reworded(message, self.prog))


def _missing(parser: argparse.ArgumentParser, message: str) -> str | None:
    """Return the message for a missing word of a command that takes one of a few; else None."""
    found = MISSING.fullmatch(message)
    if found is None:
        return None
    first = found["names"].partition(",")[0]
    for action in parser._actions:
        if action.choices and first in (action.dest, action.metavar) and not action.option_strings:
            choices = [str(one) for one in action.choices]
            given = f"`{parser.prog}` without saying {first}"
            return explain(given, ", ".join(choices), f"Write `{parser.prog} {choices[0]}`.")
    return None


def refuse_rest(
    parser: argparse.ArgumentParser, args: argparse.Namespace, rest: Sequence[str]
) -> None:
    """Raise InputError for words that a command's parser did not consume, flags first."""
    flags = [word for word in rest if word.startswith("-") and word not in ("-", "--")]
    if flags:
        raise InputError(_unknown_flag(parser, flags[0].partition("=")[0]))
    if rest:
        raise InputError(_second_word(parser, args, rest))


def _unknown_flag(parser: argparse.ArgumentParser, name: str) -> str:
    known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    longer = [flag for flag in known if flag.startswith(name)]
    # Without the dashes, which every flag has: they make short flags look alike.
    by_name = {flag.lstrip("-"): flag for flag in known}
    near = by_name.get(nearest(name.lstrip("-"), by_name, cutoff=0.65) or "")
    if longer:
        return explain(
            f"incomplete flag {name}", " or ".join(longer[:6]), "Write the flag in full."
        )
    todo = other_program_hint(name, is_flag=True) or (
        f"Did you mean {near}?" if near else "Leave it out."
    )
    return explain(
        f"unknown flag {shown(name)[1:-1]}", f"the flags of `{parser.prog} --help`", todo
    )


def _second_word(
    parser: argparse.ArgumentParser, args: argparse.Namespace, rest: Sequence[str]
) -> str:
    positional = next((a for a in parser._actions if not a.option_strings and a.nargs == "?"), None)
    first = None if positional is None else getattr(args, positional.dest, None)
    if positional is None or first is None:
        return explain(
            f"the word {shown(rest[0])}", f"only flags after `{parser.prog}`", "Leave it out."
        )
    quoted = shlex.quote(" ".join([str(first), *rest]))
    return explain(
        f"a second word {shown(rest[0])} after {shown(first)}",
        f"one {positional.metavar or positional.dest}",
        f"Put quotes around a text of several words: {parser.prog} "
        f"{shown(quoted)[1:-1] if len(quoted) > 100 else quoted}",
    )


def _reworded(message: str, prog: str) -> str:
    """Rewrite a message of argparse in three parts."""
    if found := WRONG_VALUE.fullmatch(message):
        allowed = NUMBERS.get(found["kind"], found["kind"])
        return explain(f"{found['name']} {found['value']}", allowed, f"See `{prog} --help`.")
    if found := WRONG_CHOICE.fullmatch(message):
        choices = [choice.strip().strip("'\"") for choice in found["choices"].split(",")]
        near = nearest(found["value"].strip("'\""), choices)
        todo = f"Did you mean {near!r}?" if near else f"See `{prog} --help`."
        return explain(f"{found['name']} {found['value']}", ", ".join(choices), todo)
    if found := NO_VALUE.fullmatch(message):
        flag = found["name"]
        return explain(
            f"{flag} without a value",
            f"{flag} VALUE",
            f"Write {flag}=VALUE if the value begins with -.",
        )
    return f"{message}. See `{prog} --help`."
