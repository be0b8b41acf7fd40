"""The ideal cost of an op: the same for every implementation, so that reports can say how far each
one is from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from enginebay.ops.spec import AttnSpec


@dataclasses.dataclass(frozen=True)
class Cost:
    """Floating-point operations, bytes read and bytes written."""

    flops: float
    bytes_read: float
    bytes_written: float

    def time_s(self, *, flops_per_s: float, bytes_per_s: float) -> float:
        """Seconds at the given peak rates when arithmetic and traffic overlap fully."""
        return max(self.flops / flops_per_s, (self.bytes_read + self.bytes_written) / bytes_per_s)


def attention_cost(
    spec: AttnSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    kv_bytes: int = 2,
    q_bytes: int = 2,
) -> Cost:
    """Attention over rows with q_lens[i] new tokens and kv_lens[i] tokens of context (the new ones
    included).
    """
    v_dim = spec.v_head_dim or spec.head_dim
    q, kv = np.asarray(q_lens, float), np.asarray(kv_lens, float)
    first = (
        kv - q + 1 if spec.causal else kv
    )  # positions that the first new token sees; each later one sees one more
    window = np.inf if spec.window is None else spec.window
    seen = np.minimum(kv, window + q - 1)  # positions that any new token sees
    num_growing = (
        np.clip(window - first, 0, q) if spec.causal else q * 0
    )  # tokens that see less than a window
    pairs = (
        num_growing * first
        + num_growing * (num_growing - 1) / 2
        + (q - num_growing) * np.minimum(kv, window)
    ).sum()
    row_bytes = (
        spec.num_kv_heads * (spec.head_dim + (0 if spec.v_is_k_prefix else v_dim)) * kv_bytes
    )
    io_bytes = q.sum() * spec.num_q_heads * q_bytes
    return Cost(
        flops=2 * spec.num_q_heads * pairs * (spec.head_dim + v_dim),
        bytes_read=seen.sum() * row_bytes + io_bytes * spec.head_dim,
        bytes_written=q.sum() * row_bytes + io_bytes * v_dim,
    )


def linear_cost(
    rows: int, in_features: int, out_features: int, *, weight_bytes: int = 2, io_bytes: int = 2
) -> Cost:
    """A product of [rows, in] with a weight [out, in]."""
    return Cost(
        flops=2.0 * rows * in_features * out_features,
        bytes_read=in_features * out_features * weight_bytes + rows * in_features * io_bytes,
        bytes_written=rows * out_features * io_bytes,
    )


def rms_norm_cost(rows: int, features: int, *, io_bytes: int = 2) -> Cost:
    """rows [rows, features] squared, summed, scaled and weighted."""
    return Cost(
        4.0 * rows * features, (rows + 1.0) * features * io_bytes, 1.0 * rows * features * io_bytes
    )


def rope_cost(rows: int, heads: int, head_dim: int, rotary_dim: int, *, io_bytes: int = 2) -> Cost:
    """Two products and a sum for each rotated feature of [rows, heads, head_dim]; angles are not
    counted.
    """
    size = 1.0 * rows * heads * head_dim * io_bytes
    return Cost(3.0 * rows * heads * rotary_dim, size + 4 * rows, size)


def kv_write_cost(rows: int, num_kv_heads: int, head_dim: int, *, kv_bytes: int = 2) -> Cost:
    """Keys and values of `rows` tokens read once and written once, with a slot each."""
    size = 2.0 * rows * num_kv_heads * head_dim * kv_bytes
    return Cost(0.0, size + 4 * rows, size)


def embedding_cost(rows: int, features: int, *, io_bytes: int = 2) -> Cost:
    """One row of the table for each id."""
    size = 1.0 * rows * features * io_bytes
    return Cost(0.0, size + 4 * rows, size)
