"""What an op is, apart from its implementations: a record that a plugin registers, by which models
call the op, and the cases of its quick check.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax

from enginebay.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Mode

SignatureT = TypeVar("SignatureT")


@dataclasses.dataclass(frozen=True)
class Op(Generic[SignatureT]):
    """One op, registered through the hook `register_ops` under its `name`. Models call it as
    `ops[RMS_NORM](x, weight, eps=1e-6)`, where `RMS_NORM: Op[RmsNormOp]` is the op's record.

    `signature` is the class of typing.Protocol whose `__call__` says how the op is called. To a
    keyword-only argument `batch: StepBatch = ...` the call in a model's `hidden` adds that of the
    step: models do not pass it.

    `reference` is "module:attribute" of its implementation in plain JAX. `quick_cases` is
    "module:attribute" of a function CheckSetting -> iterable of QuickCase: what an implementation
    given by hand runs before it is used. `tolerance` has by dtype how far its results may be from
    the reference's, per unit of the largest number of the same row (first axis); results of other
    dtypes must be equal.

    A fused op names the ops that it is `made_of`, none of them fused; it is used where an
    implementation of it is as good as theirs. `composed` is "module:attribute" of a function
    (implementations of `made_of`, in this order) -> an implementation, which serves elsewhere.
    Ops that are not fused have an implementation in every plan. An op that `reads_weights` may be
    given a QuantizedArray.

    `calls` names the ops that are called around an implementation of attention: that which rotates
    queries and keys, that which writes the cache, and that which does both in one.

    `partition` is "module:attribute" of a function (implementation, *arguments, **keywords of a
    call) -> Partition, by which calls are split over devices. Without one the compiler splits them,
    and an implementation that it cannot split (the capability sharded = False) is refused there.

    The others are for tools. `oracle` is "module:attribute" of a function of the op's arguments as
    NumPy arrays that returns its results in float64; without one the reference runs in float64.
    `cost` is "module:attribute" of a function of the op's arguments, as arrays or as shapes, that
    returns the Cost of the call; without one a call reads its arguments and writes its results.
    `kit` is "module:attribute" of an `enginebay_testing.op_kit.OpKit`, by which `check` checks
    implementations and compiles them for devices that are not there; without one the quick cases
    are run. `bench` is "module:attribute" of an `enginebay_bench.problem.OpBench`, on whose shapes
    `bench kernels` and `tune` measure.
    """

    name: str
    signature: type[Any]
    reference: str
    quick_cases: str
    tolerance: Mapping[str, float]
    made_of: tuple[str, ...] = ()
    composed: str | None = None
    reads_weights: bool = False
    calls: tuple[str, ...] = ()
    oracle: str | None = None
    cost: str | None = None
    kit: str | None = None
    bench: str | None = None
    partition: str | None = None

    @functools.cached_property
    def takes_batch(self) -> bool:
        """Whether calls are given the step's StepBatch."""
        batch = inspect.signature(self.signature.__call__).parameters.get("batch")
        return batch is not None and batch.kind is batch.KEYWORD_ONLY

    def why_not_called(self, function: Callable[..., Any]) -> str | None:
        """Why a function cannot be called as the op's signature says, or None."""
        _, *parameters = inspect.signature(self.signature.__call__).parameters.values()
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        try:
            inspect.signature(function).bind(*by_place, **dict.fromkeys(by_name))
        except TypeError as error:
            return f"{error}; calls are {self.name}{inspect.signature(self.signature.__call__)}"
        except ValueError:  # a callable without a readable signature: the quick check calls it
            pass
        return None


@dataclasses.dataclass(frozen=True)
class Partition:
    """How one call of an op is split over devices.

    `inputs` and `outputs` name the dimensions of each array, "rows features"; a dimension of the
    same name is split alike everywhere. A dimension of a NamedWeight lies where the weight's axis
    lies. A dimension named as a logical axis ("vocab", "kv_heads") lies on its mesh axis, where all
    arrays divide by it. A call of which no dimension is split is left to the compiler.

    `run` (shards, *arrays) runs inside shard_map. It computes a device's part of the results from
    its part of the arguments that are not None, and of the keywords that `keywords` names; `batch`
    gives two arrays, its rows and its positions. `reduction` is the collective op by which the
    parts meet, `shards.reduce`, over the devices that split one of the dimensions `reduced`.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[..., Any]
    reduced: tuple[str, ...] = ()
    reduction: str = "all_reduce"
    keywords: tuple[str, ...] = ()
    size: int | None = None
    """How many of the first entries of each result count, where `run` pads them to split evenly."""


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices over which a part of a call is reduced, as the part sees them: the mesh axes, how
    many devices, and the collective op of the rule. No axes where no reduced dimension is split.
    """

    axes: tuple[str, ...]
    count: int
    collective: Callable[..., jax.Array]

    def reduce(self, x: jax.Array, **keywords: Any) -> jax.Array:
        """The collective over these devices; x itself where there is one."""
        return self.collective(x, axes=self.axes, **keywords) if self.axes else x

    @property
    def index(self) -> jax.Array:
        """Which of the devices this is."""
        return jax.lax.axis_index(self.axes)


@dataclasses.dataclass(frozen=True)
class CheckSetting:
    """Where an implementation is to serve: the model's attention layers per shard, the cache, the
    phases, the dtype.
    """

    env: Env
    specs: Sequence[AttnSpec]
    layout_type: type[KVLayout]
    dtype: str
    phases: Sequence[Mode] = ("decode", "prefill", "mixed")
    page_size: int = 64


def _serves(impl: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class QuickCase:
    """One problem of an op.

    `run` (implementation, *inputs) -> arrays by name; it is traced. A NaN of the reference's must
    be one of the implementation's, so that places which nobody may touch can hold NaN. Results in
    `exact` must be equal. `serves` says whether an implementation claims to serve the case;
    `place` (result, row) names a row of a result, "CASE: RESULT[ROW]" where it is None.
    """

    name: str
    run: Callable[..., Mapping[str, jax.Array]]
    inputs: tuple[Any, ...]
    exact: frozenset[str] = frozenset()
    serves: Callable[[Any], bool] = _serves
    place: Callable[[str, int], str] | None = None
