"""A prefill step: runs the model over chunks of prompts, then samples rows whose prompt ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.commands import PrefillInputs
from enginebay.contracts.executor import EngineParts, Layouts
from enginebay.contracts.model import Weights
from enginebay.contracts.processor import ProcessorState
from enginebay.contracts.step_key import StepKey
from enginebay.ops import prefill_columns as columns
from enginebay.types import StepVariant
from enginebay_runtime import device
from enginebay_runtime.device import ADVANCED, DeviceRows
from enginebay_runtime.full_vocab import FullVocab, prompt_logprobs
from enginebay_runtime.step import (
    Sampled,
    StepState,
    adapters_of,
    batches_of,
    nothing_sampled,
    put_fields,
    sample_rows,
    take_fields,
)
from enginebay_runtime.tables import pages_of_rows, with_changes


def prefill_step(
    weights: Weights,
    state: StepState,
    inputs: PrefillInputs,
    pages: Mapping[str, jax.Array],
    *,
    parts: EngineParts,
    layouts: Layouts,
    key: StepKey,
) -> tuple[StepState, Sampled]:
    """Process chunks of prompts, and sample one token for the rows whose prompt ends here:
    `forward_step`, then `sample_step`. `pages`: the pages of the rows, int32 [S, P] by group.

    Returns one token per row, -1 where none was sampled.
    """
    state, last, sampled = forward_step(
        weights, state, {}, inputs, parts=parts, layouts=layouts, key=key, pages=pages
    )
    ints: Any = inputs.ints  # traced here
    num_rows = key.bucket.seqs
    row_ids, places = ints[:, columns.ROW], jnp.arange(num_rows, dtype=jnp.int32)
    places = jnp.where(ints[:, columns.SAMPLES] != 0, places, num_rows)
    (rows, processor_state), sampled = sample_step(
        weights,
        (state.rows, state.processor_state),
        last,
        sampled,
        row_ids,
        places,
        parts=parts,
        layouts=layouts,
        key=dataclasses.replace(key, kind="sample"),
    )
    return dataclasses.replace(state, rows=rows, processor_state=processor_state), sampled


def forward_step(
    weights: Weights,
    state: StepState,
    changes: Mapping[str, jax.Array],
    inputs: PrefillInputs,
    *,
    parts: EngineParts,
    layouts: Layouts,
    key: StepKey,
    pages: Mapping[str, jax.Array] | None = None,
) -> tuple[StepState, jax.Array, Sampled]:
    """Run the model over chunks of prompts. Rows whose prompt ends here are not yet sampled.

    changes: changed entries of the page tables, see `tables.with_changes`. `pages`: the pages of
    the rows, int32 [S, P] by group, of a state without tables. The tokens are written to the rows'
    history. Returns the state, the hidden values of each row's last token [S, width], and results
    with token -1 for each row.
    """
    ints: Any = inputs.ints  # traced here
    token_ids: Any = inputs.token_ids
    given_embeds: Any = inputs.embeds
    targets: Any = inputs.targets
    floats: Any = inputs.floats
    bucket, model = key.bucket, parts.model
    row_ids, kv_lens = ints[:, columns.ROW], ints[:, columns.KV_LEN]
    tables = with_changes(state.tables, changes)
    if pages is None:
        pages = pages_of_rows(tables, layouts, bucket, row_ids, kv_lens)
    ops = parts.ops(bucket, layouts)
    own, decodes = state.rows.take(row_ids, 0), ints[:, columns.SAMPLES] == columns.DECODES
    mixes = parts.config.mixed_steps == "on" and bucket.mode == "mixed"
    if mixes:  # the plan has an upper bound of the rows' lengths
        kv_lens = jnp.where(decodes, own.length, kv_lens)
    batches = batches_of(ints[:, columns.Q_LEN], kv_lens, pages, layouts, bucket)
    batch = next(iter(batches.values()))
    if mixes:
        token_ids = _with_own_tokens(token_ids, decodes, own, batch.seq_ids)
    adapters = None if own.adapters is None else ints[:, columns.ADAPTER]
    in_step = ops.in_step(batches, adapters if key.adapts else None)
    embeds, ids = None, token_ids
    if given_embeds is not None:
        is_embed = token_ids >= model.info.vocab_size
        ids, embeds = jnp.where(is_embed, 0, token_ids), (is_embed, given_embeds)
    hidden, cache = model.hidden(weights, in_step, ids, state.cache, batches, embeds=embeds)
    token_rows = row_ids.at[batch.seq_ids].get(mode="fill", fill_value=state.rows.length.shape[0])
    rows = state.rows.record(token_rows, batch.positions, token_ids)
    planned = device.rows_from_plan(ints, floats, rows.history(row_ids, 0), adapters)
    rows = rows.put(row_ids, own.where(decodes, planned) if mixes else planned)
    of_tokens = None if in_step.batch is None else in_step.batch.adapters

    def logits_of(hidden: jax.Array, adapters: jax.Array | None) -> jax.Array:
        return model.logits(weights, ops.of_rows(adapters), hidden)

    sampled = nothing_sampled(parts, key, (bucket.seqs, 1))
    if sampled.full_vocab is not None and targets is not None:
        logprobs = prompt_logprobs(
            logits_of, hidden, targets, model.info.num_token_ids, adapters=of_tokens
        )
        full_vocab = FullVocab(sampled.full_vocab.rows, logprobs)
        sampled = dataclasses.replace(sampled, full_vocab=full_vocab)
    if parts.returns_logits:
        sampled = dataclasses.replace(sampled, logits=logits_of(hidden, of_tokens))
    last = hidden[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)].astype(model.info.hidden_dtype)
    if key.pools:
        sampled = dataclasses.replace(sampled, hidden=_pooled(hidden, last, batch.seq_ids))
    return dataclasses.replace(state, cache=cache, rows=rows, tables=tables), last, sampled


def _with_own_tokens(
    token_ids: jax.Array, decodes: jax.Array, own: DeviceRows, seq_ids: jax.Array
) -> jax.Array:
    """token_ids int32 [T], with the last token of each row that decodes in place of its own."""
    is_last = decodes.at[seq_ids].get(mode="fill", fill_value=False)
    last = own.last_token.at[seq_ids].get(mode="fill", fill_value=0)
    return jnp.where(is_last, last, token_ids)


def _pooled(hidden: jax.Array, last: jax.Array, seq_ids: jax.Array) -> jax.Array:
    """f32 [S, 2, width]: the sum of hidden [T, width] over each row's tokens, and `last` [S,
    width]. seq_ids int32 [T], S on padding, whose hidden states may have any value.
    """
    num_rows = last.shape[0]
    own = jnp.where((seq_ids < num_rows)[:, None], hidden.astype(jnp.float32), 0.0)
    is_of_row = (seq_ids == jnp.arange(num_rows)[:, None]).astype(jnp.float32)
    total = jnp.matmul(is_of_row, own, precision=jax.lax.Precision.HIGHEST)
    return jnp.stack([total, last.astype(jnp.float32)], axis=1)


SamplingRows = tuple[DeviceRows, Mapping[str, ProcessorState]]
"""The part of a StepState that sampling changes: rows, and the fields of logits processors."""


def sample_step(
    weights: Weights,
    state: SamplingRows,
    last: jax.Array,
    sampled: Sampled,
    row_ids: jax.Array,
    places: jax.Array,
    *,
    parts: EngineParts,
    layouts: Layouts,
    key: StepKey,
) -> tuple[SamplingRows, Sampled]:
    """Sample a token for each of N rows, after a `forward_step` of S rows that has returned `last`
    [S, width] and `sampled`.

    row_ids int32 [N]; places int32 [N]: the index of each row in S, or S for padding. Returns
    `sampled` with the rows' tokens.
    """
    whole, fields = state
    num = places.shape[0]
    ops = parts.ops(dataclasses.replace(key.bucket, tokens=num, seqs=num), layouts)
    row_ids = jnp.where(places < last.shape[0], row_ids, whole.length.shape[0])
    rows = whole.take(row_ids, whole.token_ids.shape[1] if key.variant is StepVariant.FULL else 0)
    hidden = last[jnp.minimum(places, last.shape[0] - 1)]
    logits = parts.model.logits(weights, ops.of_rows(adapters_of(key, rows)), hidden)
    taken = take_fields(parts, key, fields, row_ids)
    new, taken = sample_rows(parts, key, logits, rows, taken)
    rows = rows.advanced(new.tokens, ~rows.finished)

    def put(before: jax.Array, after: jax.Array) -> jax.Array:
        return before.at[places, 0].set(after, mode="drop")

    full_vocab = sampled.full_vocab
    if full_vocab is not None and new.full_vocab is not None:
        full_vocab = FullVocab(put(full_vocab.rows, new.full_vocab.rows), full_vocab.prompt)
    sampled = Sampled(
        put(sampled.tokens, new.tokens),
        jax.tree.map(put, sampled.logprobs, new.logprobs),
        sampled.logits,
        full_vocab,
        sampled.hidden,
    )
    return (
        whole.put(row_ids, rows, ADVANCED),
        put_fields(parts, key, fields, row_ids, taken),
    ), sampled
