"""The paged engine's steps as pure functions of arrays that the caller owns: chunks of prompts, and
rows that decode, over the pages of one pool. An engine keeps its arrays in its executor; an API
whose documents make the cache an argument of the user's own calls needs this form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from enginebay.contracts.cache import KVLayout
from enginebay.contracts.commands import DecodeInputs, PrefillInputs
from enginebay.contracts.engine import RowPlan
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import Weights
from enginebay.contracts.placement import Placement
from enginebay.contracts.step_key import StepKey
from enginebay.memory import check_memory
from enginebay.ops import prefill_columns as columns
from enginebay.ops.spec import Bucket
from enginebay.types import Request
from enginebay_paged.options import PagedOptions
from enginebay_paged.pools import Pools
from enginebay_paged.sizing import choose_num_pages
from enginebay_runtime.assemble import empty_plan, fill_columns, sorted_for_attention
from enginebay_runtime.buckets import BucketSizes, doubling
from enginebay_runtime.device import COLUMNS, DeviceRows, fold_keys
from enginebay_runtime.geometry import Geometry, PoolSizes, Shapes
from enginebay_runtime.memory import plan_memory
from enginebay_runtime.pages import copy_page, read_group
from enginebay_runtime.prefill import prefill_step
from enginebay_runtime.step import StepState, compact_decode_step, decode_step

POOL = "pages"
"""The name of the pool in a lease: a page number means the same page in every cache group."""

Views = Mapping[str, Sequence[Mapping[str, Any]]]
"""Arrays by cache group, layer and name. In a cache, axis 0 of each array counts pages."""

PageRows = DeviceRows
"""The rows' columns on the device, which steps take and return beside the pages."""

StepGeometry = Geometry
"""The sizes of steps: which bucket a step uses."""

copy_page_within = copy_page
read_pages = read_group
"""(views, table int32 [n, pages]) -> the pages of every layer: arrays [n, pages, ...]."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptChunk:
    """The tokens int32 of a row of a prefill, and the row's request."""

    plan: RowPlan
    token_ids: np.ndarray
    request: Request


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["token_ids", "ints", "floats", "table"],
    meta_fields=["bucket"],
)
@dataclasses.dataclass(frozen=True)
class PrefillPart:
    """Chunks of prompts: token_ids int32 [T], ints int32 [S, ...], floats f32 [S, ...] (see
    `enginebay.ops.prefill_columns`), table int32 [S, P].
    """

    token_ids: jax.Array | np.ndarray
    ints: jax.Array | np.ndarray
    floats: jax.Array | np.ndarray
    table: jax.Array | np.ndarray
    bucket: Bucket


@functools.partial(
    tree_util.register_dataclass, data_fields=["row_ids", "table"], meta_fields=["bucket"]
)
@dataclasses.dataclass(frozen=True)
class DecodePart:
    """Rows that decode: row_ids int32 [S], where row i is at index i, and table int32 [S, P]."""

    row_ids: jax.Array | np.ndarray
    table: jax.Array | np.ndarray
    bucket: Bucket


def prefill_part(
    chunks: Sequence[PromptChunk], geometry: StepGeometry, num_rows: int
) -> PrefillPart:
    """Return the arrays for chunks of different rows; num_rows: rows on the device."""
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    no_prefix = all(chunk.plan.num_computed == 0 for chunk in chunks)
    bucket = geometry.prefill_bucket(len(chunks), num_tokens, no_prefix=no_prefix)
    chunks = [chunks[i] for i in sorted_for_attention([chunk.plan for chunk in chunks])]
    token_ids = np.zeros(bucket.tokens, np.int32)
    token_ids[:num_tokens] = np.concatenate([chunk.token_ids for chunk in chunks])
    ints, floats = empty_plan(bucket.seqs, num_rows)
    for place, chunk in enumerate(chunks):
        fill_columns(ints[place], floats[place], chunk.plan, chunk.request)
    pages = {place: chunk.plan.lease.pages[POOL] for place, chunk in enumerate(chunks)}
    return PrefillPart(token_ids, ints, floats, _table(bucket, pages), bucket)


def decode_part(
    pages_by_row: Mapping[int, tuple[int, ...]],
    longest: int,
    geometry: StepGeometry,
    num_rows: int,
) -> DecodePart:
    """Return the arrays for a decode of these rows with up to `longest` tokens, each row at its own
    index; num_rows: rows on the device.
    """
    bucket = geometry.decode_key(geometry.sizes.decode_rows[-1], longest).bucket
    row_ids = np.full(bucket.seqs, num_rows, np.int32)
    for row in pages_by_row:
        row_ids[row] = row
    return DecodePart(row_ids, _table(bucket, pages_by_row), bucket)


def _table(bucket: Bucket, pages: Mapping[int, tuple[int, ...]]) -> np.ndarray:
    """The pages by place, as far as the bucket's context reaches."""
    table = np.zeros((bucket.seqs, bucket.pages_per_seq), np.int32)
    for place, own in pages.items():
        count = min(len(own), bucket.pages_per_seq)
        table[place, :count] = own[:count]
    return table


class PageResult(NamedTuple):
    """What a step returns: the cache, all rows, and of each row of the step its id int32 [S], its
    sampled token int32 [S] (-1: none), and how many of its tokens are in the cache, int32 [S].
    """

    views: Views
    rows: PageRows
    row_ids: jax.Array
    token_ids: jax.Array
    num_computed: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class PageSteps:
    """Steps of one set of parts over a cache of these layouts, by cache group. Logits processors
    are not part of them.
    """

    parts: EngineParts
    layouts: Mapping[str, KVLayout]

    @classmethod
    def of(cls, parts: EngineParts, layouts: Mapping[str, KVLayout]) -> Self:
        """Make the steps of an engine's parts."""
        plain = dataclasses.replace(parts, processors=(), has_greedy=False, returns_logits=False)
        return cls(plain, dict(layouts))

    def prefill(
        self, weights: Weights, views: Views, rows: PageRows, part: PrefillPart
    ) -> PageResult:
        """Process chunks of prompts, and sample a token for each row whose prompt ends here."""
        given: Any = jax.tree.map(jnp.asarray, part)
        state, sampled = prefill_step(
            weights,
            StepState(views, rows),
            PrefillInputs(given.token_ids, given.ints, given.floats),
            dict.fromkeys(self.layouts, given.table),
            parts=self.parts,
            layouts=self.layouts,
            key=StepKey("prefill", part.bucket),
        )
        return PageResult(
            views=state.cache,
            rows=state.rows,
            row_ids=given.ints[:, columns.ROW],
            token_ids=sampled.tokens[:, 0],
            num_computed=given.ints[:, columns.KV_LEN],
        )

    def decode(
        self,
        weights: Weights,
        views: Views,
        rows: PageRows,
        part: DecodePart,
        words: jax.Array | None = None,
    ) -> PageResult:
        """Sample a token for each row. `words` uint32 [2] are folded into the rows' keys for this
        step; None: rows use their own keys.
        """
        row_ids: Any = jnp.asarray(part.row_ids)
        one: Any = jnp.int32(1)
        own = rows.keys
        if words is not None:
            folded = own
            for word in words:
                folded = fold_keys(folded, jnp.broadcast_to(word, own.shape[:1]))
            rows = dataclasses.replace(rows, keys=folded)
        step = compact_decode_step if self.parts.compact_decode else decode_step
        state, sampled = step(
            weights,
            StepState(views, rows),
            {},
            DecodeInputs(row_ids, one),
            parts=self.parts,
            layouts=self.layouts,
            key=StepKey("decode", part.bucket),
            max_steps=1,
            pages=dict.fromkeys(self.layouts, jnp.asarray(part.table)),
        )
        after = dataclasses.replace(state.rows, keys=own)
        return PageResult(
            views=state.cache,
            rows=after,
            row_ids=row_ids,
            token_ids=sampled.tokens[:, 0],
            num_computed=after.length.at[row_ids].get(mode="fill", fill_value=0) - 1,
        )


def make_page_rows(num_rows: int, max_length: int, placement: Placement) -> PageRows:
    """Make rows without requests, replicated on all devices."""
    return jax.device_put(DeviceRows.empty(num_rows, max_length), placement.replicated)


def rows_of_one(value: Any) -> Any:
    """Make rows in which every leaf is `value`, such as a sharding."""
    return DeviceRows.of(dict.fromkeys(COLUMNS, value), value)


def place_rows(
    rows: PageRows,
    given: PageRows,
    base_keys: jax.Array,
    source: jax.Array,
    slots: jax.Array,
    index: jax.Array,
) -> PageRows:
    """Put row source[i] of `given` at slots[i] of `rows`, as completion index[i] of its request,
    whose key is base_keys[source[i]]. Slots past the end are dropped.
    """
    picked: PageRows = jax.tree.map(lambda array: array[source], given)
    keys = fold_keys(base_keys[source], index)
    return rows.put(slots, dataclasses.replace(picked, keys=keys))


def take_rows(rows: PageRows, num_rows: int, num_tokens: int) -> PageRows:
    """Return the first num_rows rows with their first num_tokens tokens."""
    return rows.take(jnp.arange(num_rows, dtype=jnp.int32), num_tokens)


def write_pages(views: Views, parts: Views, table: jax.Array) -> Views:
    """Return `views` with parts [n, pages, ...] written to pages table int32 [n, pages]. Pages past
    the end are dropped.
    """
    flat = table.reshape(-1)

    def put(array: jax.Array, part: jax.Array) -> jax.Array:
        pages = part.reshape(-1, *part.shape[2:]).astype(array.dtype)
        return array.at[flat].set(pages, mode="drop")

    return jax.tree.map(put, views, parts)


def step_geometry(
    parts: EngineParts,
    *,
    page_size: int,
    max_length: int,
    num_slots: int,
    max_prompts: int,
    max_prefill_tokens: int,
    prefill_lengths: Sequence[int],
) -> StepGeometry:
    """Return the sizes of steps of up to num_slots rows that decode, and of up to max_prompts
    prompts, padded to one of prefill_lengths. A step has at most the configuration's
    max_num_batched_tokens prompt tokens.
    """
    most = min(max_prefill_tokens, parts.config.max_num_batched_tokens, max(16, max_length))
    tokens = tuple(one for one in prefill_lengths if one <= most) or (most,)
    sizes = BucketSizes(
        decode_rows=(max(num_slots, parts.platform.min_rows(parts.dtype)),),
        prefill_rows=(1, max_prompts) if max_prompts > 1 else (1,),
        prefill_tokens=tokens,
        kv_lens=doubling(256, max_length),
        no_prefix_tokens=tokens,
    )
    return Geometry(sizes, page_size, sizes.kv_lens[-1], parts.compact_decode)


def pool_shapes(parts: EngineParts, options: PagedOptions) -> tuple[int, Shapes]:
    """Return the number of pages, and the shapes by cache group, of a cache whose groups all keep
    every position, also those with a window.

    UnsupportedError when there is no room for a page, or for the pages that the options name.
    """
    config, groups = parts.config, parts.model.info.groups
    assert config.max_model_len is not None, "the composition root resolves max_model_len"
    pools = Pools(options.page_size, config.max_model_len)
    sizes = PoolSizes.of(parts, options.page_size, {})
    num_pages = choose_num_pages(parts, options, pools, sizes.geometry({}))
    shapes = pools.shapes(num_pages, groups, config.max_num_seqs)
    check_memory(plan_memory(parts, dataclasses.replace(sizes, whole=shapes)))
    return num_pages, shapes
