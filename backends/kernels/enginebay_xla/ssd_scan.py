"""The op ssd_scan in plain JAX: rows of one token in one step, longer ones in chunks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays
from enginebay.ops.spec import AttnBatch

SCAN = "scan"
"""Name of the array of the state."""

CHUNK = 64
"""Tokens of a row that are computed together. The work of a token grows with it, and the number of
dependent steps shrinks.
"""
_EXACT = jax.lax.Precision.HIGHEST


def ssd_scan(
    x: jax.Array,
    dt: jax.Array,
    decay: jax.Array,
    b: jax.Array,
    c: jax.Array,
    skip: jax.Array | None,
    state: CacheArrays,
    batch: AttnBatch,
) -> tuple[jax.Array, CacheArrays]:
    """Return (out [T, heads, head_dim], state after the tokens); SsdScanOp describes it."""
    wide = dt.astype(jnp.float32)
    tokens = (x, wide, wide * decay.astype(jnp.float32), b, c)
    out, rows = jnp.zeros(x.shape, jnp.float32), _before(state[SCAN], batch)
    if batch.bucket.mode != "prefill":
        out, rows = _single_tokens(tokens, out, rows, batch)
    if batch.bucket.mode != "decode":
        out, rows = _chunks(tokens, out, rows, batch)
    return _with_skip(out, x, skip), _put(state, batch, rows)


def ssd_scan_reference(
    x: jax.Array,
    dt: jax.Array,
    decay: jax.Array,
    b: jax.Array,
    c: jax.Array,
    skip: jax.Array | None,
    state: CacheArrays,
    batch: AttnBatch,
) -> tuple[jax.Array, CacheArrays]:
    """Compute one token after the other; a slow reference."""
    num_rows, decay = batch.kv_lens.shape[0], decay.astype(jnp.float32)

    def one(rows: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c, seq = given
        after, out = _step((x, dt, dt * decay, b, c), rows[jnp.minimum(seq, num_rows - 1)])
        return rows.at[seq].set(after, mode="drop"), out

    given = (x, dt.astype(jnp.float32), b, c, batch.seq_ids)
    after, out = jax.lax.scan(one, _before(state[SCAN], batch), given)
    return _with_skip(out, x, skip), _put(state, batch, after)


def _before(scan: jax.Array, batch: AttnBatch) -> jax.Array:
    """Return the states before the step f32 [rows, heads, head_dim, state_size]; zeros for new
    rows.
    """
    begins = batch.kv_lens <= batch.q_lens
    held = scan[batch.page_table[:, 0]].astype(jnp.float32)
    return jnp.where(begins[:, None, None, None], 0, held)


def _put(state: CacheArrays, batch: AttnBatch, rows: jax.Array) -> dict[str, jax.Array]:
    """Return the state with new values at the places of the rows; padding has no place."""
    scan = state[SCAN]
    places = jnp.where(batch.kv_lens > 0, batch.page_table[:, 0], scan.shape[0])
    return {SCAN: scan.at[places].set(rows.astype(scan.dtype), mode="drop")}


def _with_skip(out: jax.Array, x: jax.Array, skip: jax.Array | None) -> jax.Array:
    if skip is not None:
        out = out + skip.astype(jnp.float32)[:, None] * x.astype(jnp.float32)
    return out.astype(x.dtype)


def _of_heads(of_groups: jax.Array, heads: int) -> jax.Array:
    """Repeat [..., groups, n] to [..., heads, n] in f32."""
    return jnp.repeat(of_groups.astype(jnp.float32), heads // of_groups.shape[-2], axis=-2)


def _step(token: Any, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (state, out) after one token, for a state f32 [..., heads, head_dim, state_size].

    `token` is x [..., heads, head_dim], dt and dt * decay [..., heads], b and c [..., groups,
    state_size].
    """
    x, dt, last, b, c = token
    heads = x.shape[-2]
    added = (dt[..., None] * x.astype(jnp.float32))[..., None] * _of_heads(b, heads)[..., None, :]
    after = jnp.exp(last)[..., None, None] * before + added
    return after, (after * _of_heads(c, heads)[..., None, :]).sum(axis=-1)


def _single_tokens(
    tokens: Any, out: jax.Array, rows: jax.Array, batch: AttnBatch
) -> tuple[jax.Array, jax.Array]:
    """Compute the rows that have one new token, all at once."""
    if batch.bucket.mode == "decode":
        rows, out = _step(tokens, rows)
        return out, rows
    first, chosen = batch.cu_q_lens[:-1], batch.q_lens == 1
    some = [array[jnp.minimum(first, out.shape[0] - 1)] for array in tokens]
    after, new = _step(some, rows)
    out = out.at[jnp.where(chosen, first, out.shape[0])].set(new, mode="drop")
    return out, jnp.where(chosen[:, None, None, None], after, rows)


def _chunks(
    tokens: Any, out: jax.Array, rows: jax.Array, batch: AttnBatch
) -> tuple[jax.Array, jax.Array]:
    """Compute the other rows in turn, chunk by chunk."""
    size = min(CHUNK, out.shape[0])
    least = 0 if batch.bucket.mode == "prefill" else 1
    lengths = jnp.where(batch.q_lens > least, batch.q_lens, 0)

    def row(out: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
        before, begin, length = given

        def chunk(number: jax.Array, held: tuple[jax.Array, jax.Array]) -> Any:
            out, state = held
            # A slice that would reach past the last token begins earlier, and is turned.
            start = begin + number * size
            first = jnp.minimum(start, out.shape[0] - size)
            shift = start - first
            inside = jnp.arange(size) < length - number * size

            def part(array: jax.Array) -> jax.Array:
                found = jnp.roll(jax.lax.dynamic_slice_in_dim(array, first, size), -shift, axis=0)
                return jnp.where(inside.reshape(-1, *(1,) * (array.ndim - 1)), found, 0)

            state, new = _chunk([part(array) for array in tokens], state)
            old = jax.lax.dynamic_slice_in_dim(out, first, size)
            mine = jnp.roll(inside, shift)[:, None, None]
            new = jnp.where(mine, jnp.roll(new, shift, axis=0), old)
            return jax.lax.dynamic_update_slice_in_dim(out, new, first, axis=0), state

        return jax.lax.fori_loop(0, -(-length // size), chunk, (out, before))

    return jax.lax.scan(row, out, (rows, batch.cu_q_lens[:-1], lengths))


def _chunk(tokens: Any, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (state, out f32 [tokens, heads, head_dim]) after a chunk of one row, for a state f32
    [heads, head_dim, state_size]. Tokens whose inputs are 0 change nothing.

    The state is never computed between: it is a product of masked decays and inputs, as attention.
    """
    x, dt, lasts, b, c = tokens
    size, heads, head_dim = x.shape
    groups, state_size = b.shape[1:]
    b, c = (array.astype(jnp.float32) for array in (b, c))
    inputs = (dt[..., None] * x.astype(jnp.float32)).reshape(size, groups, -1, head_dim)
    # faded[h, i, j] is the log of what the input of token j has faded to at token i. It is summed
    # for each j alone: differences of one running sum would lose digits behind a large dt.
    upto, before_it = jnp.tri(size), jnp.tri(size, k=-1, dtype=bool)
    later = jnp.where(before_it[:, :, None], lasts[:, None], 0)
    faded = jnp.einsum("ik,kjh->hij", upto, later, precision=_EXACT)
    shares = jnp.exp(jnp.where(upto > 0, faded, -jnp.inf)).reshape(groups, -1, size, size)
    since = jnp.exp(jnp.cumsum(lasts, axis=0)).reshape(size, groups, -1)
    scores = jnp.einsum("ign,jgn->gij", c, b, precision=_EXACT)
    weights = scores[:, None] * shares
    mixed = jnp.einsum("ghij,jghp->ighp", weights, inputs, precision=_EXACT)
    before = before.reshape(groups, -1, head_dim, state_size)
    kept = jnp.einsum("ign,ghpn->ighp", c, before, precision=_EXACT) * since[..., None]
    ends = inputs * shares[:, :, -1].transpose(2, 0, 1)[..., None]
    added = jnp.einsum("jghp,jgn->ghpn", ends, b, precision=_EXACT)
    after = since[-1][..., None, None] * before + added
    return after.reshape(heads, head_dim, state_size), (mixed + kept).reshape(x.shape)
