"""The parts of an op's benchmark: a problem with its inputs, its ideal cost, and a check of the
results.
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

from enginebay.contracts.cache import KVLayout
from enginebay.errors import InputError
from enginebay.ops.caps import Env
from enginebay.ops.op import Op
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.ops.tuned_tables import TunedConfigs
from enginebay.ops.tuning import ConfigSource, OpProblem, TunableOp
from enginebay.plugins.registry import import_target
from enginebay_bench.cost import Cost
from enginebay_bench.shapes import Axes, Shape
from enginebay_testing.exact import OpCall, errors
from enginebay_testing.traced_cases import TracedShape

StepFunction = Callable[..., tuple[Any, Any]]
"""step(state, *arrays) -> (out, state): an engine's call inside jit; `state` is donated."""

PERIOD = 1_000_003
"""Random values repeat with this period (a prime), because drawing gigabytes takes too long."""


@dataclasses.dataclass(frozen=True)
class BenchSetting:
    """Settings that all problems of a run share. `kv_write` writes keys and values for attention
    kernels that do not write them. `cache_dtype`: as AttnSpec.cache_dtype; None: `dtype`. `seed`
    makes the numbers of the inputs.
    """

    env: Env
    dtype: str
    layout_name: str
    layout_type: type[KVLayout]
    kv_write: Any
    page_size: int = 64
    min_rows: int = 1
    ragged: bool = False
    cache_dtype: str | None = None
    seed: int = 0
    tuned: TunedConfigs = dataclasses.field(default_factory=TunedConfigs)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The donated state, and the other arrays; `facts` is for the problem's own check."""

    state: Any
    arrays: tuple[Any, ...]
    facts: Any = None

    def copy(self) -> Inputs:
        """Return a copy in separate memory, without the facts."""
        return Inputs(*jax.tree.map(jnp.copy, (self.state, self.arrays)))


@dataclasses.dataclass(frozen=True)
class Parity:
    """The largest error of the compared outputs, and the same as a share of the allowed error;
    above 1 the result is wrong.

    `against` names the reference and the number of compared outputs.
    """

    error: float
    share: float
    against: str

    @property
    def is_right(self) -> bool:
        """Return whether every compared value is within its bound; NaN is not."""
        return self.share <= 1.0


@dataclasses.dataclass(frozen=True)
class TuningKey:
    """The properties of a problem by which a configuration is chosen."""

    spec: AttnSpec
    bucket: Bucket
    layout: KVLayout


@dataclasses.dataclass(frozen=True)
class Problem:
    """One op on one shape.

    `make(poison)` makes the inputs; `poison` fills every place that must not be read. `num_bytes`
    is the size of one set of inputs. `bind(impl, config)` returns the step, and `check(inputs, out,
    state)` compares its results; `inputs` are unchanged. An op may have several problems on one
    shape, each with a `label`, for the implementations that it `is_for`. `other`: the same problem
    with other numbers, which is checked after the timed calls.
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
    other: Problem | None = None


@dataclasses.dataclass(frozen=True)
class OpBench:
    """The benchmark of an op, which `Op.bench` names: its shapes, and the problems of a shape.
    Engines run an implementation as in the last problem that applies to it.
    """

    axes: Axes
    problems: Callable[[Shape, BenchSetting], Sequence[Problem]]


def bench_of(op: Op[Any]) -> OpBench:
    """Return the benchmark of an op; InputError when the op has none."""
    if op.bench is None:
        raise InputError(
            f"op {op.name!r} has no benchmark",
            "an op whose record sets `bench`",
            "Leave it out of --op.",
        )
    bench: OpBench = import_target(op.bench, f"the benchmark of op {op.name!r}")
    return bench


def cost_of(op: Op[Any], *arguments: Any, **keywords: Any) -> Cost:
    """Return the ideal cost of a call: the op's own, or the bytes of arguments and results."""
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


def call_problem(op: Op[Any], shape: Shape | TracedShape, call: OpCall) -> Problem:
    """Return one call of an op, checked against its float64 results within the op's tolerance."""

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
    """Return an implementation, of an op without phases, that uses one configuration for all
    problems.
    """
    return impl.tuned(lambda _: config)


def asked_for(impl: TunableOp, env: Env, problem: Problem) -> OpProblem | None:
    """Return the problem for which an implementation requests a configuration, or None when it has
    none to choose.
    """
    asked: list[OpProblem] = []

    def choose(one: OpProblem) -> Any:
        asked.append(one)
        return impl.default_config(env, one)

    inputs = problem.make(0.0)
    jax.eval_shape(problem.bind(impl.tuned(choose), None), inputs.state, *inputs.arrays)
    return asked[0] if asked and impl.candidates(env, asked[0]) else None


def noise(shape: tuple[int, ...], dtype: str, seed: int, number: int = 0) -> np.ndarray:
    """Return normal values of a dtype, repeated after PERIOD values. `number`: which of the arrays
    of a seed.
    """
    count = int(np.prod(shape))
    block = np.random.default_rng([seed, number]).standard_normal(min(count, PERIOD), np.float32)
    return np.resize(block.astype(jnp.dtype(dtype)), count).reshape(shape)


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of `count` indices, evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def compared(num: int, of: int, what: str) -> str:
    """Return the text of Parity.against."""
    return f"f64, {num} {what}" if num == of else f"f64, {num} of {of} {what}"


def worst(error: np.ndarray, allowed: np.ndarray | float, against: str) -> Parity:
    """Return the parity of errors and their bounds."""
    limit = np.maximum(np.asarray(allowed, float), np.finfo(float).tiny)
    share = np.where(error == 0, 0.0, error / limit)
    largest = np.nan if np.isnan(error).any() else error.max(initial=0.0)
    return Parity(
        float(largest), float(np.nan if np.isnan(share).any() else share.max(initial=0.0)), against
    )
