"""The support matrix: declared capabilities and check results of parts, by axis, as plain data for
JSON.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from enginebay.errors import PluginError
from enginebay.ops.caps import FEATURE_OF, Caps
from enginebay.plugins.registry import Entry, Registry
from enginebay_testing.quantized import STORAGES
from enginebay_testing.report import CheckRecord
from enginebay_testing.suites import DTYPES, label
from enginebay_testing.traits import trait_values

PROBED: Mapping[str, tuple[str, ...]] = {
    "mode": ("decode", "prefill", "mixed"),
    "dtype": DTYPES,
    "storage": STORAGES,
    "head_dim": ("16", "32", "64", "80", "96", "128", "256"),
    "group": ("1", "2", "3", "4", "7", "8", "16"),
    "page_size": ("16", "32", "64", "128", "256"),
    "feature": (
        "window",
        "softcap",
        *FEATURE_OF.values(),
        "lse",
        "kv_share",
        "mla",
        "deterministic",
        "fused_write",
    ),
}
"""Values of each axis that declared capabilities are compared with."""

WORST = ("CHEAT", "INCORRECT", "ERROR", "TIMEOUT", "PASS", "UNSUPPORTED")
"""Order of severity: several cases count as the first of these verdicts that occurs."""


def support_matrix(
    registry: Registry, entries: Iterable[Entry], records: Sequence[CheckRecord]
) -> list[dict[str, Any]]:
    """Return one object per part: its `declared` values on each axis, and what was `checked`.

    declared: {axis, value, supported}; empty for parts without Caps and parts that cannot be
    imported here (`reason` says why). checked: {level, target, axis, value, verdict, cases,
    reason}: the worst verdict of the cases with this value (axis "": all cases of a target), and
    the reason of cases that were not run.
    """
    return [_part(registry, entry, records) for entry in entries]


def _part(registry: Registry, entry: Entry, records: Sequence[CheckRecord]) -> dict[str, Any]:
    name = label(entry)
    declaration = entry.declaration
    caps, reason = _caps(registry, entry)
    mine = [r for r in records if (r.part, r.package) == (name, entry.package)]
    return {
        "part": name,
        "op": entry.op,
        "name": entry.name,
        "package": entry.package,
        "summary": declaration.summary if declaration else "",
        "platforms": sorted(declaration.platforms) if declaration else [],
        "layouts": list(caps.layouts) if caps else [],
        "state": entry.state,
        "reason": reason,
        "declared": [] if caps is None else list(_declared(caps)),
        "checked": list(_checked(mine)),
    }


def _caps(registry: Registry, entry: Entry) -> tuple[Caps | None, str]:
    if entry.state != "ready":
        return None, entry.reason
    try:
        caps = getattr(registry.load(entry), "caps", None)
    except PluginError as error:
        return None, str(error.__cause__ or error)
    return (caps, "") if isinstance(caps, Caps) else (None, "")


def _declared(caps: Caps) -> Iterator[dict[str, Any]]:
    claims = {
        "mode": lambda v: v in caps.modes,
        "dtype": lambda v: v in caps.q_dtypes & caps.kv_dtypes,
        "storage": lambda v: v in caps.kv_dtypes,
        "head_dim": lambda v: caps.head_dim(int(v)),
        "group": lambda v: caps.group(int(v)),
        "page_size": lambda v: caps.page_size(int(v)),
        "feature": lambda v: v in caps.features,
    }
    for axis, values in PROBED.items():
        for value in values:
            yield {"axis": axis, "value": value, "supported": bool(claims[axis](value))}


def _checked(records: Iterable[CheckRecord]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str, str, str], list[CheckRecord]] = collections.defaultdict(list)
    for record in records:
        for axis, value in [("", ""), *trait_values(record.traits)]:
            groups[record.level, record.target, axis, value].append(record)
    for (level, target, axis, value), found in groups.items():
        verdicts = [str(record.verdict) for record in found]
        verdict = next(v for v in WORST if v in verdicts)
        reasons = {r.detail for r in found if r.verdict == verdict and verdict != "PASS"}
        yield {
            "level": level,
            "target": target,
            "axis": axis,
            "value": value,
            "verdict": verdict,
            "cases": {v: verdicts.count(v) for v in WORST if v in verdicts},
            "reason": min(reasons, default=""),
        }
