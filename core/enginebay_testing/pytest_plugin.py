"""A pytest plugin that runs the conformance suites of registered parts, for plugin authors.

    pytest -p enginebay_testing.pytest_plugin --enginebay-check scheduler:fcfs --enginebay-check
    kernel:attention:xla

A part is KIND:NAME, kernel:OP:NAME, kernel:OP:MODULE:ATTRIBUTE, executor:MODULE:ATTRIBUTE or a bare
name. KIND or kernel:OP selects all parts of this kind, and `all` selects every registered part.
Without a path on the command line only these checks run, otherwise pytest runs the tests found
there too. `--enginebay-level` chooses how kernels are checked. The second set of inputs and the
trial of a kernel have a secret seed, which the header tells and `--enginebay-seed` repeats.
`enginebay check` runs the same cases in separate processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from enginebay.errors import EnginebayError

OPTION = "--enginebay-check"
LEVEL = "--enginebay-level"
SEED = "--enginebay-seed"
_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --enginebay-check, --enginebay-level and --enginebay-seed."""
    group = parser.getgroup("enginebay", "conformance suites of enginebay")
    group.addoption(
        OPTION,
        dest="enginebay_check",
        action="append",
        default=[],
        metavar="PART",
        help="run the suites of this part: KIND:NAME or kernel:OP:NAME. KIND or kernel:OP runs "
        "those of all parts of this kind, and all runs those of every part; may be repeated",
    )
    group.addoption(
        LEVEL,
        dest="enginebay_level",
        choices=("interpret", "compile", "run"),
        default="run",
        help="how kernels are checked: run on the device, interpreted, "
        "or compiled for other devices",
    )
    group.addoption(
        SEED,
        dest="enginebay_seed",
        type=int,
        metavar="N",
        help="seed of the second set of inputs and of the trial of kernels (default: a secret one)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect no files when parts are named and paths are not; choose the seed."""
    if not config.getoption("enginebay_check"):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    from enginebay_testing.kernel_trial import MAX_SEED, drawn_seed

    given = config.getoption("enginebay_seed")
    if given is not None and not 0 <= given <= MAX_SEED:
        raise pytest.UsageError(f"{SEED} {given}. Allowed: 0 to {MAX_SEED}.")
    of_all = getattr(config, "workerinput", {}).get(SEED, given)  # in processes of pytest-xdist
    config.stash[_SEED] = drawn_seed() if of_all is None else of_all


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the seed to a process of pytest-xdist."""
    if _SEED in node.config.stash:
        node.workerinput[SEED] = node.config.stash[_SEED]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Tell the seed."""
    return [f"enginebay: {SEED} {config.stash[_SEED]}"] if _SEED in config.stash else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the checks of the chosen parts, before other plugins see the items, so that -k and -x
    apply to them.
    """
    selectors: list[str] = config.getoption("enginebay_check")
    level = config.getoption("enginebay_level")
    if not selectors:
        return
    from enginebay.plugins.registry import load_registry
    from enginebay_testing.cases import part_cases, select_parts, with_path
    from enginebay_testing.suites import Choices, label

    try:
        registry = functools.reduce(with_path, selectors, load_registry())
        entries = {
            label(entry): entry
            for selector in selectors
            for entry in select_parts(registry, selector)
        }
    except EnginebayError as error:
        raise pytest.UsageError(f"{OPTION}: {error}") from None
    choices = Choices(seed=config.stash[_SEED])
    for name, entry in entries.items():
        part = PartCollector.from_parent(session, name=name, nodeid=name)
        items += [
            PartCheck.from_parent(
                part,
                name=f"{case.name}@{case.target}" if level == "compile" else case.name,
                check=case.run,
            )
            for case in part_cases(registry, entry, level, choices)
        ]


class PartCollector(pytest.Collector):
    """A registered part."""

    def collect(self) -> list[pytest.Item]:
        """Return nothing: the plugin adds the checks to the session's items itself."""
        return []


class PartCheck(pytest.Item):
    """One check of a part."""

    def __init__(
        self, *, check: Callable[[], object], **fields: Any
    ) -> None:  # pytest's way of constructing nodes
        super().__init__(**fields)
        self._check = check

    def runtest(self) -> None:
        self._check()

    def reportinfo(self) -> tuple[str, None, str]:
        return self.path.name, None, self.nodeid
