"""The op ssd_scan in plain JAX: other orders of the same products and sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheArrays
from enginebay.ops.spec import AttnBatch

HIGHEST = jax.lax.Precision.HIGHEST


class Given(NamedTuple):
    """Of each head, f32: dt * x [T, H, P], the logs of the decays [T, H], b and c [T, H, N], states
    before the step [S, H, P, N]; the row of each token [T], S on padding.
    """

    inputs: jax.Array
    logs: jax.Array
    b: jax.Array
    c: jax.Array
    before: jax.Array
    row: jax.Array
    batch: AttnBatch


ScanWay = Callable[[Given], tuple[jax.Array, jax.Array]]
"""Returns outputs f32 [T, H, P], those of padding unspecified, and states after the step."""


def _outer(given: Given) -> jax.Array:
    """What each token adds to its state [T, H, P, N]."""
    return given.inputs[..., None] * given.b[:, :, None]


def _through(state: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.einsum("...hpn,...hn->...hp", state, c, precision=HIGHEST)


def by_prefixes(given: Given) -> tuple[jax.Array, jax.Array]:
    """An associative scan over all tokens, where a row's first token takes the row's state."""
    row = jnp.minimum(given.row, len(given.before) - 1)
    first = jnp.arange(len(row)) == given.batch.cu_q_lens[row]
    real = given.row < len(given.before)
    fade, added = jnp.exp(given.logs)[..., None, None], _outer(given)
    added = jnp.where(first[:, None, None, None], fade * given.before[row] + added, added)
    fade = jnp.where((first | ~real)[:, None, None, None], 0, fade)
    added = jnp.where(real[:, None, None, None], added, 0)

    def join(one: Any, two: Any) -> tuple[jax.Array, jax.Array]:
        # A row that begins keeps nothing, not even an infinity.
        return two[0] * one[0], jnp.where(two[0] == 0, 0, two[0] * one[1]) + two[1]

    states = jax.lax.associative_scan(join, (fade, added))[1]
    last = states[jnp.maximum(given.batch.cu_q_lens[1:] - 1, 0)]
    return _through(states, given.c), last


def by_rows(given: Given) -> tuple[jax.Array, jax.Array]:
    """Rows in turn, each one token after the other."""
    count, starts = given.batch.bucket.max_q_len, given.batch.cu_q_lens
    added, fade = _outer(given), jnp.exp(given.logs)[..., None, None]

    def one(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        def token(state: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
            at = jnp.minimum(starts[row] + place, len(added) - 1)
            after = jnp.where(
                place < starts[row + 1] - starts[row], fade[at] * state + added[at], state
            )
            return after, _through(after, given.c[at])

        return jax.lax.scan(token, given.before[row], jnp.arange(count))

    after, found = jax.lax.map(one, jnp.arange(len(given.before)))
    row = jnp.minimum(given.row, len(given.before) - 1)
    place = jnp.clip(jnp.arange(len(added)) - starts[row], 0, count - 1)
    return found[row, place], after


def by_pairs(given: Given) -> tuple[jax.Array, jax.Array]:
    """Every pair of a row's tokens at once, as attention is computed."""
    count, starts = given.batch.bucket.max_q_len, given.batch.cu_q_lens
    at = jnp.arange(count)
    before_it = (at[:, None] > at)[..., None]

    def one(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside = at < starts[row + 1] - starts[row]
        mine = jnp.minimum(starts[row] + at, len(given.row) - 1)
        shape = (count, 1, 1)
        inputs, b, c = (
            jnp.where(inside.reshape(shape), array[mine], 0)
            for array in (given.inputs, given.b, given.c)
        )
        logs = jnp.where(inside[:, None], given.logs[mine], 0)
        faded = jnp.cumsum(jnp.where(before_it, logs[:, None], 0), axis=0)
        shares = jnp.exp(jnp.where((at[:, None] >= at)[..., None], faded, -jnp.inf))
        scores = jnp.einsum("ihn,jhn->ijh", c, b, precision=HIGHEST) * shares
        mixed = jnp.einsum("ijh,jhp->ihp", scores, inputs, precision=HIGHEST)
        since = jnp.exp(jnp.cumsum(logs, axis=0))
        mixed += since[..., None] * _through(given.before[row][None], c)
        left = shares[-1][..., None] * inputs
        added = jnp.einsum("jhp,jhn->hpn", left, b, precision=HIGHEST)
        return mixed, since[-1][..., None, None] * given.before[row] + added

    found, after = jax.lax.map(one, jnp.arange(len(given.before)))
    row = jnp.minimum(given.row, len(given.before) - 1)
    place = jnp.clip(jnp.arange(len(given.row)) - starts[row], 0, count - 1)
    return found[row, place], after


def by_heads(given: Given) -> tuple[jax.Array, jax.Array]:
    """Heads in turn, by rows."""

    def one(head: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = (array[:, head][:, None] for array in given[:5])
        out, after = by_rows(Given(*own, *given[5:]))
        return out[:, 0], after[:, 0]

    out, after = jax.lax.map(one, jnp.arange(given.inputs.shape[1]))
    return out.swapaxes(0, 1), after.swapaxes(0, 1)


def by_features(given: Given) -> tuple[jax.Array, jax.Array]:
    """Features of the heads in turn, by rows."""

    def one(feature: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = given.inputs[:, :, feature][..., None]
        before = given.before[:, :, feature][:, :, None]
        out, after = by_rows(given._replace(inputs=inputs, before=before))
        return out[..., 0], after[:, :, 0]

    out, after = jax.lax.map(one, jnp.arange(given.inputs.shape[2]))
    return jnp.moveaxis(out, 0, -1), jnp.moveaxis(after, 0, 2)


def on_host(given: Given) -> tuple[jax.Array, jax.Array]:
    """NumPy's loop over tokens, in double precision."""

    def loop(*arrays: Any) -> tuple[np.ndarray, np.ndarray]:
        *wide, row = map(np.asarray, arrays)
        inputs, logs, b, c, after = (array.astype(np.float64) for array in wide)
        out = np.zeros(inputs.shape)
        for token in np.flatnonzero(row < len(after)):
            state = after[row[token]] * np.exp(logs[token])[:, None, None]
            state = state + inputs[token][..., None] * b[token][:, None]
            after[row[token]] = state
            out[token] = (state * c[token][:, None]).sum(axis=-1)
        return out.astype(np.float32), after.astype(np.float32)

    shapes = tuple(
        jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (given.inputs, given.before)
    )
    found: tuple[jax.Array, jax.Array] = jax.pure_callback(loop, shapes, *given[:6])
    return found


@dataclasses.dataclass(frozen=True)
class SsdScan:
    """See the module."""

    way: ScanWay

    def __call__(
        self,
        x: jax.Array,
        dt: jax.Array,
        decay: jax.Array,
        b: jax.Array,
        c: jax.Array,
        skip: jax.Array | None,
        state: CacheArrays,
        batch: AttnBatch,
    ) -> tuple[jax.Array, CacheArrays]:
        wide, places = x.astype(jnp.float32), batch.page_table[:, 0]
        each = x.shape[1] // b.shape[1]
        b, c = (jnp.repeat(array.astype(jnp.float32), each, axis=1) for array in (b, c))
        begins = (batch.kv_lens <= batch.q_lens)[:, None, None, None]
        before = jnp.where(begins, 0, state["scan"][places])
        real = (batch.seq_ids < batch.bucket.seqs)[:, None, None]
        inputs = jnp.where(real, dt[..., None] * wide, 0)
        given = Given(inputs, dt * decay, b, c, before, batch.seq_ids, batch)
        out, after = self.way(given)
        if skip is not None:
            out += skip.astype(jnp.float32)[:, None] * wide
        places = jnp.where(batch.kv_lens > 0, places, len(state["scan"]))
        return out.astype(x.dtype), {"scan": state["scan"].at[places].set(after, mode="drop")}


prefixes = SsdScan(by_prefixes)
rows = SsdScan(by_rows)
pairs = SsdScan(by_pairs)
heads = SsdScan(by_heads)
features = SsdScan(by_features)
host = SsdScan(on_host)
