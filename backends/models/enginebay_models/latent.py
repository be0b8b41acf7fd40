"""Attention over a latent cache (MLA): one compressed vector per token, which all heads share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.model import TensorSource
from enginebay.ops.attention import ATTENTION
from enginebay.ops.bound import Ops
from enginebay.ops.caps import LAYER
from enginebay.ops.linear import LINEAR
from enginebay.ops.rope import ROPE
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay_models import tensors
from enginebay_models.blocks import RmsNorm, parameter, value_of, vector
from enginebay_models.tensors import Index

_EPS = 1e-6
"""The eps of the norms of compressed vectors. config.json's eps is for other norms."""


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Sizes of latent attention.

    A key is the compressed vector, followed by rotary features: `spec.head_dim` is the width of
    both, `spec.v_head_dim` that of the vector. The query of a head has `plain_dim` features without
    positions and `rope.rotary_dim` with positions; its output has `out_dim` features. `q_rank` is
    the width of compressed queries, or None. `is_interleaved`: in checkpoints, the rotary features
    are pairs (2 i, 2 i + 1).
    """

    hidden_size: int
    spec: AttnSpec
    rope: RopeSpec
    plain_dim: int
    out_dim: int
    q_rank: int | None
    has_bias: bool
    is_interleaved: bool
    cache_group: str

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        return self.spec.q_dtype


class LatentAttention(nnx.Module):
    """Attention of DeepSeek-V2 with absorbed projections.

    Queries are projected into the space of the compressed vectors, and the weighted sum of vectors
    is projected back. Keys and values of heads are never computed, in decodes and in prompts.

    Here the rotary features are pairs (i, i + half). Where they are others in checkpoints, loading
    reorders queries and keys alike, so scores are the same.
    """

    def __init__(self, name: str, config: LatentConfig, layer: int) -> None:
        self.layer = layer
        spec, hidden, turning = config.spec, config.hidden_size, config.rope.rotary_dim
        heads, rank = spec.num_q_heads, spec.v_dim
        width, pairs = config.plain_dim + turning, turning if config.is_interleaved else 0
        q_in = config.q_rank or hidden
        is_ranked, has_bias = config.q_rank is not None, config.has_bias
        q_down = tensors.whole(f"{name}.q_a_proj.weight", (q_in, hidden))
        self.q_down = parameter((None, None), (q_in, hidden), q_down, 1) if is_ranked else None
        self.q_down_bias = vector(f"{name}.q_a_proj.bias", q_in) if is_ranked and has_bias else None
        self.q_norm = RmsNorm(f"{name}.q_a_layernorm", q_in, _EPS) if is_ranked else None
        q_name = f"{name}.{'q_b_proj' if is_ranked else 'q_proj'}.weight"
        q_shape, kv_shape = (heads, width, q_in), (1, spec.head_dim, hidden)
        compress = f"{name}.kv_a_proj_with_mqa"
        self.q = parameter(
            ("kv_heads", None, None), q_shape, _with_pairs(q_name, q_shape, pairs), 1
        )
        self.kv_down = parameter(
            (None, None, None), kv_shape, _with_pairs(f"{compress}.weight", kv_shape, pairs), 1
        )
        bias = _with_pairs(f"{compress}.bias", kv_shape[:2], pairs)
        self.kv_down_bias = parameter((None, None), kv_shape[:2], bias) if has_bias else None
        self.kv_norm = RmsNorm(f"{name}.kv_a_layernorm", rank, _EPS)
        kv_up = (heads, config.plain_dim + config.out_dim, rank)
        self.kv_up = parameter(
            ("kv_heads", None, None), kv_up, _with_pairs(f"{name}.kv_b_proj.weight", kv_up, 0)
        )
        out = (hidden, heads, 1, config.out_dim)
        self.out = parameter(
            (None, "kv_heads", None, None),
            out,
            tensors.split_columns(f"{name}.o_proj.weight", out),
            3,
        )
        self.out_bias = vector(f"{name}.o_proj.bias", hidden) if has_bias else None
        self.config = config

    def __call__(
        self, x: jax.Array, cache: CacheArrays, batch: AttnBatch, ops: Ops
    ) -> tuple[jax.Array, CacheArrays]:
        """Return (out [T, hidden], the layer's cache with the new tokens) for x [T, hidden]."""
        config, spec, plain = self.config, self.config.spec, self.config.plain_dim
        compressed = x
        if self.q_down is not None and self.q_norm is not None:
            bias = value_of(self.q_down_bias)
            compressed = self.q_norm(ops[LINEAR](x, self.q_down.get_value(), bias), ops)
        q = ops[LINEAR](compressed, self.q.get_value())
        kv = ops[LINEAR](x, self.kv_down.get_value(), value_of(self.kv_down_bias))
        latent = self.kv_norm(kv[..., : spec.v_dim], ops)
        q_turned, k_turned = (
            ops[ROPE](each, batch.positions, spec=config.rope)
            for each in (q[..., plain:], kv[..., spec.v_dim :])
        )
        up: jax.Array = self.kv_up.get_value()
        absorbed = _by_head("thp,hpr->thr", q[..., :plain], up[:, :plain])
        q = jnp.concatenate([absorbed, q_turned], axis=-1)
        k = jnp.concatenate([latent, k_turned], axis=-1)
        mixed, cache, _ = ops[ATTENTION](
            q, k, latent, cache, batch, spec=spec, inputs={LAYER: self.layer}
        )
        values = _by_head("thr,hvr->thv", mixed, up[:, plain:])
        out = ops[LINEAR](values[:, :, None], self.out.get_value(), value_of(self.out_bias))
        return out, cache


def _by_head(names: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply the features of each head with the head's weight; sums are f32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(
        names,
        x,
        weight.astype(x.dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.astype(x.dtype)


def _with_pairs(name: str, shape: tuple[int, ...], turning: int) -> TensorSource:
    """Read a tensor [heads * width, *inputs] as a weight [heads, width, *inputs].

    The last `turning` features of each head are pairs (2 i, 2 i + 1) in the tensor, and become
    pairs (i, i + half).
    """
    heads, width, *inputs = shape
    start = width - turning
    order = [*range(start), *range(start, width, 2), *range(start + 1, width, 2)]

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(heads)
        rows = readers[0][(slice(first * width, last * width), *index[2:])]
        return rows.reshape(last - first, width, *rows.shape[1:])[:, order][:, index[1]]

    return TensorSource((name,), ((heads * width, *inputs),), build)
