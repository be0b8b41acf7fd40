"""Comparison: figures, ratios and verdicts of a record."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Self

from enginebay_bench.compare.records import Cell, RunRecord
from enginebay_bench.compare.statistics import Interval, Spread, paired_ratio, ratio_of_medians
from enginebay_bench.compare.verdicts import TokenVerdict, other_work, token_verdict

BUSY = 0.1
"""Share of the machine's time from which on other programs spoil a comparison."""

FIGURES = {
    "ttft_ms": "first token, ms",
    "tpot_ms": "each further token, ms",
    "prompt_tokens_per_s": "prompt tokens/s",
    "decode_tokens_per_s": "decode tokens/s",
    "output_tokens_per_s": "output tokens/s",
}
"""The figures of a round, by name with their titles."""

MAX_TEXTS = 3
"""Places that a verdict names, of all rounds."""

Values = dict[str, float]


def figures_of(cell: Cell, line: Mapping[str, Any]) -> Values:
    """The figures of one run. Our clock gives output tokens per second, the program tells the rest:
    times to first tokens, and between tokens, are medians over the requests; a program that does
    not tell its first tokens' times has none of these.
    """
    requests, total_s = line["requests"], line["took_s"]
    tokens = [one["num_tokens"] or 0 for one in requests]
    found = {"output_tokens_per_s": sum(tokens) / total_s} if all(tokens) else {}
    times = [
        (one["first_s"], one["end_s"] - one["first_s"], num - 1)
        for one, num in zip(requests, tokens, strict=True)
        if one["first_s"] is not None
    ]
    if len(times) < len(requests):
        return found
    found["ttft_ms"] = 1000 * statistics.median(first for first, _, _ in times)
    gaps = [1000 * rest / num for _, rest, num in times if num > 0 and rest > 0]
    if gaps:
        found["tpot_ms"] = statistics.median(gaps)
    if cell.num_requests == 1:
        found["prompt_tokens_per_s"] = cell.prompt_len / times[0][0]
        if gaps:
            found["decode_tokens_per_s"] = 1000 / gaps[0]
    return {name: found[name] for name in FIGURES if name in found}


def speed(name: str, values: Sequence[float]) -> list[float]:
    """Values that grow with the speed."""
    return [1 / value for value in values] if name.endswith("_ms") else list(values)


@dataclasses.dataclass(frozen=True)
class ComparedRow:
    """A variant in a cell: figures over rounds, and their speed as ratios to the reference's.

    `other_work` says why there are no ratios. `changes` are ratios to an older record.
    """

    variant: str
    cell: Cell
    parity: TokenVerdict
    other_work: str
    rounds: Mapping[str, Sequence[float]]
    figures: Mapping[str, Spread]
    ratios: Mapping[str, Interval]
    peak_mib: float | None
    facts: Mapping[str, Any]
    changes: Mapping[str, Interval] = dataclasses.field(default_factory=dict)

    @property
    def is_ranked(self) -> bool:
        """Whether its results are right and its work is the reference's."""
        return self.parity.is_right and not self.other_work and bool(self.figures)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The rows of a record, by cell, and what is to be known before they are believed."""

    record: RunRecord
    rows: Sequence[ComparedRow]
    notes: Sequence[str]

    @classmethod
    def of(cls, record: RunRecord, older: RunRecord | None = None) -> Self:
        """Compute everything from the lines of a record; and the changes since an older one."""
        before = None if older is None else Comparison.of(older)
        rows = [
            _with_changes(_row(record, name, cell), before)
            for cell in record.cells
            for name in record.variants
        ]
        return cls(record, rows, [*_notes(record), *_differences(record, older)])

    def ranking(self, cell: Cell) -> list[ComparedRow]:
        """The rows of a cell that may be ranked, by the last figure that all of them have, fastest
        first.
        """
        rows = [row for row in self.rows if row.cell == cell and row.is_ranked]
        shared = [name for name in FIGURES if all(name in row.figures for row in rows)]
        if not shared:
            return rows

        def median_speed(row: ComparedRow) -> float:
            return statistics.median(speed(shared[-1], row.rounds[shared[-1]]))

        return sorted(rows, key=median_speed, reverse=True)

    @property
    def is_whole(self) -> bool:
        """Whether each variant has all its runs, or failed."""
        wanted = self.record.header["rounds"] * len(self.record.cells)
        return all(
            self.record.of("failed", variant=name)
            or len(self.record.of("run", variant=name)) >= wanted
            for name in self.record.variants
        )

    @property
    def is_right(self) -> bool:
        """Whether no variant is wrong, failed or cheats."""
        bad = ("wrong", "failed", "cheat")
        return not any(row.parity.verdict in bad for row in self.rows)


def _facts(record: RunRecord, name: str) -> Mapping[str, Any]:
    lines = record.of("facts", variant=name)
    return lines[0]["facts"] if lines else {}


def _parity(record: RunRecord, name: str) -> TokenVerdict:
    if failed := record.of("failed", variant=name):
        is_cheat = failed[0].get("verdict") == "cheat"
        return TokenVerdict("cheat" if is_cheat else "failed", failed[0]["why"])
    reference = record.header["reference"]
    lines = record.of("parity", variant=name)
    if not lines:
        return TokenVerdict("unknown", "its tokens were not compared yet")
    if name == reference:
        return TokenVerdict("reference")
    dtype = str(_facts(record, reference).get("dtype", "float32"))
    each = [token_verdict(line["wanted"], line["requests"], dtype) for line in lines]
    worst = ("unknown", "wrong", "near ties", "equal")
    first = min(each, key=lambda one: worst.index(one.verdict))
    texts = [one.text for one in each if one.verdict == first.verdict and one.text]
    return TokenVerdict(first.verdict, "; ".join(texts[:MAX_TEXTS]))


def _row(record: RunRecord, name: str, cell: Cell) -> ComparedRow:
    reference = record.header["reference"]
    runs, others = (
        {line["round"]: line for line in record.of("run", variant=one, cell=cell.name)}
        for one in (name, reference)
    )
    values = {number: figures_of(cell, line) for number, line in runs.items()}
    rounds = {
        figure: [one[figure] for one in values.values()]
        for figure in FIGURES
        if values and all(figure in one for one in values.values())
    }
    shared = sorted(runs.keys() & others.keys())
    facts = _facts(record, name)
    mine, its = ([one for n in shared for one in lines[n]["requests"]] for lines in (runs, others))
    reason = other_work(facts, _facts(record, reference), mine, its)
    ratios = {}
    parity = _parity(record, name)
    if name != reference and not reason and parity.is_right:
        of_reference = {n: figures_of(cell, others[n]) for n in shared}
        for figure in rounds:
            if shared and all(figure in one for one in of_reference.values()):
                pairs = [(values[n][figure], of_reference[n][figure]) for n in shared]
                both = (speed(figure, one) for one in zip(*pairs, strict=True))
                ratios[figure] = paired_ratio(*both)
    peaks = [line["peak_mib"] for line in runs.values() if line["peak_mib"] is not None]
    return ComparedRow(
        variant=name,
        cell=cell,
        parity=parity,
        other_work=reason,
        rounds=rounds,
        figures={figure: Spread.of(each) for figure, each in rounds.items()},
        ratios=ratios,
        peak_mib=max(peaks, default=None),
        facts=facts,
    )


def _with_changes(row: ComparedRow, before: Comparison | None) -> ComparedRow:
    """The row with the ratios of its speed to that of the same row before."""
    if before is None:
        return row
    same = [one for one in before.rows if (one.variant, one.cell) == (row.variant, row.cell)]
    same = [one for one in same if one.parity.is_right and row.parity.is_right]
    changes = {
        figure: ratio_of_medians(speed(figure, values), speed(figure, one.rounds[figure]))
        for one in same
        for figure, values in row.rounds.items()
        if figure in one.rounds
    }
    return dataclasses.replace(row, changes=changes)


def _notes(record: RunRecord) -> list[str]:
    """What spoils the figures, or is missing of them."""
    notes, runs = [], record.of("run")
    shares = [line["others"] for line in runs if line["others"] is not None]
    if shares and statistics.median(shares) > BUSY:
        notes.append(
            f"Other programs took {statistics.median(shares):.0%} of the machine's time, as the "
            "median over all runs."
        )
    wanted = record.header["rounds"] * len(record.cells)
    for name in record.variants:
        number = len(record.of("run", variant=name))
        if number < wanted and not record.of("failed", variant=name):
            notes.append(f"{name} has {number} of {wanted} runs.")
    return notes


def _differences(record: RunRecord, older: RunRecord | None) -> list[str]:
    """What else is other than in the older record, besides the time."""
    if older is None:
        return []
    found = [
        f"The older record has another {what}."
        for what in ("environment", "reference")
        if record.header[what] != older.header[what]
    ]
    was = {one["name"]: one for one in older.header["variants"]}
    now = record.header["variants"]
    changed = [one["name"] for one in now if was.get(one["name"], one) != one]
    return [*found, *(f"In the older record, {name} was another program." for name in changed)]
