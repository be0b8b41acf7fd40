"""The op grouped_linear: products of rows with the weights of their expert."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from enginebay.ops.op import CLOSE, Op
from enginebay.weights import Weight


class GroupedLinearOp(Protocol):
    """Multiplies rows, sorted by group, with the weight of their group; sums are f32.

    x is [T, inputs], weight [groups, outputs, inputs], group_sizes int32 [groups]; the result is
    [T, outputs]. The first group_sizes[0] rows are multiplied with weight[0], and so on. Rows after
    the last group give 0. Rows are independent. `out_dtype` None is x's dtype.
    """

    def __call__(
        self, x: jax.Array, weight: Weight, group_sizes: jax.Array, *, out_dtype: Any = None
    ) -> jax.Array: ...


GROUPED_LINEAR: Op[GroupedLinearOp] = Op(
    "grouped_linear",
    GroupedLinearOp,
    "enginebay_xla.grouped_linear:grouped_linear_reference",
    "enginebay_xla.quick_cases:grouped_linear_cases",
    CLOSE,
    reads_weights=True,
    kit="enginebay_xla.kit.kits:GROUPED_LINEAR",
    bench="enginebay_xla.bench.plain:GROUPED_LINEAR",
    cost="enginebay_xla.cost:grouped_linear_cost",
    oracle="enginebay_testing.oracle:grouped_linear",
    partition="enginebay_xla.partition:grouped_linear",
)
