"""The outcome of one check: six verdicts, and how an exception becomes one of them."""

from __future__ import annotations

import dataclasses
import time
import traceback
import unittest
from collections.abc import Callable, Mapping
from typing import Literal

from enginebay.errors import CompilationError, PluginError, UnsupportedError

Verdict = Literal["PASS", "INCORRECT", "CHEAT", "UNSUPPORTED", "ERROR", "TIMEOUT"]

FAULTS: frozenset[Verdict] = frozenset({"INCORRECT", "CHEAT", "ERROR", "TIMEOUT"})
"""Verdicts that count as failures."""

KIT = "enginebay_testing"

Check = tuple[str, Callable[[], None]]
"""A name, and a function that raises AssertionError, with the case, when the check fails, or
unittest.SkipTest when it does not apply.
"""

Run = Callable[[], Mapping[str, int] | None]
"""A check: returns figures, or None if it has none."""


class InexactError(AssertionError):
    """A result whose error exceeds the bound; both numbers are in the unit of the result."""

    def __init__(self, message: str, error: float, bound: float) -> None:
        super().__init__(message)
        self.error = error
        self.bound = bound


class CheatError(AssertionError):
    """A part cheats the code that checks or times it; the message names how."""


def expect(holds: object, what: str) -> None:
    """Raise AssertionError with `what` unless `holds`. A plugin's checks of its own op call
    it, because an AssertionError is INCORRECT only if this package raises it, and else ERROR.
    """
    if not holds:
        raise AssertionError(what)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A verdict and its reasons. `error` and `bound` are set for results that were compared with a
    bound.

    `seconds` is the wall time of the check, compilation included. `figures` come from a compiler
    (see `enginebay_testing.toolchains.CompileReport`).
    """

    verdict: Verdict
    detail: str = ""
    error: float | None = None
    bound: float | None = None
    seconds: float = 0.0
    figures: Mapping[str, int] = dataclasses.field(default_factory=dict)


def judge(run: Run) -> Outcome:
    """Run a check and return its outcome; every exception except KeyboardInterrupt becomes a
    verdict.

    An AssertionError is INCORRECT if the kit raised it, and ERROR if the code of the part or of a
    library raised it.
    """
    start = time.perf_counter()

    def outcome(
        verdict: Verdict, detail: str = "", error: float | None = None, bound: float | None = None
    ) -> Outcome:
        return Outcome(verdict, detail, error, bound, time.perf_counter() - start)

    try:
        figures = run()
    except unittest.SkipTest as skip:
        return outcome("UNSUPPORTED", str(skip))
    except InexactError as wrong:
        return outcome("INCORRECT", str(wrong), wrong.error, wrong.bound)
    except CheatError as cheat:
        return outcome("CHEAT", str(cheat))
    except AssertionError as wrong:
        if _raised_by_the_kit(wrong):
            return outcome("INCORRECT", str(wrong) or "an assertion of the kit without a message")
        return outcome("ERROR", describe(wrong))
    except PluginError as error:
        if isinstance(
            error.__cause__, UnsupportedError
        ):  # raised by a kernel while it was imported
            return outcome("UNSUPPORTED", str(error.__cause__))
        return outcome("ERROR", describe(error))
    except CompilationError as error:
        return outcome("ERROR", describe(error))
    except UnsupportedError as error:  # the only way to decline a problem for ops without Caps
        return outcome("UNSUPPORTED", str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the verdict of a check is what its part raises
        return outcome("ERROR", describe(error))
    return dataclasses.replace(outcome("PASS"), figures=dict(figures or {}))


def describe(error: BaseException) -> str:
    """Return an exception as one line: its type, its message, and the place that raised it."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def _raised_by_the_kit(error: AssertionError) -> bool:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))
    return module == KIT or module.startswith(f"{KIT}.")
