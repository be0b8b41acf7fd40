"""The op short_conv in plain JAX: a causal convolution with few taps over each row's tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays
from enginebay.ops.spec import AttnBatch

INPUTS = "inputs"
"""Name of the state's array, which has a row's last inputs, the oldest first."""


def short_conv(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: CacheArrays, batch: AttnBatch
) -> tuple[jax.Array, CacheArrays]:
    """Return (out [T, channels], state after the tokens); ShortConvOp describes it.

    x is [T, channels], weight [channels, taps].
    """
    kept = weight.shape[1] - 1
    before = _before(state[INPUTS], batch)
    seq = jnp.minimum(batch.seq_ids, batch.kv_lens.shape[0] - 1)
    token = jnp.arange(x.shape[0], dtype=jnp.int32)
    offset = token - batch.cu_q_lens[seq]
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(kept + 1):
        old = before[seq, jnp.clip(kept + offset - back, 0, kept - 1)]
        inputs = jnp.where((offset >= back)[:, None], x[jnp.maximum(token - back, 0)], old)
        total += inputs.astype(jnp.float32) * weight[:, kept - back].astype(jnp.float32)
    out = _with_bias(total, bias, x.dtype)
    # The last inputs of each row come from its new tokens and, before those, from the old state.
    place = batch.q_lens[:, None] - kept + jnp.arange(kept)
    new = x[jnp.clip(batch.cu_q_lens[:-1, None] + place, 0, x.shape[0] - 1)]
    rows = jnp.arange(before.shape[0])[:, None]
    old = before[rows, jnp.clip(place + kept, 0, kept - 1)]
    return out, _put(state, batch, jnp.where((place >= 0)[..., None], new, old))


def short_conv_reference(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, state: CacheArrays, batch: AttnBatch
) -> tuple[jax.Array, CacheArrays]:
    """Compute one token after the other; a slow reference."""
    num_rows = batch.kv_lens.shape[0]

    def one(rows: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        inputs, seq = given
        seen = jnp.concatenate([rows[jnp.minimum(seq, num_rows - 1)], inputs[None]])
        total = (seen.astype(jnp.float32) * weight.T.astype(jnp.float32)).sum(axis=0)
        return rows.at[seq].set(seen[1:], mode="drop"), total

    after, total = jax.lax.scan(one, _before(state[INPUTS], batch), (x, batch.seq_ids))
    return _with_bias(total, bias, x.dtype), _put(state, batch, after)


def _with_bias(total: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    return (total if bias is None else total + bias.astype(jnp.float32)).astype(dtype)


def _before(inputs: jax.Array, batch: AttnBatch) -> jax.Array:
    """Return the inputs before the step [rows, taps - 1, channels]; zeros for new rows."""
    begins = batch.kv_lens <= batch.q_lens
    return jnp.where(begins[:, None, None], 0, inputs[batch.page_table[:, 0]])


def _put(state: CacheArrays, batch: AttnBatch, rows: jax.Array) -> dict[str, jax.Array]:
    """Return the state with new values at the places of the rows; padding has no place."""
    inputs = state[INPUTS]
    places = jnp.where(batch.kv_lens > 0, batch.page_table[:, 0], inputs.shape[0])
    return {INPUTS: inputs.at[places].set(rows.astype(inputs.dtype), mode="drop")}
