"""Op, the record of an op that a plugin registers and that models use to call it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

SignatureT = TypeVar("SignatureT")

CLOSE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Largest error of a product of numbers near 1, by dtype: the tolerance of most ops."""


@dataclasses.dataclass(frozen=True)
class CallsAround:
    """Names of the ops that are called before an implementation of attention: `rotate` rotates
    queries and keys, `write` writes keys and values to the cache, `rotate_and_write` does both.
    """

    rotate: str
    write: str
    rotate_and_write: str


@dataclasses.dataclass(frozen=True)
class Op(Generic[SignatureT]):
    """One op, registered with the hook `register_ops` under `name`. Models call it as
    `ops[RMS_NORM](x, weight, eps=1e-6)`, where `RMS_NORM: Op[RmsNormOp]` is the record of the op.
    Functions and other objects are named as "module:attribute".

    name: the registered name. signature: a typing.Protocol whose `__call__` is the signature of the
    op. If it has a keyword-only argument `batch: StepBatch = ...`, enginebay adds the StepBatch of
    the step to every call in `Model.hidden`, so models leave this argument out.

    reference: the implementation in plain JAX. quick_cases: a function that takes a CheckSetting
    and returns QuickCases (both in `enginebay.compose.quick_cases`); an unregistered implementation
    runs them before it is used. tolerance: dtype -> max difference from the reference, relative to
    the largest number of the same row (first axis); results of other dtypes must be equal.

    made_of: for a fused op, the names of the ops that it replaces, none of which is fused. With
    "auto", a kernel of the fused op is used only if no kernel that it replaces has a higher
    priority. composed: for plans without a kernel of the fused op, a function that takes the
    implementations of `made_of`, in order, and returns an implementation of the fused op. Ops that
    are not fused have an implementation in every plan. reads_weights: whether an argument may be a
    QuantizedArray.

    calls: for attention, the ops to call around an implementation.

    partition: a function (implementation, *arguments, **keywords of a call) -> Partition, which
    splits calls over devices; see `enginebay.ops.partition_rules`. Without it XLA's compiler splits
    calls, and an implementation that declares the capability sharded = False cannot be used on
    several devices.

    adapters: for an op that applies adapters, a function that takes an
    `enginebay.compose.plan.Plan` and returns it with `adapters` and with the model that calls the
    op; it is called for configurations with adapters.

    oracle: a function of the op's arguments as NumPy arrays, except `out_dtype`, that returns
    float64 results; without it the reference runs in float64. cost: a function of the op's
    arguments, as arrays or shapes, that returns the `enginebay_bench.cost.Cost` of the call;
    without it the cost is reading the arguments and writing the results. kit: an
    `enginebay_testing.op_kit.OpKit`, with which `enginebay check` checks implementations, and
    compiles them for devices that this machine does not have; without it `check` runs the quick
    cases. bench: an `enginebay_bench.problem.OpBench` with the shapes that `bench kernels` and
    `tune` measure.
    """

    name: str
    signature: type[Any]
    reference: str
    quick_cases: str
    tolerance: Mapping[str, float]
    made_of: tuple[str, ...] = ()
    composed: str | None = None
    reads_weights: bool = False
    calls: CallsAround | None = None
    oracle: str | None = None
    cost: str | None = None
    kit: str | None = None
    bench: str | None = None
    partition: str | None = None
    adapters: str | None = None

    @property
    def writers(self) -> tuple[str, ...]:
        """The ops of `calls` that write the cache."""
        return () if self.calls is None else (self.calls.write, self.calls.rotate_and_write)

    @functools.cached_property
    def takes_batch(self) -> bool:
        """Whether calls receive the StepBatch of the step."""
        batch = inspect.signature(self.signature.__call__).parameters.get("batch")
        return batch is not None and batch.kind is batch.KEYWORD_ONLY
