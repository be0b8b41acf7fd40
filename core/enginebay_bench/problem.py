"""What a benchmark of an op is made of: a problem with its inputs, its ideal cost, and a check of
what comes out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import KVLayout
from enginebay.errors import InputError
from enginebay.ops.caps import Env
from enginebay.ops.cost import Cost
from enginebay.ops.op import Op
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.ops.tuning import ConfigSource, OpProblem, TunableOp
from enginebay.registry import import_target
from enginebay_bench.shapes import Axes, Shape
from enginebay_bench.tables import TunedConfigs
from enginebay_testing.exact import OpCall, errors

StepFunction = Callable[..., tuple[Any, Any]]
"""step(state, *arrays) -> (out, state): one call as an engine makes it, inside jit, with `state`
donated.
"""

PERIOD = 1_000_003
"""Random values repeat after so many (a prime): drawing gigabytes would take longer than measuring.
"""


@dataclasses.dataclass(frozen=True)
class BenchSetting:
    """What problems of one run share. `kv_write` puts keys into the cache for attention that does
    not do so itself.
    """

    env: Env
    dtype: str
    layout_name: str
    layout_type: type[KVLayout]
    kv_write: Any
    page_size: int = 64
    min_rows: int = 1
    ragged: bool = False
    tuned: TunedConfigs = dataclasses.field(default_factory=TunedConfigs)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The donated state, and the other arrays; `facts` is for the problem's own check."""

    state: Any
    arrays: tuple[Any, ...]
    facts: Any = None

    def copy(self) -> Inputs:
        """The same in memory of its own, without the facts."""
        return Inputs(*jax.tree.map(jnp.copy, (self.state, self.arrays)))


@dataclasses.dataclass(frozen=True)
class Parity:
    """The largest error of the compared outputs, and the same as a share of what rounding allows;
    wrong above 1.

    `against` says what they were compared with and how many were.
    """

    error: float
    share: float
    against: str

    @property
    def is_right(self) -> bool:
        """Whether every compared value is within its bound; a NaN is not."""
        return self.share <= 1.0


@dataclasses.dataclass(frozen=True)
class TuningKey:
    """What a configuration is chosen by."""

    spec: AttnSpec
    bucket: Bucket
    layout: KVLayout


@dataclasses.dataclass(frozen=True)
class Problem:
    """One op on one shape.

    `make(poison)` makes the inputs; `poison` lies wherever nobody may look. `num_bytes` is the size
    of one set of them. `bind(impl, config)` gives the step, `check(inputs, out, state)` compares,
    `inputs` being as they were before. An op may have several problems on one shape, each with a
    `label`, for the implementations that it `is_for`.
    """

    name: str
    cost: Cost
    num_bytes: int
    make: Callable[[float], Inputs]
    bind: Callable[[Any, Any], StepFunction]
    check: Callable[[Inputs, Any, Any], Parity]
    why_not: Callable[[Any], str | None] = lambda _: None
    is_for: Callable[[Any], bool] = lambda _: True
    label: str = ""
    config: Callable[[Any], tuple[Any, ConfigSource]] = lambda _: (None, "default")
    key: TuningKey | None = None


@dataclasses.dataclass(frozen=True)
class OpBench:
    """An op that can be measured, which `Op.bench` names: which shapes it has, and the problems of
    one. Engines run an implementation as in the last of the problems that are for it.
    """

    axes: Axes
    problems: Callable[[Shape, BenchSetting], Sequence[Problem]]


def bench_of(op: Op[Any]) -> OpBench:
    """The benchmark of an op; InputError when it names none."""
    if op.bench is None:
        raise InputError(
            f"op {op.name!r} has no benchmark", "an op whose record names one", "Leave it."
        )
    bench: OpBench = import_target(op.bench, f"the benchmark of op {op.name!r}")
    return bench


def cost_of(op: Op[Any], *arguments: Any, **keywords: Any) -> Cost:
    """The ideal cost of a call: the op's own, or the bytes of arguments and results."""
    if op.cost is not None:
        cost: Cost = import_target(op.cost, f"the cost of op {op.name!r}")(*arguments, **keywords)
        return cost
    reference = import_target(op.reference, f"the reference of op {op.name!r}")
    results = jax.eval_shape(functools.partial(reference, **keywords), *arguments)
    read, written = (
        float(sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(some)))
        for some in (arguments, results)
    )
    return Cost(0.0, read, written)


def call_problem(op: Op[Any], shape: Shape, call: OpCall) -> Problem:
    """One call of an op, checked against its float64 results within the op's tolerance."""

    def check(inputs: Inputs, out: Any, _: Any) -> Parity:
        try:
            found = errors(op, call, out)
        except AssertionError as wrong:
            return Parity(float("nan"), float("inf"), str(wrong))
        error, allowed = (np.concatenate(rows) for rows in zip(*found, strict=True))
        return worst(error, allowed, compared(error.size, error.size, "rows"))

    return Problem(
        name=shape.name,
        cost=cost_of(op, *call.arguments, **call.keywords),
        num_bytes=sum(array.nbytes for array in jax.tree.leaves(call.arguments)),
        make=lambda _: Inputs((), tuple(jax.tree.map(jnp.asarray, call.arguments))),
        bind=lambda impl, _: lambda state, *arrays: (impl(*arrays, **call.keywords), state),
        check=check,
    )


def with_config(impl: TunableOp, config: Any) -> Any:
    """An implementation of an op without phases with one configuration for everything."""
    return impl.tuned(lambda _: config)


def asked_for(impl: TunableOp, env: Env, problem: Problem) -> OpProblem | None:
    """What such an implementation asks a configuration for on a problem; None when it has nothing
    to choose there.
    """
    asked: list[OpProblem] = []

    def choose(one: OpProblem) -> Any:
        asked.append(one)
        return impl.default_config(env, one)

    inputs = problem.make(0.0)
    jax.eval_shape(problem.bind(impl.tuned(choose), None), inputs.state, *inputs.arrays)
    return asked[0] if asked and impl.candidates(env, asked[0]) else None


def noise(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Normal values of a dtype, repeating after PERIOD."""
    count = int(np.prod(shape))
    block = np.random.default_rng(seed).standard_normal(min(count, PERIOD), np.float32)
    return np.resize(block.astype(jnp.dtype(dtype)), count).reshape(shape)


def spread(count: int, most: int) -> np.ndarray:
    """At most `most` of `count` indices, evenly, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def compared(num: int, of: int, what: str) -> str:
    """For Parity.against."""
    return f"f64, {num} {what}" if num == of else f"f64, {num} of {of} {what}"


def worst(error: np.ndarray, allowed: np.ndarray | float, against: str) -> Parity:
    """The parity of errors with what is allowed of each."""
    limit = np.maximum(np.asarray(allowed, float), np.finfo(float).tiny)
    share = np.where(error == 0, 0.0, error / limit)
    largest = np.nan if np.isnan(error).any() else error.max(initial=0.0)
    return Parity(
        float(largest), float(np.nan if np.isnan(share).any() else share.max(initial=0.0)), against
    )
