"""A pytest plugin that runs the conformance suites of registered parts, for their authors.

    pytest -p enginebay.testing.plugin --enginebay-check scheduler:fcfs --enginebay-check kernel:attention:xla

A part is KIND:NAME or kernel:OP:NAME; KIND or kernel:OP alone stand for all of theirs, `all` for everything that is
registered. Without a path on the command line only these checks run, otherwise they run beside the tests found there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from enginebay.errors import EnginebayError

OPTION = "--enginebay-check"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --enginebay-check."""
    group = parser.getgroup("enginebay", "conformance suites of enginebay")
    group.addoption(
        OPTION,
        dest="enginebay_check",
        action="append",
        default=[],
        metavar="PART",
        help="run the suites of PART: KIND:NAME or kernel:OP:NAME; KIND, kernel:OP and all stand for several; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect no files when parts are named and paths are not."""
    if config.getoption("enginebay_check") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the checks of the chosen parts; before others look at the items, so that -k and -x work on them too."""
    selectors: list[str] = config.getoption("enginebay_check")
    if not selectors:
        return
    from enginebay.registry import load_registry
    from enginebay.testing.suites import label, part_checks, select

    try:
        registry = load_registry()
        entries = {label(entry): entry for selector in selectors for entry in select(registry, selector)}
    except EnginebayError as error:
        raise pytest.UsageError(f"{OPTION}: {error}") from None
    for name, entry in entries.items():
        part = Part.from_parent(session, name=name, nodeid=name)
        items += [
            PartCheck.from_parent(part, name=check, check=run) for check, run in part_checks(registry, entry)
        ]


class Part(pytest.Collector):
    """A registered part."""

    def collect(self) -> list[pytest.Item]:
        """Its checks are added to the session's items; there is nothing to find."""
        return []


class PartCheck(pytest.Item):
    """One check of a part."""

    def __init__(
        self, *, check: Callable[[], None], **fields: Any
    ) -> None:  # pytest's own way of making nodes
        super().__init__(**fields)
        self._check = check

    def runtest(self) -> None:
        self._check()

    def reportinfo(self) -> tuple[str, None, str]:
        return self.path.name, None, self.nodeid
