"""The op short_conv in plain JAX: many ways to sum the last inputs of a row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheArrays
from enginebay.ops.spec import AttnBatch


class Given(NamedTuple):
    """Inputs f32 [T, C], weight f32 [C, taps], inputs before the step f32 [S, taps - 1, C]; each
    token's row [T], within the rows, and its place among the row's new tokens [T].
    """

    x: jax.Array
    weight: jax.Array
    before: jax.Array
    row: jax.Array
    place: jax.Array
    batch: AttnBatch


ConvWay = Callable[[Given], jax.Array]
"""Returns the sums f32 [T, C]; those of padding are unspecified."""


def by_windows(given: Given) -> jax.Array:
    """The window of each token, gathered from new and old inputs in one array."""
    x, weight, before, row, place, _ = given
    kept, tokens = before.shape[1], x.shape[0]
    both = jnp.concatenate([x, before.reshape(-1, x.shape[1])])
    back = jnp.arange(kept, -1, -1)
    new = jnp.arange(tokens)[:, None] - back
    old = tokens + row[:, None] * kept + kept + place[:, None] - back
    window = both[jnp.where(place[:, None] >= back, new, old)]
    return (window * weight.T).sum(axis=1)


def by_product(given: Given) -> jax.Array:
    """As by_windows, with the sum over taps as a product, and the oldest tap last."""
    kept = given.before.shape[1]
    x, weight, before, row, place, _ = given
    windows = []
    for back in range(kept + 1):
        new = x[jnp.maximum(jnp.arange(len(x)) - back, 0)]
        if back:
            old = before[row, jnp.clip(kept + place - back, 0, kept - 1)]
            new = jnp.where((place >= back)[:, None], new, old)
        windows.append(new)
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("btc,cb->tc", jnp.stack(windows), weight[:, ::-1], precision=highest)


def by_tokens(given: Given) -> jax.Array:
    """One token after the other, with the last inputs of all rows at hand."""

    def one(
        rows: jax.Array, token: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        x, row, real = token
        window = jnp.concatenate([rows[row], x[None]])
        rows = jnp.where(real, rows.at[row].set(window[1:]), rows)
        return rows, (window * given.weight.T).sum(axis=0)

    real = given.batch.seq_ids < given.batch.bucket.seqs
    return jax.lax.scan(one, given.before, (given.x, given.row, real))[1]


def _each_row(given: Given, convolve: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Rows in turn: `convolve` maps old and new inputs [taps - 1 + n, C] to sums [n, C]."""
    count = given.batch.bucket.max_q_len

    def one(row: jax.Array) -> jax.Array:
        mine = given.batch.cu_q_lens[row] + jnp.arange(count)
        inside = mine < given.batch.cu_q_lens[row + 1]
        new = jnp.where(inside[:, None], given.x[jnp.minimum(mine, len(given.x) - 1)], 0)
        return convolve(jnp.concatenate([given.before[row], new]))

    found = jax.lax.map(one, jnp.arange(given.batch.bucket.seqs))
    return found[given.row, jnp.clip(given.place, 0, count - 1)]


def by_convolution(given: Given) -> jax.Array:
    """JAX's convolution of each row, with a group for each channel."""
    channels = given.x.shape[1]

    def convolve(inputs: jax.Array) -> jax.Array:
        found = jax.lax.conv_general_dilated(
            inputs.T[None],
            given.weight[:, None],
            (1,),
            "VALID",
            dimension_numbers=("NCH", "OIH", "NCH"),
            feature_group_count=channels,
            precision=jax.lax.Precision.HIGHEST,
        )
        return found[0].T

    return _each_row(given, convolve)


def by_shifts(given: Given, *, oldest_first: bool) -> jax.Array:
    """Shifted copies of each row, each times its tap."""
    taps = given.weight.shape[1]

    def convolve(inputs: jax.Array) -> jax.Array:
        count = len(inputs) - taps + 1
        total = jnp.zeros((count, inputs.shape[1]), jnp.float32)
        for tap in range(taps) if oldest_first else reversed(range(taps)):
            total = total + inputs[tap : tap + count] * given.weight[:, tap]
        return total

    return _each_row(given, convolve)


def by_scatter(given: Given) -> jax.Array:
    """Each input is added to the sums of the tokens that see it."""
    x, weight, before, row, place, batch = given
    tokens, kept = len(x), before.shape[1]
    total = jnp.zeros(x.shape, jnp.float32)
    real = batch.seq_ids < batch.bucket.seqs
    for ahead in range(kept + 1):
        target = jnp.arange(tokens) + ahead
        mine = row[jnp.minimum(target, tokens - 1)] == row
        both = real & real[jnp.minimum(target, tokens - 1)]
        target = jnp.where(mine & both & (target < tokens), target, tokens)
        total = total.at[target].add(x * weight[:, kept - ahead], mode="drop")
    for old in range(kept):
        # Of a row's first tokens, that at `place` sees old input `old` at tap `old - place`.
        for first in range(old + 1):
            is_it = (place == first)[:, None] & real[:, None]
            total = total + jnp.where(is_it, before[row, old] * weight[:, old - first], 0)
    return total


def in_blocks_of_channels(given: Given, *, size: int) -> jax.Array:
    """So many channels at a time, by windows."""
    channels = given.x.shape[1]
    starts = range(0, channels, size)
    parts = [
        by_windows(
            given._replace(
                x=given.x[:, start : start + size],
                weight=given.weight[start : start + size],
                before=given.before[:, :, start : start + size],
            )
        )
        for start in starts
    ]
    return jnp.concatenate(parts, axis=1)


def on_host(given: Given) -> jax.Array:
    """NumPy's loop over tokens."""

    def loop(
        x: np.ndarray, weight: np.ndarray, before: np.ndarray, row: np.ndarray, place: np.ndarray
    ) -> np.ndarray:
        x, weight, before, row, place = map(np.asarray, (x, weight, before, row, place))
        kept, out = before.shape[1], np.zeros_like(x)
        for token in range(len(x)):
            first = max(place[token], 0)
            new = x[max(token - min(first, kept), 0) : token + 1]
            old = before[row[token]][kept - (kept + 1 - len(new)) :] if len(new) <= kept else None
            window = new if old is None else np.concatenate([old, new])
            out[token] = (window * weight.T).sum(axis=0, dtype=np.float32)
        return out

    shape = jax.ShapeDtypeStruct(given.x.shape, jnp.float32)
    found: jax.Array = jax.pure_callback(loop, shape, *given[:5])
    return found


@dataclasses.dataclass(frozen=True)
class ShortConv:
    """See the module. `after`: the new state from windows of the whole row, or token by token."""

    way: ConvWay
    after_by_tokens: bool = False

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        state: CacheArrays,
        batch: AttnBatch,
    ) -> tuple[jax.Array, CacheArrays]:
        inputs = state["inputs"]
        begins = (batch.kv_lens <= batch.q_lens)[:, None, None]
        before = jnp.where(begins, 0, inputs[batch.page_table[:, 0]])
        row = jnp.minimum(batch.seq_ids, batch.bucket.seqs - 1)
        place = jnp.arange(len(x)) - batch.cu_q_lens[row]
        wide, taps, old = (each.astype(jnp.float32) for each in (x, weight, before))
        total = self.way(Given(wide, taps, old, row, place, batch))
        if bias is not None:
            total = total + bias.astype(jnp.float32)
        after = self._after(x, before, row, batch)
        places = jnp.where(batch.kv_lens > 0, batch.page_table[:, 0], inputs.shape[0])
        new = inputs.at[places].set(after.astype(inputs.dtype), mode="drop")
        return total.astype(x.dtype), {"inputs": new}

    def _after(
        self, x: jax.Array, before: jax.Array, row: jax.Array, batch: AttnBatch
    ) -> jax.Array:
        """The last inputs of each row [S, taps - 1, C]."""
        if self.after_by_tokens:

            def one(rows: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                new, row = token
                old = rows[jnp.minimum(row, len(rows) - 1)]
                moved = jnp.concatenate([old[1:], new[None].astype(rows.dtype)])
                moved = moved if rows.shape[1] else old
                return rows.at[row].set(moved, mode="drop"), None

            return jax.lax.scan(one, before, (x, batch.seq_ids))[0]
        kept = before.shape[1]
        if not kept:
            return before
        count = batch.bucket.seqs
        both = jnp.concatenate([before.reshape(count * kept, -1), x.astype(before.dtype)])
        place = batch.q_lens[:, None] - kept + jnp.arange(kept)
        old = jnp.arange(count)[:, None] * kept + kept + place
        new = count * kept + batch.cu_q_lens[:-1, None] + place
        return both[jnp.where(place < 0, old, new)]


windows = ShortConv(by_windows)
product = ShortConv(by_product, after_by_tokens=True)
tokens = ShortConv(by_tokens)
convolution = ShortConv(by_convolution)
oldest_first = ShortConv(functools.partial(by_shifts, oldest_first=True), after_by_tokens=True)
newest_first = ShortConv(functools.partial(by_shifts, oldest_first=False))
scattered = ShortConv(by_scatter)
seven_channels = ShortConv(functools.partial(in_blocks_of_channels, size=7), after_by_tokens=True)
host = ShortConv(on_host)
