"""What the documentation shows, run on the first layers of the demo model: the same calls, and a
third of the compiling.
"""

from __future__ import annotations

from tests.brief import BRIEF

OF_ENGINES = ("generate", "chat", "explain", "eval")
"""Commands that make an engine of the model that they are given, the demo model when none is."""


def on_brief(code: str) -> str:
    """Python code that uses BRIEF where it says "demo"."""
    return code.replace('"demo"', repr(BRIEF))


def with_brief(arguments: list[str]) -> list[str]:
    """A command line that uses BRIEF where it would use the demo model."""
    if arguments[0] not in OF_ENGINES:
        return arguments
    assert "--model" not in arguments
    return [*arguments, "--model", BRIEF]
