"""The verify step: several draft tokens per row at once, of which it keeps those that decoding
would give.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from enginebay.contracts.commands import VerifyInputs
from enginebay.contracts.executor import EngineParts, Layouts
from enginebay.contracts.model import ModelCache, Weights
from enginebay.contracts.step_key import StepKey, draft_rows
from enginebay.ops.batches import derive_batch
from enginebay.ops.spec import AttnBatch, Bucket
from enginebay_runtime.device import ADVANCED, DeviceRows
from enginebay_runtime.step import (
    Sampled,
    StepState,
    adapters_of,
    length_after,
    nothing_sampled,
    sample_rows,
)
from enginebay_runtime.tables import pages_of_rows, with_changes

_Carry = tuple[jax.Array, ModelCache, DeviceRows, Sampled, jax.Array]
"""Number of passes done, their results so far, and whether all drafts so far were accepted."""


def drafts_a_step(parts: EngineParts, bucket: Bucket) -> int:
    """The largest number of drafts per row in a verify step of this bucket."""
    return parts.config.draft_passes * bucket.max_q_len - 1


def verify_step(
    weights: Weights,
    state: StepState,
    changes: Mapping[str, jax.Array],
    inputs: VerifyInputs,
    *,
    parts: EngineParts,
    layouts: Layouts,
    key: StepKey,
) -> tuple[StepState, Sampled]:
    """Verify drafts. Returns, for each row, the tokens that decoding would give while they equal
    the drafts, and one more token.

    changes: changed entries of the page tables, see `tables.with_changes`. The drafts are int32 [S,
    P W - 1], for up to P = config.draft_passes passes of the model, each of W = bucket.max_q_len
    tokens per row. Returns P W tokens per row, -1 after the first that is no draft, and past a
    row's end. The last token and the drafts go through the model together; a token is sampled after
    each of them, with the key of its position, so drafts do not change the output. Another pass
    follows when all drafts of all rows were accepted and the next token equals the next draft.
    Rejected drafts leave values past a row's end in the cache, which later tokens overwrite. Rows
    must have no penalties: these would count drafts as tokens.
    """
    row_ids: Any = inputs.row_ids  # traced here
    draft_ids: Any = inputs.draft_ids
    bucket = key.bucket
    tables = with_changes(state.tables, changes)
    num_tokens = length_after(state.rows, row_ids, 1 + (draft_ids >= 0).sum(axis=1))
    pages = pages_of_rows(tables, layouts, bucket, row_ids, num_tokens)
    width, passes = bucket.max_q_len, parts.config.draft_passes
    feed = _as_rows if parts.drafts_are_rows else _as_chunks
    real = row_ids < state.rows.length.shape[0]
    # The draft that each token of each pass must equal for the row to go on; -1 for the last token.
    guesses = jnp.pad(draft_ids, ((0, 0), (0, 1)), constant_values=-1).reshape(-1, passes, width)

    def goes_on(carry: _Carry) -> jax.Array:
        number, _, _, _, holds = carry
        return (number < passes) & holds

    def one(carry: _Carry) -> _Carry:
        number, cache, rows, sampled, _ = carry
        guessed = guesses[:, number]
        num_fed = jnp.where(real, 1 + (guessed[:, :-1] >= 0).sum(axis=1, dtype=jnp.int32), 0)
        tokens = jnp.concatenate([rows.last_token[:, None], guessed[:, :-1]], axis=1)
        fed = feed(tokens, num_fed, rows.length, pages, layouts, bucket)
        logits, cache = _run_model(parts, layouts, weights, cache, fed, adapters_of(key, rows))
        new, _ = sample_rows(parts, key, logits, _at_every_position(rows, width), {})
        new = jax.tree.map(lambda array: array.reshape(-1, width, *array.shape[1:]), new)
        rows, kept, holds = advance_guessed(rows, guessed, new.tokens)
        # Rows that ask for full-vocabulary log-probabilities have no drafts.
        new = dataclasses.replace(new, tokens=kept, full_vocab=None)
        put = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=number * width, axis=1
        )
        more = guesses[:, jnp.minimum(number + 1, passes - 1), 0] >= 0
        holds = (holds & more | ~real).all()
        return number + 1, cache, rows, jax.tree.map(put, sampled, new), holds

    empty = nothing_sampled(parts, key, (len(row_ids), passes * width))
    start = (jnp.int32(0), state.cache, state.rows.take(row_ids, 0), empty, jnp.bool_(True))
    _, cache, rows, sampled, _ = (
        one(start) if passes == 1 else jax.lax.while_loop(goes_on, one, start)
    )
    rows = state.rows.put(row_ids, rows, ADVANCED)
    return StepState(cache, rows, state.processor_state, tables), sampled


class _PassInputs(NamedTuple):
    """The inputs of one pass of the model: its bucket, each group's batch, and token ids int32 [T].

    places int32 [S * W]: the index in T of the rows' positions, row by row; None when it is the
    identity.
    """

    bucket: Bucket
    batches: Mapping[str, AttnBatch]
    token_ids: jax.Array
    places: jax.Array | None


def _run_model(
    parts: EngineParts,
    layouts: Layouts,
    weights: Weights,
    cache: ModelCache,
    fed: _PassInputs,
    adapters: jax.Array | None,
) -> tuple[jax.Array, ModelCache]:
    """Logits f32 [S * W, vocab] of the rows' positions, row by row, and the new cache."""
    ops = parts.ops(fed.bucket, layouts)
    if adapters is not None:
        adapters = jnp.repeat(adapters, fed.bucket.seqs // len(adapters))
    in_step = ops.in_step(fed.batches, adapters)
    hidden, cache = parts.model.hidden(weights, in_step, fed.token_ids, cache, fed.batches)
    of_tokens = None if in_step.batch is None else in_step.batch.adapters
    if fed.places is not None:
        hidden = hidden[fed.places]
        of_tokens = None if of_tokens is None else of_tokens[fed.places]
    return parts.model.logits(weights, ops.of_rows(of_tokens), hidden), cache


def _as_chunks(
    tokens: jax.Array,
    num_fed: jax.Array,
    lengths: jax.Array,
    tables: Mapping[str, jax.Array],
    layouts: Layouts,
    bucket: Bucket,
) -> _PassInputs:
    """The first num_fed int32 [S] of tokens int32 [S, W] of each row, packed one row after the
    other, as in a prefill.
    """
    num_rows, width = tokens.shape
    kv_lens = jnp.where(num_fed > 0, lengths - 1 + num_fed, 0)
    batches = {
        g: derive_batch(num_fed, kv_lens, tables[g], layouts[g].page_size, bucket) for g in layouts
    }
    batch = next(iter(batches.values()))
    row = jnp.minimum(batch.seq_ids, num_rows - 1)
    offset = jnp.arange(len(batch.seq_ids)) - batch.cu_q_lens[row]
    token_ids = jnp.where(batch.seq_ids < num_rows, tokens[row, jnp.clip(offset, 0, width - 1)], 0)
    places = jnp.minimum(batch.cu_q_lens[:-1, None] + jnp.arange(width), bucket.tokens - 1)
    return _PassInputs(bucket, batches, token_ids, places.reshape(-1))


def _as_rows(
    tokens: jax.Array,
    num_fed: jax.Array,
    lengths: jax.Array,
    tables: Mapping[str, jax.Array],
    layouts: Layouts,
    bucket: Bucket,
) -> _PassInputs:
    """The same as in a decode step: each token is a row with the pages of its row, and one token
    longer than the one before.

    Every layer writes all keys and values before it reads any: see Caps.splits_rows.
    """
    num_rows, width = tokens.shape
    one_each = draft_rows(bucket)
    offsets = jnp.arange(width, dtype=jnp.int32)
    is_fed = offsets < num_fed[:, None]
    ones = jnp.ones(num_rows * width, jnp.int32)
    kv_lens = jnp.where(is_fed, lengths[:, None] + offsets, 0).reshape(-1)
    batches = {
        g: derive_batch(
            ones, kv_lens, jnp.repeat(tables[g], width, axis=0), layouts[g].page_size, one_each
        )
        for g in layouts
    }
    return _PassInputs(one_each, batches, jnp.where(is_fed, tokens, 0).reshape(-1), None)


def _at_every_position(rows: DeviceRows, width: int) -> DeviceRows:
    """[S * width]: each row `width` times, one token longer each time."""
    spread = jax.tree.map(lambda array: jnp.repeat(array, width, axis=0), rows)
    offsets = jnp.tile(jnp.arange(width, dtype=jnp.int32), rows.length.shape[0])
    return dataclasses.replace(spread, length=spread.length + offsets)


def advance_guessed(
    rows: DeviceRows, guesses: jax.Array, tokens: jax.Array
) -> tuple[DeviceRows, jax.Array, jax.Array]:
    """Advance rows by the tokens int32 [S, W] that follow accepted guesses. Returns the rows; these
    tokens, -1 for the others; and whether all guesses of a row were accepted, [S].
    """
    holds = ~rows.finished
    kept = []
    for place in range(tokens.shape[1]):
        token = tokens[:, place]
        kept.append(jnp.where(holds, token, -1))
        rows = rows.advanced(token, holds)
        holds = holds & ~rows.finished & (token == guesses[:, place])
    return rows, jnp.stack(kept, axis=1), holds
