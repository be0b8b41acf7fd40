"""Checks that the cases of an op look at each capability that a kernel declares."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from enginebay.compose.candidates import ANY
from enginebay.errors import PluginError, UnsupportedError
from enginebay.plugins.registry import Entry
from enginebay_testing.op_kit import OpCase, OpKit
from enginebay_testing.quantized import FORMS, ROUNDINGS, STORAGES

KNOWN_VALUES: Mapping[str, tuple[str, ...]] = {
    "quantizations": tuple(FORMS),
    "activation_quantizations": ROUNDINGS,
    "storages": STORAGES,
}
"""The values of capabilities for which the kit can make data."""

NOT_IN_CASES: Mapping[str, str] = {
    "priority": "it chooses among kernels and changes no result",
    "compiler": "it makes the cases of the level compile",
    "custom_calls": "the compiler's programs show these calls",
    "sharded": "the suites of engines and models run on several devices",
}
"""Capabilities of kernels without an axis, and why."""


def capability_cases(entry: Entry, kit: OpKit) -> Iterator[OpCase]:
    """Yield a case that fails for each declared capability without an axis in the kit, and one that
    is UNSUPPORTED for each declared value for which the kit has no data.
    """
    declared = {} if entry.declaration is None else entry.declaration.capabilities
    for name in (*KNOWN_VALUES, "layouts"):
        values = tuple(declared.get(name) or ())
        if values and name not in kit.capabilities:
            what = f"{entry.op} kernel {entry.name!r} declares {name} {', '.join(values)}"
            lacks = f"{what}, but the kit of op {entry.op} has no axis for it"
            todo = "Add the capability and its axis to OpKit.capabilities."
            yield OpCase(f"capability[{name}]", functools.partial(_lacks_an_axis, lacks, todo))
            continue
        for value in values if name in KNOWN_VALUES else ():
            if value not in (ANY, *KNOWN_VALUES[name]):
                given = f"the kit has no data for {name} {value}"
                run = functools.partial(_has_no_data, given, ", ".join(KNOWN_VALUES[name]))
                yield OpCase(f"capability[{name}-{value}]", run)


def _lacks_an_axis(what: str, todo: str) -> None:
    raise PluginError(f"{what}. {todo}")


def _has_no_data(given: str, allowed: str) -> None:
    raise UnsupportedError(given, allowed, "Check this value with a test of your own.")
