"""The arrays of one step: chunks of prompts and rows that decode, as the core's step functions take
them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax import tree_util

from enginebay.executor import columns
from enginebay.ops.spec import Bucket
from enginebay.row_columns import write_row
from enginebay.stepping.geometry import Geometry
from enginebay.types import SamplingParams

Array = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class RowSettings:
    """How a row is sampled and where it ends; `key` are the two words of the request's own random
    key.
    """

    params: SamplingParams
    max_length: int
    prompt_length: int
    stop_token_ids: tuple[int, ...]
    key: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens int32 of a row, after `num_computed` ones that are in its pages. `samples` with the
    prompt's last one.
    """

    row: int
    token_ids: np.ndarray
    num_computed: int
    samples: bool
    pages: tuple[int, ...]
    settings: RowSettings


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
    """Arguments of `decode_step`: row_ids int32 [S], each at its own place, and table int32
    [S, P].
    """

    row_ids: Array
    table: Array
    bucket: Bucket


@functools.partial(tree_util.register_dataclass, data_fields=["prefill", "decode"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class ModelInputBatch:
    """The inputs of one step: chunks of prompts, rows that decode, or both. What is None is not
    run.
    """

    prefill: PrefillPart | None = None
    decode: DecodePart | None = None


def prefill_part(
    chunks: Sequence[Chunk], geometry: Geometry, num_rows: int
) -> tuple[PrefillPart, np.ndarray]:
    """The arrays of chunks of different rows (of num_rows on the device), and each chunk's place
    among the step's rows.
    """
    # The order that AttnBatch wants: single tokens after a prefix, rows without one, the others.
    kinds = [
        0 if len(c.token_ids) == 1 and c.num_computed else 1 if not c.num_computed else 2
        for c in chunks
    ]
    order = [int(i) for i in np.argsort(np.asarray(kinds), kind="stable")]
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    no_prefix = all(chunk.num_computed == 0 for chunk in chunks)
    bucket = geometry.prefill_bucket(len(chunks), num_tokens, no_prefix=no_prefix)
    token_ids = np.zeros(bucket.tokens, np.int32)
    token_ids[:num_tokens] = np.concatenate([chunks[i].token_ids for i in order])
    ints, floats = columns.empty_plan(bucket.seqs, num_rows)
    table = np.zeros((bucket.seqs, bucket.pages_per_seq), np.int32)
    for place, index in enumerate(order):
        _fill(ints[place], floats[place], chunks[index])
        _fill_pages(table[place], chunks[index].pages)
    places = np.empty(len(chunks), np.int64)
    places[order] = np.arange(len(chunks))
    return PrefillPart(token_ids, ints, floats, table, bucket), places


def _fill(ints: np.ndarray, floats: np.ndarray, chunk: Chunk) -> None:
    settings, num_tokens = chunk.settings, len(chunk.token_ids)
    ints[columns.ROW] = chunk.row
    ints[columns.Q_LEN] = num_tokens
    ints[columns.KV_LEN] = chunk.num_computed + num_tokens
    ints[columns.SAMPLES] = chunk.samples
    ints[columns.KEY_HI : columns.KEY_LO + 1] = np.asarray(settings.key, np.uint32).view(np.int32)
    write_row(floats, ints[columns.PARAMS : columns.STOP_IDS], settings.params)
    ints[columns.MAX_LENGTH] = settings.max_length
    ints[columns.PROMPT_LENGTH] = settings.prompt_length
    ints[columns.STOP_IDS : columns.STOP_IDS + len(settings.stop_token_ids)] = (
        settings.stop_token_ids
    )


def decode_part(
    pages_by_row: dict[int, tuple[int, ...]], longest: int, geometry: Geometry, num_rows: int
) -> DecodePart:
    """The arrays of a decode of these rows (of num_rows on the device), of up to `longest` tokens,
    each at its own place.
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
