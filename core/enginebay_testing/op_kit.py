"""How the kit checks an op: the record that `Op.kit` names. It makes the checks of each kernel; ops
without phases make them from their axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from enginebay.compose.candidates import ANY
from enginebay.compose.quick_cases import CheckSetting
from enginebay.compose.quick_check import quick_check, row_errors
from enginebay.contracts.cache import KVLayout
from enginebay.errors import IncorrectError
from enginebay.ops.caps import Env
from enginebay.ops.op import Op
from enginebay.ops.spec import AttnSpec
from enginebay.ops.tuning import OpProblem, TunableOp
from enginebay.plugins.registry import Entry, Registry, import_target
from enginebay_testing.case_runs import CaseRuns
from enginebay_testing.covering import (
    Combination,
    OpAxes,
    Value,
    all_rows,
    covering_rows,
    extreme_rows,
)
from enginebay_testing.oracle import EPS
from enginebay_testing.quantized import FORMS, ROUNDINGS, STORAGES

REPEATS = 20
"""How often a step runs; each run must give the same bits."""

EXTREME_REPEATS = 3
"""How often a step of an extreme size runs; by default with one set of inputs."""

NUM_SEEDS = 2
"""How many sets of inputs the program of a case receives."""

LayoutTypes = Sequence[type[KVLayout]]


@dataclasses.dataclass(frozen=True)
class OpCase:
    """One check of one kernel. The `representative` cases cover every pair of values of the op's
    axes; the other cases run with --all.

    `traits` are the values of the case on the axes of the support matrix.
    """

    name: str
    run: Callable[[], None]
    representative: bool = True
    traits: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CaseBudget:
    """How many cases of an op are made. Without `triples`, only pairs; `interpreted` kernels get
    short rows, no extreme sizes, and few repeats.

    Each case runs with `num_seeds` sets of arrays: the first has the seed 0, the second `seed`.
    `quantizations` and `activation_quantizations`:
    the methods of quantised weights and the roundings of inputs that the kernel declares.
    `storages`: the quantised caches that it writes.
    """

    triples: bool = True
    interpreted: bool = False
    num_seeds: int = NUM_SEEDS
    seed: int = 1
    quantizations: tuple[str, ...] = ()
    activation_quantizations: tuple[str, ...] = ()
    storages: tuple[str, ...] = ()

    def of(self, entry: Entry) -> CaseBudget:
        """Return the extent for a kernel, with what its declaration says about quantisation."""

        def declared(capability: str, known: Iterable[str]) -> tuple[str, ...]:
            has = tuple(entry.capability(capability, ()))
            return tuple(known) if ANY in has else tuple(name for name in known if name in has)

        return dataclasses.replace(
            self,
            quantizations=declared("quantizations", FORMS),
            activation_quantizations=declared("activation_quantizations", ROUNDINGS),
            storages=declared("storages", STORAGES),
        )


@dataclasses.dataclass(frozen=True)
class OpProgram:
    """A program that a kernel's compiler must accept: a function of positional arguments, with the
    arguments as shapes.

    At least `kept_bytes` of the results must share memory with donated arguments. `why_not`: the
    reason why the kernel does not support the program, if any.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    representative: bool = False
    traits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kept_bytes: int = 0
    why_not: str | None = None


def _no_programs(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterable[OpProgram]:
    return ()


@dataclasses.dataclass(frozen=True)
class OpKit:
    """How implementations of an op are checked.

    `cases` (implementation, environment, known cache layouts, extent) makes the checks, the
    representative ones first. `programs` (implementation, target, number of the target, layouts)
    makes programs that are compiled for a device which need not be present. `capabilities`: for
    each capability of a kernel's declaration that the cases look at, the axis that has its values,
    or the reason why the op needs none.
    """

    cases: Callable[[Any, Env, LayoutTypes, CaseBudget], Iterator[OpCase]]
    programs: Callable[[Any, Env, int, LayoutTypes], Iterable[OpProgram]] = _no_programs
    capabilities: Mapping[str, str] = dataclasses.field(default_factory=dict)


def kit_of(registry: Registry, op: str) -> OpKit:
    """Return the kit of a registered op. An op without a kit is checked by its quick cases."""
    record: Op[Any] = registry.load(registry.find("op", op))
    if record.kit is None:
        return OpKit(functools.partial(_quick_cases, record))
    kit: OpKit = import_target(record.kit, f"the kit of op {op!r}")
    return kit


def _quick_cases(
    op: Op[Any], kernel: Any, env: Env, layouts: LayoutTypes, extent: CaseBudget
) -> Iterator[OpCase]:
    setting = CheckSetting(env, [AttnSpec(4, 2, 16)], layouts[0], "float32", page_size=16)

    def run() -> None:
        try:
            quick_check(op, kernel, setting, "the kernel", "no check")
        except IncorrectError as wrong:
            raise AssertionError(str(wrong)) from wrong

    yield OpCase(
        f"{op.name}[quick_cases-other_inputs_first]", functools.partial(_rerun, op, kernel, setting)
    )
    yield OpCase(f"{op.name}[quick_cases]", run)


def _rerun(op: Op[Any], kernel: Any, setting: CheckSetting) -> None:
    """Run the quick cases in programs that had other inputs before, and compare with the
    reference.
    """
    reference = import_target(op.reference, f"the reference of op {op.name!r}")
    for case in import_target(op.quick_cases, f"the quick cases of op {op.name!r}")(setting):
        if not case.serves(kernel):
            continue
        got = CaseRuns()(functools.partial(case.run, kernel), case.inputs, REPEATS)
        wanted = CaseRuns()(functools.partial(case.run, reference), case.inputs, 1)
        for name, right in wanted.items():
            bound = 0.0 if name in case.exact else op.tolerance.get(str(right.dtype), 0.0)
            error, allowed = row_errors(got[name], right, bound)
            assert (error <= allowed).all(), (
                f"{case.name}: {name} differs after a call with other inputs, by "
                f"{error.max():.3g}, allowed {allowed.max():.3g}"
            )


@dataclasses.dataclass(frozen=True)
class PlainCase:
    """One case of the kit: a combination of values, one for each axis. It also has the seed of its
    arrays, the number of runs (which must give the same bits), and the layouts by name for the axis
    `layout`.
    """

    row: Combination
    seed: int = 0
    repeats: int = 1
    layouts: Mapping[str, type[KVLayout]] = dataclasses.field(default_factory=dict)
    runs: CaseRuns = dataclasses.field(default_factory=CaseRuns)

    def rng(self) -> np.random.Generator:
        """Return the random generator of the arrays."""
        return np.random.default_rng([self.seed, 7])

    def int(self, axis: str) -> int:
        """Return the value of an axis as a number."""
        return int(cast("int", self.row[axis]))

    @property
    def dtype(self) -> Any:
        """Return the dtype of the arrays."""
        return jnp.dtype(str(self.row["dtype"]))

    @property
    def eps(self) -> float:
        """Return the distance from 1 to the next value of the dtype."""
        return EPS[str(self.row["dtype"])]

    def run(
        self, call: Callable[..., Any], *arguments: Any, others: tuple[Any, ...] | None = None
    ) -> Any:
        """Return the results of a call as NumPy arrays; AssertionError if another run gives other
        bits. The program runs with other inputs first: with `others`, or with all floats reversed.

        The sets of inputs of a case share a program if `call` is a functools.partial of the same
        function with equal arguments, so pass arrays as `arguments`.
        """
        return self.runs(call, arguments, self.repeats, others)

    def configured(self, kernel: Any) -> Any:
        """Return the kernel with the configurations that the axis `config` names."""
        config = str(self.row.get("config", "default"))
        return self.runs.once(config, lambda: configured(kernel, config))


def covering_cases(
    axes: OpAxes,
    check: Callable[[Any, PlainCase], None],
    named: Callable[[Any], Iterable[tuple[str, Callable[[], None]]]] = lambda _: (),
) -> Callable[[Any, Env, LayoutTypes, CaseBudget], Iterator[OpCase]]:
    """Return the cases of an op without phases: the checks in `named`, then `check`
    (implementation, case) for every row of a covering array of `axes`, with NUM_SEEDS sets of
    inputs or more. With --all, axes in `axes.blocks` also get the block sizes of the kernel's
    configurations, and one more than each.

    The axis `layout` gets the names of the layouts. The axis `config` ("default", "small", "large",
    see `configured`) is used where the implementation has configurations.
    """

    def cases(kernel: Any, env: Env, layouts: LayoutTypes, extent: CaseBudget) -> Iterator[OpCase]:
        yield from (OpCase(name, run) for name, run in named(kernel))
        kinds = {kind.__name__: kind for kind in layouts}
        claimed = _claimed(axes, kernel, kinds, extent)
        if extent.triples:
            claimed = _with_blocks(claimed, kernel, check, kinds)
        found = set()
        for row, representative, repeats in _all_rows(claimed, extent):
            name = f"{axes.op}[{_name(claimed, row)}]"
            if name not in found:
                found.add(name)
                is_extreme = repeats == EXTREME_REPEATS
                seeds = 1 if is_extreme and extent.num_seeds == NUM_SEEDS else extent.num_seeds
                drawn = (0, *range(extent.seed, extent.seed + seeds - 1))
                run = functools.partial(
                    _run, check, kernel, row, layouts=kinds, seeds=drawn, repeats=repeats
                )
                traits = {"dtype": str(row["dtype"])} if "dtype" in row else {}
                yield OpCase(name, run, representative, traits)

    return cases


def _all_rows(axes: OpAxes, extent: CaseBudget) -> Iterator[tuple[Combination, bool, int]]:
    """Yield rows, whether the default check has them, and how often a step runs. The rows of the
    default check come first.
    """
    repeats = 1 if extent.interpreted else REPEATS
    rows = list(all_rows(axes, triples=extent.triples))
    yield from ((row, True, repeats) for row, representative in rows if representative)
    if not extent.interpreted:
        yield from ((row, True, EXTREME_REPEATS) for row in extreme_rows(axes))
    yield from ((row, False, repeats) for row, representative in rows if not representative)


def _claimed(
    axes: OpAxes, kernel: Any, layouts: Mapping[str, type[KVLayout]], extent: CaseBudget
) -> OpAxes:
    """Return the axes with the kernel's layouts, the storages that it declares, and its other
    configurations if it has any.
    """
    if "layout" in axes.values:
        axes = _with_layouts(axes, layouts, extent)
    if "config" in axes.values and not isinstance(kernel, TunableOp):
        axes = axes.having(config=("default",))
    return axes


def _with_layouts(
    axes: OpAxes, layouts: Mapping[str, type[KVLayout]], extent: CaseBudget
) -> OpAxes:
    """Return the axes with layouts, each with the storages and the latent caches that it has."""
    axes = axes.having(layout=tuple(layouts))
    never: list[tuple[str, Value, str, Value]] = [
        ("layout", name, "latent", True)
        for name, kind in layouts.items()
        if "latent" in axes.values and not kind.serves_v_prefix
    ]
    if "storage" in axes.values:
        axes = axes.having(storage=(None, *extent.storages))
        never += [
            ("layout", name, "storage", storage)
            for name, kind in layouts.items()
            for storage in extent.storages
            if storage not in kind.storages
        ]
    return dataclasses.replace(axes, never=(*axes.never, *never))


def _name(axes: OpAxes, row: Combination) -> str:
    """Return a name with dtype, layout, and the values (with their axis) that differ from the
    usual.
    """
    always = [str(row[axis]) for axis in ("dtype", "layout") if axis in row]
    others = [
        f"{axis}_{value}"
        for axis, value in row.items()
        if axis not in ("dtype", "layout") and value != axes.values[axis][0]
    ]
    return "-".join([*always, *others]) or "ordinary"


def _with_blocks(
    axes: OpAxes,
    kernel: Any,
    check: Callable[[Any, PlainCase], None],
    layouts: Mapping[str, type[KVLayout]],
) -> OpAxes:
    """Return the axes with the numbers of a kernel's configurations, and one more than each, as
    additional values of the axes that blocks divide.
    """
    if not axes.blocks or not isinstance(kernel, TunableOp):
        return axes
    numbers: set[int] = set()

    def choose(problem: OpProblem) -> Any:
        env = Env("cpu")
        for config in (kernel.default_config(env, problem), *kernel.candidates(env, problem)):
            numbers.update(numbers_of(config))
        raise _FoundError

    first = covering_rows(axes)[0]
    with contextlib.suppress(
        Exception
    ):  # the cases call the kernel again and report what it raises
        check(kernel.tuned(choose), PlainCase({**first, "config": "default"}, layouts=layouts))
    sizes = sorted({size for n in numbers if 1 < n <= LARGEST_BLOCK for size in (n, n + 1)})
    more = {
        axis: (*axes.more.get(axis, ()), *(n for n in sizes if n not in axes.known(axis)))
        for axis in axes.blocks
    }
    return dataclasses.replace(axes, more={**axes.more, **more})


class _FoundError(Exception):
    """Ends a call when the numbers of its configurations are known."""


LARGEST_BLOCK = 1024
"""Numbers above this are no sizes of blocks along an axis."""


def _run(
    check: Callable[[Any, PlainCase], None],
    kernel: Any,
    row: Combination,
    layouts: Mapping[str, type[KVLayout]],
    seeds: Sequence[int],
    repeats: int,
) -> None:
    runs = CaseRuns()
    for seed in seeds:
        runs.begin()
        try:
            check(kernel, PlainCase(row, seed, 1 if seed else repeats, layouts, runs))
        except AssertionError as wrong:
            if runs.returned_an_earlier_result:
                wrong.args = (f"{wrong}; the result is that of an earlier call, with other inputs",)
            raise


def configured(kernel: Any, config: str) -> Any:
    """Return the kernel with its default configurations, or with the candidates that have the
    smallest or largest numbers.
    """
    if config == "default" or not isinstance(kernel, TunableOp):
        return kernel
    env = Env("cpu")

    def choose(problem: OpProblem) -> Any:
        found = [kernel.default_config(env, problem), *kernel.candidates(env, problem)]
        return (min if config == "small" else max)(found, key=lambda c: sum(numbers_of(c)))

    return kernel.tuned(choose)


def numbers_of(config: Any) -> list[int]:
    """Return the whole numbers of a configuration (a dataclass, with slots or without), except
    memory sizes.
    """
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    values = [getattr(config, field.name) for field in fields]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 < v < 1 << 16]
