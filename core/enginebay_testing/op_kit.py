"""How the kit checks an op: the record that `Op.kit` names. It makes the checks of each kernel; ops
without phases make them from their axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import KVLayout
from enginebay.compose.candidates import ANY
from enginebay.errors import IncorrectError
from enginebay.ops.caps import Env
from enginebay.ops.op import Op
from enginebay.ops.spec import AttnSpec
from enginebay.ops.tuning import OpProblem, TunableOp
from enginebay.registry import Entry, Registry, import_target
from enginebay_byhand.cases import CheckSetting
from enginebay_byhand.quick import quick_check
from enginebay_testing.covering import PAIRS, TRIPLES, Combination, OpAxes, covering_rows
from enginebay_testing.oracle import EPS
from enginebay_testing.quantized import FORMS, ROUNDINGS

REPEATS = 20
"""How often a step runs; each run must give the same bits."""

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
class Extent:
    """How many cases of an op are made. Without `triples`, only pairs; `interpreted` kernels get
    short rows and few repeats.

    Each case runs with `num_seeds` sets of arrays. `quantizations` and `activation_quantizations`:
    the methods of quantised weights and the roundings of inputs that the kernel declares.
    """

    triples: bool = True
    interpreted: bool = False
    num_seeds: int = 1
    quantizations: tuple[str, ...] = ()
    activation_quantizations: tuple[str, ...] = ()

    def of(self, entry: Entry) -> Extent:
        """Return the extent for a kernel, with what its declaration says about quantisation."""

        def declared(capability: str, known: Iterable[str]) -> tuple[str, ...]:
            has = tuple(entry.capability(capability, ()))
            return tuple(known) if ANY in has else tuple(name for name in known if name in has)

        return dataclasses.replace(
            self,
            quantizations=declared("quantizations", FORMS),
            activation_quantizations=declared("activation_quantizations", ROUNDINGS),
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
    makes programs that are compiled for a device which need not be present.
    """

    cases: Callable[[Any, Env, LayoutTypes, Extent], Iterator[OpCase]]
    programs: Callable[[Any, Env, int, LayoutTypes], Iterable[OpProgram]] = _no_programs


def kit_of(registry: Registry, op: str) -> OpKit:
    """Return the kit of a registered op. An op without a kit is checked by its quick cases."""
    record: Op[Any] = registry.load(registry.find("op", op))
    if record.kit is None:
        return OpKit(functools.partial(_quick_cases, record))
    kit: OpKit = import_target(record.kit, f"the kit of op {op!r}")
    return kit


def _quick_cases(
    op: Op[Any], kernel: Any, env: Env, layouts: LayoutTypes, extent: Extent
) -> Iterator[OpCase]:
    setting = CheckSetting(env, [AttnSpec(4, 2, 16)], layouts[0], "float32", page_size=16)

    def run() -> None:
        try:
            quick_check(op, kernel, setting, "the kernel", "no check")
        except IncorrectError as wrong:
            raise AssertionError(str(wrong)) from wrong

    yield OpCase(f"{op.name}[quick_cases]", run)


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

    def run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the results as NumPy arrays; AssertionError if another run gives other bits."""
        step = jax.jit(call)
        first = jax.tree.map(np.asarray, step(*arguments))
        for turn in range(1, self.repeats):
            again = jax.tree.map(np.asarray, step(*arguments))
            same = [
                a.tobytes() == b.tobytes()
                for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
            ]
            assert all(same), f"run {turn + 1} of the same step returned other bits than run 1"
        return first


def covering_cases(
    axes: OpAxes,
    check: Callable[[Any, PlainCase], None],
    named: Callable[[Any], Iterable[tuple[str, Callable[[], None]]]] = lambda _: (),
) -> Callable[[Any, Env, LayoutTypes, Extent], Iterator[OpCase]]:
    """Return the cases of an op without phases: the checks in `named`, then `check`
    (implementation, case) for every row of a covering array of `axes`.

    The axis `layout` gets the names of the layouts. The axis `config` ("default", "small", "large",
    see `configured`) is used where the implementation has configurations.
    """

    def cases(kernel: Any, env: Env, layouts: LayoutTypes, extent: Extent) -> Iterator[OpCase]:
        yield from (OpCase(name, run) for name, run in named(kernel))
        kinds = {kind.__name__: kind for kind in layouts}
        claimed = _claimed(axes, kernel, tuple(kinds))
        found = set()
        for strength in (PAIRS, TRIPLES) if extent.triples else (PAIRS,):
            for row in covering_rows(claimed, strength):
                name = f"{axes.op}[{_name(claimed, row)}]"
                if name not in found:
                    found.add(name)
                    run = functools.partial(_run, check, kernel, row, kinds, extent)
                    traits = {"dtype": str(row["dtype"])} if "dtype" in row else {}
                    yield OpCase(name, run, strength == PAIRS, traits)

    return cases


def _claimed(axes: OpAxes, kernel: Any, layouts: tuple[str, ...]) -> OpAxes:
    """Return the axes with the kernel's layouts, and with its other configurations if
    it has any.
    """
    if "layout" in axes.values:
        axes = axes.having(layout=layouts)
    if "config" in axes.values and not isinstance(kernel, TunableOp):
        axes = axes.having(config=("default",))
    return axes


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


def _run(
    check: Callable[[Any, PlainCase], None],
    kernel: Any,
    row: Combination,
    layouts: Mapping[str, type[KVLayout]],
    extent: Extent,
) -> None:
    for seed in range(extent.num_seeds):
        repeats = 1 if extent.interpreted or seed else REPEATS
        check(kernel, PlainCase(row, seed, repeats, layouts))


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
