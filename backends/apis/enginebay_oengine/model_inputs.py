"""The arrays of one step, for chunks of prompts and for rows that decode, as the core's step
functions take them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jax import tree_util

from enginebay.contracts.engine import RowPlan
from enginebay.ops.spec import Bucket
from enginebay.serving.segments import Array
from enginebay.types import FrozenSampling, Request, SamplingParams
from enginebay_oengine.page_manager import POOL
from enginebay_runtime.assemble import empty_plan, fill_columns, sorted_for_attention
from enginebay_runtime.geometry import Geometry


@dataclasses.dataclass(frozen=True, slots=True)
class PromptChunk:
    """The tokens int32 of a row of a prefill, and the row's request."""

    plan: RowPlan
    token_ids: np.ndarray
    request: Request


def make_request(
    token_ids: np.ndarray,
    params: SamplingParams,
    max_length: int,
    stop_token_ids: tuple[int, ...],
    key: tuple[int, int],
) -> Request:
    """Return the request of a prompt int32 [tokens] that ends at `max_length` tokens or at a stop
    token.
    """
    sampling = FrozenSampling(max_length - len(token_ids), params, stop_token_ids)
    return Request("", token_ids, sampling, key, arrival_s=0.0)


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["token_ids", "ints", "floats", "table"],
    meta_fields=["bucket"],
)
@dataclasses.dataclass(frozen=True)
class PrefillPart:
    """Arguments of `prefill_step`: token_ids int32 [T], ints int32 [S, ...], floats f32 [S, ...],
    table int32 [S, P].
    """

    token_ids: Array
    ints: Array
    floats: Array
    table: Array
    bucket: Bucket


@functools.partial(
    tree_util.register_dataclass, data_fields=["row_ids", "table"], meta_fields=["bucket"]
)
@dataclasses.dataclass(frozen=True)
class DecodePart:
    """Arguments of `decode_step`: row_ids int32 [S], where row i is at index i, and table int32 [S,
    P].
    """

    row_ids: Array
    table: Array
    bucket: Bucket


@functools.partial(tree_util.register_dataclass, data_fields=["prefill", "decode"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ModelInputBatch:
    """The inputs of one step: chunks of prompts, rows that decode, or both. A part that is None is
    skipped.
    """

    prefill: PrefillPart | None = None
    decode: DecodePart | None = None


def prefill_part(chunks: Sequence[PromptChunk], geometry: Geometry, num_rows: int) -> PrefillPart:
    """Return the arrays for chunks of different rows; num_rows: rows on the device."""
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    no_prefix = all(chunk.plan.num_computed == 0 for chunk in chunks)
    bucket = geometry.prefill_bucket(len(chunks), num_tokens, no_prefix=no_prefix)
    chunks = [chunks[i] for i in sorted_for_attention([chunk.plan for chunk in chunks])]
    token_ids = np.zeros(bucket.tokens, np.int32)
    token_ids[:num_tokens] = np.concatenate([chunk.token_ids for chunk in chunks])
    ints, floats = empty_plan(bucket.seqs, num_rows)
    table = np.zeros((bucket.seqs, bucket.pages_per_seq), np.int32)
    for place, chunk in enumerate(chunks):
        fill_columns(ints[place], floats[place], chunk.plan, chunk.request)
        _fill_pages(table[place], chunk.plan.lease.pages[POOL])
    return PrefillPart(token_ids, ints, floats, table, bucket)


def decode_part(
    pages_by_row: dict[int, tuple[int, ...]], longest: int, geometry: Geometry, num_rows: int
) -> DecodePart:
    """Return the arrays for a decode of these rows with up to `longest` tokens, each row at its own
    index; num_rows: rows on the device.
    """
    bucket = geometry.decode_key(geometry.sizes.decode_rows[-1], longest).bucket
    row_ids = np.full(bucket.seqs, num_rows, np.int32)
    table = np.zeros((bucket.seqs, bucket.pages_per_seq), np.int32)
    for row, pages in pages_by_row.items():
        row_ids[row] = row
        _fill_pages(table[row], pages)
    return DecodePart(row_ids, table, bucket)


def _fill_pages(table: np.ndarray, pages: tuple[int, ...]) -> None:
    count = min(len(pages), len(table))
    table[:count] = pages[:count]
