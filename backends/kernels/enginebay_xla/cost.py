"""Ideal costs (bytes and operations) of calls of the built-in ops without phases. Each function
takes the arguments of its op, as arrays or as shapes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch
from enginebay.weights import QuantizedArray, stored_bytes
from enginebay_bench.cost import Cost


def _bytes(array: Any) -> float:
    """Return the bytes of an array, or of all parts of a quantised weight."""
    return float(sum(stored_bytes(one.shape, one.dtype) for one in jax.tree.leaves(array)))


def linear_cost(x: Any, weight: Any, bias: Any = None, *, out_dtype: Any = None) -> Cost:
    """Return the cost of [rows, in] times a weight [out, in], each read once."""
    rows, num_in = x.shape[0], math.prod(x.shape[1:])
    num_out = math.prod(weight.shape) // num_in
    item = x.dtype.itemsize if out_dtype is None else jnp.dtype(out_dtype).itemsize
    read = _bytes(weight) + _bytes(x) + (0.0 if bias is None else _bytes(bias))
    return Cost(2.0 * rows * num_in * num_out, read, 1.0 * rows * num_out * item)


def grouped_linear_cost(x: Any, weight: Any, group_sizes: Any, *, out_dtype: Any = None) -> Cost:
    """Return the cost with the weight of each group that has rows read once.

    If only shapes are known, as many groups as possible have rows.
    """
    (rows, num_in), (groups, num_out) = x.shape, weight.shape[:2]
    used, busy = rows, min(rows, groups)
    if not isinstance(group_sizes, jax.ShapeDtypeStruct):
        used, busy = int(group_sizes.sum()), int((group_sizes > 0).sum())
    item = x.dtype.itemsize if out_dtype is None else jnp.dtype(out_dtype).itemsize
    read = sum(map(_bytes, jax.tree.leaves(weight))) / groups * busy
    read += _bytes(x) / max(rows, 1) * used + _bytes(group_sizes)
    return Cost(2.0 * used * num_in * num_out, read, 1.0 * rows * num_out * item)


def rms_norm_cost(x: Any, weight: Any, *, eps: float) -> Cost:
    """Return the cost of squares, sums, scaling and weighting."""
    return Cost(4.0 * math.prod(x.shape), _bytes(x) + _bytes(weight), _bytes(x))


def add_rms_norm_cost(x: Any, residual: Any, weight: Any, *, eps: float) -> Cost:
    """Return the cost of rms_norm and of a sum, which is read and written too."""
    norm, size = rms_norm_cost(x, weight, eps=eps), _bytes(x)
    return Cost(norm.flops + math.prod(x.shape), norm.bytes_read + size, norm.bytes_written + size)


def rope_cost(x: Any, positions: Any, *, spec: RopeSpec) -> Cost:
    """Return two products and a sum per rotated feature; angles are not counted."""
    turned = 3.0 * x.shape[0] * x.shape[1] * spec.rotary_dim
    return Cost(turned, _bytes(x) + _bytes(positions), _bytes(x))


def short_conv_cost(x: Any, weight: Any, bias: Any, state: CacheArrays, batch: AttnBatch) -> Cost:
    """Return a product and a sum per tap; the states of the rows are read and written."""
    state_bytes = sum(_bytes(a) / a.shape[0] for a in state.values()) * batch.kv_lens.shape[0]
    read = _bytes(x) + _bytes(weight) + (0.0 if bias is None else _bytes(bias))
    flops = 2.0 * math.prod(x.shape) * weight.shape[1]
    return Cost(flops, read + state_bytes, _bytes(x) + state_bytes)


def ssd_scan_cost(
    x: Any, dt: Any, decay: Any, b: Any, c: Any, skip: Any, state: CacheArrays, batch: AttnBatch
) -> Cost:
    """Return three products and two sums per entry of the state and token, as one token after the
    other takes; the states of the rows are read and written.
    """
    state_bytes = sum(_bytes(a) / a.shape[0] for a in state.values()) * batch.kv_lens.shape[0]
    read = sum(_bytes(one) for one in (x, dt, decay, b, c, skip) if one is not None)
    flops = 5.0 * math.prod(x.shape) * b.shape[-1]
    return Cost(flops, read + state_bytes, _bytes(x) + state_bytes)


def embedding_cost(table: Any, ids: Any) -> Cost:
    """Return the cost of reading one row of the table per id. Rows of a quantised table become
    f32.
    """
    num_values = 1.0 * ids.shape[0] * table.shape[1]
    item = 4 if isinstance(table, QuantizedArray) else table.dtype.itemsize
    read = ids.shape[0] * _bytes(table) / table.shape[0]
    return Cost(0.0, read + _bytes(ids), num_values * item)


def kv_write_cost(cache: CacheArrays, slots: Any, k: Any, v: Any, *, layout: KVLayout) -> Cost:
    """Return the cost of reading and writing keys and values once, and reading their slots."""
    size = _bytes(k) + _bytes(v)
    return Cost(0.0, size + _bytes(slots), size)


def rope_kv_write_cost(
    q: Any,
    k: Any,
    v: Any,
    cache: CacheArrays,
    positions: Any,
    slots: Any,
    *,
    spec: RopeSpec,
    layout: KVLayout,
) -> Cost:
    """Return the cost of rotating queries and keys, and writing keys and values."""
    written = kv_write_cost(cache, slots, k, v, layout=layout)
    flops = rope_cost(q, positions, spec=spec).flops + rope_cost(k, positions, spec=spec).flops
    return Cost(
        flops,
        written.bytes_read + _bytes(q) + _bytes(positions),
        written.bytes_written + _bytes(q),
    )


def sample_cost(z: Any, seeds: Any, *, top_k: Any, top_p: Any, min_p: Any) -> Cost:
    """Return the cost of reading every score once."""
    return Cost(2.0 * math.prod(z.shape), _bytes(z), 4.0 * z.shape[0])
