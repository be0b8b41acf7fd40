"""The cases of any op for one kernel, and their verdicts one after the other: what every check of a
kernel runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enginebay.cache import KVLayout
from enginebay.ops.axes import AXES, OpAxes, Row
from enginebay.ops.caps import Env
from enginebay.ops.tuning import TunableOp
from enginebay_testing.covering import PAIRS, TRIPLES, covering_rows
from enginebay_testing.verdicts import Outcome, judge

REPEATS = 20
"""How often a step runs that must give the same bits each time."""


@dataclasses.dataclass(frozen=True)
class OpCase:
    """One check of one kernel. `representative` cases have every pair of values of the op's axes;
    the others are run with --all.

    `traits` are what the case is about, by axis of the support matrix.
    """

    name: str
    run: Callable[[], None]
    representative: bool = True
    traits: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Extent:
    """How much of an op's cases. Without `triples` pairs alone; `interpreted` kernels get short
    rows and few repeats.

    Each case runs with `num_seeds` sets of arrays.
    """

    triples: bool = True
    interpreted: bool = False
    num_seeds: int = 1


def op_cases(
    op: str, kernel: Any, env: Env, layouts: Sequence[type[KVLayout]], extent: Extent | None = None
) -> Iterator[OpCase]:
    """The cases of an op for a kernel, the representative ones first; none for an op that the kit
    does not know.

    `layouts` are those that the kernel knows, the preferred one first; ops that know no cache leave
    them alone.
    """
    extent = extent or Extent()
    if op == "attention":
        yield from _attention(kernel, env, layouts, extent)
    elif op in AXES:
        yield from _plain(op, kernel, layouts, extent)


def op_verdicts(
    op: str, kernel: Any, env: Env, layouts: Sequence[type[KVLayout]], extent: Extent | None = None
) -> Iterator[tuple[OpCase, Outcome]]:
    """Run the cases one after the other, and say what came of each as soon as it is known."""
    for case in op_cases(op, kernel, env, layouts, extent):
        yield case, judge(case.run)


def _attention(
    kernel: Any, env: Env, layouts: Sequence[type[KVLayout]], extent: Extent
) -> Iterator[OpCase]:
    from enginebay_testing.attention_suite import attention_checks
    from enginebay_testing.traits import traits_of

    options = dataclasses.asdict(extent)
    for check in attention_checks(kernel, env, layouts, **options):
        traits = traits_of(check.case.spec, check.case.bucket.mode, check.case.actual_page_size)
        yield OpCase(check.name, check.run, check.representative, traits)


def _plain(
    op: str, kernel: Any, layouts: Sequence[type[KVLayout]], extent: Extent
) -> Iterator[OpCase]:
    if op == "sample":
        from enginebay_testing.sample_op import sample_checks

        yield from (OpCase(name, run) for name, run in sample_checks(kernel))
    kinds = {kind.__name__: kind for kind in layouts}
    axes = _claimed(AXES[op], kernel, tuple(kinds))
    found = set()
    for strength in (PAIRS, TRIPLES) if extent.triples else (PAIRS,):
        for row in covering_rows(axes, strength):
            name = f"{op}[{_name(axes, row)}]"
            if name not in found:
                found.add(name)
                run = functools.partial(_run_plain, op, kernel, row, kinds, extent)
                traits = {"dtype": str(row["dtype"])} if "dtype" in row else {}
                yield OpCase(name, run, strength == PAIRS, traits)


def _claimed(axes: OpAxes, kernel: Any, layouts: tuple[str, ...]) -> OpAxes:
    """The axes with the kernel's layouts, and its other configurations where it has some."""
    if "layout" in axes.values:
        axes = axes.having(layout=layouts)
    if "config" in axes.values and not isinstance(kernel, TunableOp):
        axes = axes.having(config=("default",))
    return axes


def _name(axes: OpAxes, row: Row) -> str:
    """The row's values that are not the ordinary ones, with their axis; dtype and layout always."""
    always = [str(row[axis]) for axis in ("dtype", "layout") if axis in row]
    others = [
        f"{axis}_{value}"
        for axis, value in row.items()
        if axis not in ("dtype", "layout") and value != axes.values[axis][0]
    ]
    return "-".join([*always, *others]) or "ordinary"


def _run_plain(
    op: str, kernel: Any, row: Row, layouts: Mapping[str, type[KVLayout]], extent: Extent
) -> None:
    from enginebay_testing import cache_cases, plain_cases, sample_op

    for seed in range(extent.num_seeds):
        repeats = 1 if extent.interpreted or seed else REPEATS
        if op == "sample":
            sample_op.check_sample_row(kernel, row, seed, repeats)
            continue
        case = plain_cases.PlainCase(row, seed, repeats)
        if op in ("kv_write", "rope_kv_write"):
            check = {
                "kv_write": cache_cases.check_kv_write,
                "rope_kv_write": cache_cases.check_rope_kv_write,
            }[op]
            check(kernel, case, layouts)
        else:
            plain: dict[str, Callable[[Any, plain_cases.PlainCase], None]] = {
                "linear": plain_cases.check_linear,
                "rms_norm": plain_cases.check_rms_norm,
                "add_rms_norm": plain_cases.check_add_rms_norm,
                "rope": plain_cases.check_rope,
                "embedding": plain_cases.check_embedding,
            }
            plain[op](kernel, case)
