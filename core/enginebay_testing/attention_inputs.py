"""The arrays of attention problems: random keys and values, with poison in unused places."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.head_inputs import draw_inputs
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_testing.attention_cases import AttentionCase, TracedCase
from enginebay_testing.attention_numbers import (
    common_parts,
    random_keys,
    random_queries,
    random_values,
)
from enginebay_testing.case_runs import kit_jit


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The arrays of a case. `keys[i]` and `values[i]` [kv_len, Hkv, D] are the whole context of row
    i as the cache stores it: in the cache's dtype, or in f32 with what a quantised cache loses.

    q, k and v are packed, with poison on padding. `cache` holds all keys and values before this
    step; `slots` are the places of the new ones.
    """

    case: AttentionCase
    layout: KVLayout
    q: jax.Array
    k: jax.Array
    v: jax.Array
    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    cache: CacheArrays
    batch: AttnBatch
    inputs: dict[str, jax.Array]
    """The inputs that the spec names."""
    token_rows: np.ndarray
    """int [T], the row of each packed token; -1 on padding."""

    def written(self) -> dict[str, jax.Array]:
        """Return the cache as the layout writes the new tokens into it."""
        if self.case.spec.kv_shared:
            return dict(self.cache)
        new = (np.asarray(array) for array in (self.batch.slots, self.k, self.v))
        cache: Any = {name: np.asarray(array) for name, array in self.cache.items()}
        return write_places(self.layout, cache, *new)


def make_problem(
    case: AttentionCase, layout_type: type[KVLayout], *, seed: int = 0, empty: bool = False
) -> AttentionInputs:
    """Make random arrays for a case; rows and page tables depend only on its name and `seed`.

    An empty step has the static shapes and the cache of the case, but no active row.
    """
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    spec, bucket, layout = case.spec, case.bucket, case.layout(layout_type)
    dtype = jnp.dtype(spec.kv_dtype)
    shape = (spec.num_kv_heads, spec.head_dim)
    parts = common_parts(case.spec, case.scores, rng)
    keys = random_keys(case.spec, case.scores, case.kv_lens, rng, parts)
    values = tuple(_random_values(case, (n, *shape), rng).astype(dtype) for n in case.kv_lens)
    if spec.v_is_k_prefix:
        values = tuple(each[..., : spec.v_dim] for each in keys)
    table, q_lens, kv_lens = _tables(case, layout, rng)
    if case.shares_pages:
        _share_pages(case, layout, table, keys, values)
    token_rows = _token_rows(case)
    slots = [
        table[i, np.arange(total) // layout.page_size] * layout.page_size
        + np.arange(total) % layout.page_size
        for i, total in enumerate(case.kv_lens)
    ]
    if isinstance(case, TracedCase):
        share_slots(slots, visible_from(spec, case.q_lens, case.kv_lens), keys, values)
    places = _places(case, layout, slots, keys, values)
    given = keys, values
    if layout.tolerance and not empty:
        keys, values = _kept(case, layout, slots, keys, values)
    if empty:
        q_lens, kv_lens, token_rows = (
            np.zeros_like(q_lens),
            np.zeros_like(kv_lens),
            np.full_like(token_rows, -1),
        )
        keys = values = ()
    q = _poisoned(case, (bucket.tokens, spec.num_q_heads, spec.head_dim), spec.q_dtype)
    k, v = _poisoned(case, (2, bucket.tokens, *shape), spec.kv_dtype)
    v = v[..., : spec.v_dim]
    for i, (new, total) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        mine = token_rows == i
        if empty or not total:
            continue
        q[mine] = random_queries(spec, case.scores, new, rng, parts)
        k[mine], v[mine] = (rows[i][total - new :] for rows in given)
    cache = write_places(layout, _empty(layout), np.arange(len(places[0]), dtype=np.int32), *places)
    batch = packed_batch(bucket, layout.page_size, q_lens, kv_lens, table)
    inputs = draw_inputs(spec.inputs, spec.num_q_heads, rng)
    arrays: dict[str, Any] = jax.device_put(
        {"q": q, "k": k, "v": v, "inputs": inputs, "batch": batch}
    )
    arrays |= {"cache": cache, "token_rows": token_rows}
    return AttentionInputs(case, layout, keys=keys, values=values, **arrays)


def _random_values(
    case: AttentionCase, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    if case.constant_v:
        return np.ones(shape)
    return random_values(case.values, case.spec.kv_dtype, shape, rng)


def _poisoned(case: AttentionCase, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array full of poison: the case's value, or the largest number of the dtype."""
    largest = float(jnp.finfo(dtype).max)
    return np.full(
        shape, case.poison if np.isnan(case.poison) else min(case.poison, largest), jnp.dtype(dtype)
    )


def _tables(
    case: AttentionCase, layout: KVLayout, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (page_table [S, P] with 0 where unused, q_lens [S], kv_lens [S])."""
    bucket = case.bucket
    table = np.zeros((bucket.seqs, bucket.pages_per_seq), np.int32)
    if isinstance(case, TracedCase):
        lens = np.zeros((2, bucket.seqs), np.int32)
        lens[:, : len(case.q_lens)] = case.q_lens, case.kv_lens
        return np.array(case.table, np.int32), lens[0], lens[1]
    pages = rng.permutation(layout.num_pages).astype(np.int32)
    lens = np.zeros((2, bucket.seqs), np.int32)
    for i, (new, total) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        used = -(-total // layout.page_size)
        mine, pages = pages[:used], pages[used:]
        table[i, :used] = i if case.rows_are_pages else mine
        lens[:, i] = new, total
    if case.rows_are_pages:
        table[:, 0] = np.arange(bucket.seqs)
    return table, lens[0], lens[1]


def _share_pages(
    case: AttentionCase,
    layout: KVLayout,
    table: np.ndarray,
    keys: tuple[np.ndarray, ...],
    values: tuple[np.ndarray, ...],
) -> None:
    """Let every row begin with the full pages of the longest prefix; arrays are read-only."""
    prefixes = [total - new for new, total in zip(case.q_lens, case.kv_lens, strict=True)]
    source = int(np.argmax(prefixes))
    for row, prefix in enumerate(prefixes):
        num = min(prefix, prefixes[source]) // layout.page_size
        tokens = num * layout.page_size
        table[row, :num] = table[source, :num]
        keys[row][:tokens], values[row][:tokens] = keys[source][:tokens], values[source][:tokens]


def visible_from(spec: AttnSpec, q_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[int, ...]:
    """Return the first position of each row that a new token sees."""
    if spec.window is None:
        return (0,) * len(kv_lens)
    window = spec.window
    return tuple(max(0, n - q - window + 1) for q, n in zip(q_lens, kv_lens, strict=True))


def share_slots(
    slots: Sequence[np.ndarray], first: Sequence[int], *arrays: Sequence[np.ndarray]
) -> None:
    """Give positions that lie in the same slot of the cache the same numbers: those of the first
    row that sees the slot. Row i sees its positions from first[i] on. `arrays` are the keys or
    values of each row, which are changed in place.
    """
    flat = np.concatenate([np.asarray(each) for each in slots])
    seen = np.concatenate(
        [np.arange(len(s)) >= start for s, start in zip(slots, first, strict=True)]
    )
    order = np.concatenate([np.flatnonzero(seen), np.flatnonzero(~seen)])
    _, index, inverse = np.unique(flat[order], return_index=True, return_inverse=True)
    owner = np.empty(len(flat), int)
    owner[order] = order[index[inverse]]
    ends = np.cumsum([len(each) for each in slots])[:-1]
    for rows in arrays:
        packed = np.concatenate(rows)[owner]
        for row, shared in zip(rows, np.split(packed, ends), strict=True):
            row[:] = shared


def _token_rows(case: AttentionCase) -> np.ndarray:
    bucket = case.bucket
    if case.mode == "decode":
        live = [i if n else -1 for i, n in enumerate(case.kv_lens)]
    else:
        live = list(np.repeat(np.arange(len(case.q_lens)), case.q_lens))
    return np.array(live + [-1] * (bucket.tokens - len(live)))


def packed_batch(
    bucket: Bucket, page_size: int, q_lens: np.ndarray, kv_lens: np.ndarray, table: np.ndarray
) -> AttnBatch:
    """Return the same as `derive_batch`, without a program for each bucket: int32 NumPy arrays."""
    rows, decode = np.arange(bucket.seqs), bucket.mode == "decode"
    counts = (kv_lens > 0).astype(int) if decode else q_lens
    starts = rows if decode else np.cumsum(q_lens) - q_lens
    ends = np.arange(1, bucket.seqs + 1) if decode else np.cumsum(q_lens)
    row = np.repeat(rows, counts)
    token = np.concatenate([s + np.arange(n) for s, n in zip(starts, counts, strict=True)])
    place = kv_lens[row] - counts[row] + token - starts[row]
    positions, slots = np.zeros(bucket.tokens, np.int32), np.full(bucket.tokens, -1, np.int32)
    seq_ids = np.full(bucket.tokens, bucket.seqs, np.int32)
    positions[token], seq_ids[token] = place, row
    slots[token] = table[row, place // page_size] * page_size + place % page_size
    num_decode = int(((q_lens == 1) & (kv_lens > 1)).sum())
    num_fresh = int(((q_lens > 0) & (q_lens == kv_lens)).sum())
    distribution = [num_decode, num_decode + num_fresh, int((q_lens > 0).sum())]
    arrays: dict[str, Any] = {
        "positions": positions,
        "cu_q_lens": np.concatenate([[0], ends]).astype(np.int32),
        "kv_lens": kv_lens,
        "page_table": table,
        "slots": slots,
        "seq_ids": seq_ids,
        "distribution": np.array([bucket.seqs] * 3 if decode else distribution, np.int32),
    }
    return AttnBatch(**arrays, bucket=bucket)


def _write(layout: KVLayout, cache: Any, slots: Any, k: Any, v: Any) -> Any:
    return layout.write(cache, slots, k, v)


_written = kit_jit(_write, static_argnums=(0,), donate_argnums=(1,))


def _empty(layout: KVLayout) -> dict[str, np.ndarray]:
    """Return arrays of zeros for a cache in which every place is written next."""
    return {name: np.zeros(s.shape, s.dtype) for name, s in layout.shapes().items()}


def write_places(
    layout: KVLayout, cache: Any, slots: np.ndarray, k: np.ndarray, v: np.ndarray
) -> dict[str, jax.Array]:
    """Return the cache with k and v written at `slots`. All calls for a layout share a program,
    because tokens that are not written pad them to the number of slots.
    """
    missing = max(0, layout.num_pages * layout.page_size - len(slots))
    places = np.concatenate([slots, np.full(missing, -1, np.int32)]).astype(np.int32)
    k, v = (np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) for x in (k, v))
    return dict(_written(layout, cache, places, k, v))


def contents(layout: KVLayout, cache: CacheArrays) -> tuple[jax.Array, jax.Array]:
    """Return k and v of every slot as the layout reads them: [slots, kv_heads, head_dim] each."""
    k, v = layout.read(cache, jnp.arange(layout.num_pages))
    shape = (layout.num_pages * layout.page_size, layout.num_kv_heads)
    return k.reshape(*shape, k.shape[-1]), v.reshape(*shape, v.shape[-1])


read_contents = kit_jit(contents, static_argnums=(0,))


def _read_exact(layout: KVLayout, cache: CacheArrays) -> tuple[jax.Array, jax.Array]:
    places = jnp.arange(layout.num_pages * layout.page_size, dtype=jnp.int32)
    return layout.read_exact(cache, places)


_exact = kit_jit(_read_exact, static_argnums=(0,))


def _kept(
    case: AttentionCase,
    layout: KVLayout,
    slots: list[np.ndarray],
    keys: tuple[np.ndarray, ...],
    values: tuple[np.ndarray, ...],
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Return f32 keys and values of all rows as the layout stores them: what the layout loses is
    not the error of a kernel that reads it.
    """
    places = _places(case, layout, slots, keys, values, with_new=True)
    everywhere = np.arange(len(places[0]), dtype=np.int32)
    read = _exact(layout, write_places(layout, _empty(layout), everywhere, *places))
    k, v = (np.asarray(each) for each in read)
    return tuple(k[mine] for mine in slots), tuple(v[mine] for mine in slots)


def _places(
    case: AttentionCase,
    layout: KVLayout,
    slots: list[np.ndarray],
    keys: tuple[np.ndarray, ...],
    values: tuple[np.ndarray, ...],
    *,
    with_new: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return k, v of every slot: poison except at earlier tokens, or at all tokens in a layer that
    reads the cache of another, and `with_new`.
    """
    shape = (layout.num_pages * layout.page_size, layout.num_kv_heads, layout.head_dim)
    k, v = _poisoned(case, (2, *shape), layout.dtype)
    v = v[..., : case.spec.v_dim]
    for i, (new, total) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        count = total if with_new or case.spec.kv_shared else total - new
        k[slots[i][:count]], v[slots[i][:count]] = keys[i][:count], values[i][:count]
    return k, v


MIN_COMPARED, MAX_COMPARED, MAX_SCORES = 32, 96, 400_000
"""Max compared tokens of a row, between the first two numbers, and of their scores: float64
arithmetic for more would take too long.
"""


def compared_tokens(mine: np.ndarray, num_scores: int) -> np.ndarray:
    """Return all tokens of a short row `mine` bool [T]; of a long row, every 16th and the last.
    `num_scores`: scores of one token, for all heads.
    """
    tokens = np.flatnonzero(mine)
    most = max(MIN_COMPARED, min(MAX_COMPARED, MAX_SCORES // max(1, num_scores)))
    if tokens.size <= most:
        return tokens
    step = 16 * -(-tokens.size * 3 // (16 * (most - 16)))
    chosen = (np.arange(0, tokens.size, step)[:, None] + np.array([-1, 0, 1])).ravel()
    ends = np.concatenate([np.arange(4), np.arange(tokens.size - 12, tokens.size)])
    return tokens[np.unique(np.clip(np.concatenate([chosen, ends]), 0, tokens.size - 1))]
