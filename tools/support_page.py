"""Makes the support page from docs/support.json, which `enginebay check --matrix` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

HEAD = """# Support

What kernels declare, and what `enginebay check` found of it: `make support` writes [support.json](support.json), from which this page is
made, on a machine without a TPU or a GPU. [checking](checking.md) explains levels and verdicts.

A cell holds the worst verdict of the representative cases with its value. An empty cell means that no case has the value, and "unsupported"
that the kernel claims none of these cases.

"""

Part = dict[str, Any]


def page(parts: Sequence[Part]) -> str:
    """Return the page of a support matrix (see enginebay_testing.matrix)."""
    lines = [*_summary(parts)]
    for part in parts:
        if part["declared"]:
            lines += ["", f"## {part['part']}", "", *_kernel(part)]
    return HEAD + "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(columns), _row(["---"] * len(columns)), *map(_row, rows)]


def _summary(parts: Sequence[Part]) -> Iterator[str]:
    yield "## Checks"
    yield ""
    rows = []
    for part in parts:
        totals = [c for c in part["checked"] if not c["axis"]]
        for total in totals:
            counts = total["cases"]
            done = sum(n for verdict, n in counts.items() if verdict != "UNSUPPORTED")
            faults = done - counts.get("PASS", 0)
            numbers = (counts.get("PASS", 0), counts.get("UNSUPPORTED", 0), faults)
            note = "" if done else _short(total["reason"])
            rows.append(
                (
                    f"`{part['part']}`",
                    total["level"],
                    total["target"] or "-",
                    *map(str, numbers),
                    note,
                )
            )
    yield from _table(("part", "level", "target", "pass", "unsupported", "faults", "note"), rows)


def _short(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _kernel(part: Part) -> Iterator[str]:
    platforms = ", ".join(part["platforms"]) or "any"
    layouts = ", ".join(f"`{name}`" for name in part["layouts"])
    yield (
        f"{part['summary'][:1].upper()}{part['summary'][1:]}. Platforms: {platforms}. "
        f"Layouts: {layouts}."
    )
    yield ""
    places = list(dict.fromkeys((c["level"], c["target"]) for c in part["checked"] if c["axis"]))
    found = {
        (c["level"], c["target"], c["axis"], c["value"]): c["verdict"].lower()
        for c in part["checked"]
    }
    declared = {
        (d["axis"], d["value"]): "yes" if d["supported"] else "no" for d in part["declared"]
    }
    also = [(c["axis"], c["value"]) for c in part["checked"] if c["axis"]]
    order = list(dict.fromkeys(axis for axis, _ in [*declared, *also]))
    values = sorted(
        dict.fromkeys([*declared, *also]), key=lambda at: (order.index(at[0]), _number(at[1]))
    )
    rows = [
        (
            axis.replace("_", " "),
            value,
            declared.get((axis, value), ""),
            *(found.get((*p, axis, value), "") for p in places),
        )
        for axis, value in values
    ]
    names = [level if level != "compile" else f"compile {target}" for level, target in places]
    yield from _table(("axis", "value", "declared", *names), rows)


def _number(value: str) -> int:
    """Return a key that sorts sizes as numbers and leaves words in order."""
    return int(value) if value.isdecimal() else 0
