"""The ops linear and embedding, which read plain and quantised weights."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from enginebay.ops.op import CLOSE, Op
from enginebay.weights import Weight


class LinearOp(Protocol):
    """Returns x [T, *in_dims] times weight [*out_dims, *in_dims]: [T, *out_dims], summed in f32.

    All dimensions of x but the first are contracted with the last dimensions of the weight.
    `out_dtype` None is x's dtype.
    """

    def __call__(
        self,
        x: jax.Array,
        weight: Weight,
        bias: jax.Array | None = None,
        *,
        out_dtype: Any = None,
    ) -> jax.Array: ...


class EmbeddingOp(Protocol):
    """Returns rows of table [vocab, features] for ids int32 [T]: [T, features].

    The dtype is that of the table, or f32 for a quantised table.
    """

    def __call__(self, table: Weight, ids: jax.Array) -> jax.Array: ...


LINEAR: Op[LinearOp] = Op(
    "linear",
    LinearOp,
    "enginebay_xla.linear:linear",
    "enginebay_xla.quick_cases:linear_cases",
    CLOSE,
    reads_weights=True,
    kit="enginebay_xla.kit.kits:LINEAR",
    bench="enginebay_xla.bench.plain:LINEAR",
    cost="enginebay_xla.cost:linear_cost",
    oracle="enginebay_testing.oracle:linear",
    partition="enginebay_xla.partition:linear",
)


EMBEDDING: Op[EmbeddingOp] = Op(
    "embedding",
    EmbeddingOp,
    "enginebay_xla.linear:embedding",
    "enginebay_xla.quick_cases:embedding_cases",
    {},
    reads_weights=True,
    kit="enginebay_xla.kit.kits:EMBEDDING",
    bench="enginebay_xla.bench.plain:EMBEDDING",
    cost="enginebay_xla.cost:embedding_cost",
    partition="enginebay_xla.partition:embedding",
)
