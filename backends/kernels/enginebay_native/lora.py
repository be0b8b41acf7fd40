"""The op lora in C++: only the adapters that tokens have are read, once for all their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np

from enginebay_native.calls import register
from enginebay_native.compiling import check_library

# Every composition imports this module, but only engines with slots for adapters need the library.
# So it is compiled when the first program with adapters is traced.
check_library("lora")


def lora(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    places: jax.Array,
    *,
    axis: int = 0,
    ends: Sequence[int] = (),
) -> jax.Array:
    """Add the product of each token's adapter to y, in place where y is not used afterwards.

    y is [T, *outputs], x [T, *inputs], a [slots, parts, rank, *inputs], b [slots, rank, *outputs],
    places int32 [T]: the slot of each token, counted from 1, or 0. Part p has the outputs from
    ends[p - 1] to ends[p] of dimension `axis`; () is one part. Sums are f32; x a is rounded to x's
    dtype. The bits of a token's result do not depend on the other tokens.
    """
    (tokens, *outputs), (slots, rank) = y.shape, b.shape[:2]
    if not y.size or not x.size:
        return y
    inner = math.prod(outputs[axis + 1 :])
    bounds = np.array(ends or (outputs[axis],), np.int64) * inner
    call = jax.ffi.ffi_call(
        register("lora"),
        jax.ShapeDtypeStruct((tokens, math.prod(outputs)), y.dtype),
        input_output_aliases={0: 0},
    )
    added: jax.Array = call(
        y.reshape(tokens, -1),
        x.reshape(tokens, -1),
        a.reshape(slots, len(bounds) * rank, -1),
        b.reshape(slots, rank, -1),
        places,
        period=np.int64(outputs[axis] * inner),
        ends=bounds,
    )
    return added.reshape(y.shape)
