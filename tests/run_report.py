"""Reports the distinct programs that a run compiled, and fails a whole run that exceeds the budget.

Each program takes a third of a second or more, so their number decides how long `make test` takes.
JAX logs the cache key of every program that it compiles or reads from its cache. Equal keys are
equal programs, also when two processes made them.
"""

from __future__ import annotations

import collections
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

MAX_PROGRAMS = 1940
"""Budget of distinct programs of a whole `make test`.

To raise it, give the reason in docs/testing.md.
"""
MARGIN = 40
"""Programs that a run may make beyond the budget.

Thread timing differs between runs, and so do the sizes of a few steps.
"""
MAKEFILE = Path(__file__).parents[1] / "Makefile"
[WHOLE_SUITE] = re.findall(r"^QUICK := (.+)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
"""The markers of `make test`. A run with other markers has no budget."""
NUM_FILES = 10

MADE = re.compile(r"(?:CACHE MISS|cache hit) for .* with key '([^']+)'")


class ProgramLog(logging.Filter):
    """Records the test file that first made each program, and drops JAX's DEBUG records."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}
        self.current = "(before the first test)"

    def filter(self, record: logging.LogRecord) -> bool:
        found = MADE.search(record.getMessage())
        if found is not None:
            self.files.setdefault(found[1], self.current)
        return record.levelno > logging.DEBUG


class RunReport:
    """The pytest plugin.

    Each worker counts its programs; the controller adds them up and reports.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.programs = ProgramLog()
        logger = logging.getLogger("jax._src.compiler")
        logger.setLevel(logging.DEBUG)
        logger.addFilter(self.programs)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.programs.current = nodeid.partition("::")[0]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """xdist calls this in the controller when a worker ends."""
        for key, file in getattr(node, "workeroutput", {}).get("programs", {}).items():
            self.programs.files.setdefault(key, file)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["programs"] = self.programs.files
        elif self._is_whole() and excess(len(self.programs.files)) > 0 and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.programs.files:
            return
        for line in report(self.programs.files, is_whole=self._is_whole()):
            terminalreporter.write_line(line)

    def _is_whole(self) -> bool:
        option = self.config.option
        everything = self.config.args_source is pytest.Config.ArgsSource.TESTPATHS
        return (
            everything
            and option.markexpr == WHOLE_SUITE
            and not option.keyword
            and not option.maxfail
        )


def excess(count: int) -> int:
    """How many programs exceed the budget and its margin."""
    return count - MAX_PROGRAMS - MARGIN


def report(files: Mapping[str, str], *, is_whole: bool) -> Iterable[str]:
    """Lines of the report: the number of programs, the test files that made most, and any excess.

    `files` maps the cache key of a program to the test file that made it.
    """
    yield ""
    yield f"{len(files)} distinct programs were compiled or read from the cache; most of them for:"
    for file, count in collections.Counter(files.values()).most_common(NUM_FILES):
        yield f"  {count:5d}  {file}"
    if is_whole and excess(len(files)) > 0:
        yield (
            f"FAILED: {len(files)} programs, of at most {MAX_PROGRAMS} (and {MARGIN} for chance). "
            "Use the pool of engines, the small models and the canonical sizes (docs/testing.md), "
            "or raise MAX_PROGRAMS in tests/run_report.py and say why."
        )
