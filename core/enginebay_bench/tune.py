"""Searches the configurations of implementations: first a check of the results, then timing in turn
on rows of realistic lengths.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from enginebay.compose.ops import ATTENTION
from enginebay.ops.op import Op
from enginebay.ops.select import Candidate
from enginebay.ops.tunable import candidates_of
from enginebay.ops.tuned_tables import TableKey, TunedEntry, TunedTable, read_table
from enginebay.ops.tuning import TunableOp
from enginebay_bench.attention import bucket_problem
from enginebay_bench.kernels import CHEAT, WRONG, Bench, run_contestants, why_not_measured
from enginebay_bench.op_problems import problems_of
from enginebay_bench.problem import (
    BenchSetting,
    Problem,
    TuningKey,
    asked_for,
    with_config,
)
from enginebay_bench.shapes import Shape
from enginebay_bench.timing import TimedCandidate
from enginebay_testing.traced_cases import TracedShape

DROP_SLOWER_THAN = 1.5
"""A configuration is dropped if its best of two samples exceeds the fastest by this factor."""

WORTH = 0.98
"""Max share of the default's time that a configuration may take to replace the default: a smaller
gain is noise.
"""

DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The result of one implementation on one shape: an entry, or the reason why there is none.

    `num_tried` configurations were right and timed; `refused` lists those that failed or were
    wrong, with the reason.
    """

    op: str
    impl: str
    version: str
    shape: str
    dtype: str
    entry: TunedEntry | None = None
    reason: str | None = None
    num_tried: int = 0
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def num_wrong(self) -> int:
        """Return how many of the refused configurations gave a wrong result."""
        return sum(why.startswith(WRONG) for _, why in self.refused)

    @property
    def cheats(self) -> bool:
        """Whether the implementation cheats, so that none of its configurations is kept."""
        return (self.reason or "").startswith(CHEAT)


def tune_shape(
    bench: Bench,
    op: Op[Any],
    shape: Shape | TracedShape,
    setting: BenchSetting,
    candidates: Sequence[Candidate],
) -> list[Tuned]:
    """Search the candidates of each implementation for a shape, and time all of them in turn.

    An attention implementation without candidates is measured too, for comparison; without
    candidates of another op, nothing is measured. Each implementation is measured on the problem
    that engines give it.
    """
    problems = problems_of(op, shape, setting)
    entrants = [
        (c, problems[0] if c.impl is None else [p for p in problems if p.is_for(c.impl)][-1])
        for c in candidates
    ]
    return _tune(bench, op.name, setting, entrants)


def tune_bucket(
    bench: Bench, key: TuningKey, setting: BenchSetting, candidates: Sequence[Candidate]
) -> list[Tuned]:
    """Like `tune_shape`, for a bucket of an engine and as the engine runs it."""
    problem, other = (
        bucket_problem(key.spec, key.bucket, key.layout, dataclasses.replace(setting, seed=seed))
        for seed in (setting.seed, setting.seed + 1)
    )
    problem = dataclasses.replace(problem, other=other)
    return _tune(bench, ATTENTION, setting, [(candidate, problem) for candidate in candidates])


@dataclasses.dataclass(frozen=True)
class _TunedImplementation:
    """An implementation's configurations as contestants, the default first, and the key of its
    table entry.
    """

    place: TableKey
    contestants: Sequence[TimedCandidate]
    has_candidates: bool
    """Whether it has candidates here, even if only the default: then engines look for an entry."""


def _tune(
    bench: Bench, op: str, setting: BenchSetting, candidates: Sequence[tuple[Candidate, Problem]]
) -> list[Tuned]:
    found: list[Tuned] = []
    entrants: dict[str, _TunedImplementation] = {}
    for candidate, problem in candidates:
        version = str(getattr(candidate.impl, "version", ""))
        too_large = why_not_measured(problem, bench, setting.dtype)
        reason = candidate.unavailable or too_large or problem.why_not(candidate.impl)
        entrant = reason or _entrant(candidate, problem, setting)
        if isinstance(entrant, _TunedImplementation):
            entrants[candidate.name] = entrant
        why = entrant if isinstance(entrant, str) else None
        found.append(Tuned(op, candidate.name, version, problem.name, setting.dtype, reason=why))
    every = [contestant for some in entrants.values() for contestant in some.contestants]
    results = run_contestants(bench, every, only_right=True, drop_slower_than=DROP_SLOWER_THAN)
    return [
        _outcome(one, entrants[one.impl], results, bench) if one.impl in entrants else one
        for one in found
    ]


def _entrant(
    candidate: Candidate, problem: Problem, setting: BenchSetting
) -> _TunedImplementation | str:
    """Return the entrant; for an op without phases, a reason if there is nothing to choose."""
    impl, env, key = candidate.impl, setting.env, problem.key
    if key is not None:
        default = impl.default_config(env, key.spec, key.bucket, key.layout)
        others = candidates_of(impl, env, key.spec, key.bucket, key.layout)
        place = TableKey.of_attention(key.spec, key.bucket, key.layout)
    else:
        asked = asked_for(impl, env, problem) if isinstance(impl, TunableOp) else None
        if asked is None:
            return "the implementation has no configurations here"
        default, others, place = (
            impl.default_config(env, asked),
            impl.candidates(env, asked),
            TableKey.of_op(asked),
        )
    configs = {DEFAULT: default} | {_text(config): config for config in others if config != default}
    return _TunedImplementation(
        place,
        [
            TimedCandidate(
                f"{candidate.name}: {name}",
                impl if key is not None else with_config(impl, config),
                config,
                "default",
                problem,
                candidate.name,
            )
            for name, config in configs.items()
        ],
        bool(others),
    )


def _text(config: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())


def _outcome(
    one: Tuned, entrant: _TunedImplementation, results: Mapping[str, Any], bench: Bench
) -> Tuned:
    """Return the fastest of an implementation's configurations, or its default if that
    is as fast. Nothing is kept of an implementation that cheats with one of them.
    """
    contestants, place = entrant.contestants, entrant.place
    default = contestants[0]
    timed = {
        c.label: results[c.label][1] for c in contestants if not isinstance(results[c.label], str)
    }
    refused = tuple(
        (c.label, results[c.label]) for c in contestants if isinstance(results[c.label], str)
    )
    one = dataclasses.replace(one, num_tried=len(timed), refused=refused)
    if cheat := next((why for _, why in refused if why.startswith(CHEAT)), None):
        return dataclasses.replace(one, reason=cheat)
    if default.label not in timed:
        return dataclasses.replace(
            one, reason=f"default configuration: {dict(refused)[default.label]}"
        )
    standard = timed[default.label].median_s
    best = min((c for c in contestants if c.label in timed), key=lambda c: timed[c.label].median_s)
    if timed[best.label].median_s > WORTH * standard:
        best = default
    median = timed[best.label].median_s
    entry = TunedEntry(
        spec=place.spec,
        layout=place.layout,
        page_size=place.page_size,
        bucket=place.bucket,
        config=dataclasses.asdict(best.config) if entrant.has_candidates else None,
        median_s=median,
        default_median_s=standard,
        roofline=bench.roofline.ideal_s(best.problem.cost, one.dtype) / median,
    )
    return dataclasses.replace(one, entry=entry)


def merge_tables(path: Path, table: TunedTable) -> TunedTable:
    """Return the table with the entries of an older file that it does not have itself; entries of
    other versions are dropped.
    """
    if not path.exists():
        return table
    old = read_table(path.read_text(encoding="utf-8"), str(path))
    same = ("op", "impl", "version", "device_kind")
    if any(getattr(old, name) != getattr(table, name) for name in same):
        return table
    new = [_problem(entry) for entry in table.entries]
    kept = tuple(entry for entry in old.entries if _problem(entry) not in new)
    return table.model_copy(update={"entries": kept + table.entries})


def _problem(entry: TunedEntry) -> tuple[Any, ...]:
    return entry.spec, entry.layout, entry.page_size, entry.bucket


def write_table(path: Path, table: TunedTable) -> None:
    """Replace the file of a table atomically: a reader finds either the old or the new table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
    fresh.replace(path)
