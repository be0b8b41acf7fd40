"""The op short_conv: a causal convolution with a recurrent state."""

from __future__ import annotations

from typing import Protocol

import jax

from enginebay.contracts.cache import CacheArrays
from enginebay.ops.op import CLOSE, Op
from enginebay.ops.spec import AttnBatch


class ShortConvOp(Protocol):
    """A causal convolution: returns (out [T, channels] in x's dtype, the state after the tokens).

    x is [T, channels], weight [channels, taps], bias [channels]; sums are f32. The output of a
    token is the sum of the last `taps` inputs of its row up to the token, each times its column of
    the weight. Inputs before position 0 are 0. The state's array "inputs" [places, taps - 1,
    channels] has the last inputs of a row, oldest first, at place batch.page_table[row, 0]. Rows of
    length 0 are padding; no place is written for them.
    """

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        state: CacheArrays,
        batch: AttnBatch,
    ) -> tuple[jax.Array, CacheArrays]: ...


SHORT_CONV: Op[ShortConvOp] = Op(
    "short_conv",
    ShortConvOp,
    "enginebay_xla.short_conv:short_conv_reference",
    "enginebay_xla.quick_cases:short_conv_cases",
    CLOSE,
    kit="enginebay_xla.kit.kits:SHORT_CONV",
    bench="enginebay_xla.bench.states:SHORT_CONV",
    cost="enginebay_xla.cost:short_conv_cost",
)
