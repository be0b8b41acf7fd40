"""The decode steps, and what all steps share: pure functions, traced once per bucket, with donated
state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import tree_util

from enginebay.contracts.cache import KVLayout
from enginebay.contracts.commands import DecodeInputs
from enginebay.contracts.executor import EngineParts, Layouts
from enginebay.contracts.model import ModelCache, Weights
from enginebay.contracts.processor import Processors, ProcessorState
from enginebay.contracts.step_key import StepKey
from enginebay.ops.batches import derive_batch
from enginebay.ops.sampling import (
    first_best,
    has_finite_best,
    without_padding,
    without_stage,
)
from enginebay.ops.spec import AttnBatch, Bucket
from enginebay.types import NOT_FINITE, StepVariant
from enginebay_runtime.compacting import compact_rows
from enginebay_runtime.device import ADVANCED, DeviceRows
from enginebay_runtime.full_vocab import FullVocab, log_softmax
from enginebay_runtime.logprobs import Logprobs, logprobs_of
from enginebay_runtime.processing import evolve, process
from enginebay_runtime.tables import pages_of_rows, with_changes

SAMPLING_CALL = "enginebay_sampling"
"""The name of the jitted function that samples, in a traced step."""

PENALTIES = "penalties"
"""The logits processor that applies penalties; in an engine without it the sampler applies them."""


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["cache", "rows", "processor_state", "tables"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StepState:
    """Everything that a step changes, donated as a whole: the cache's arrays per group and layer,
    and the rows.

    `processor_state`: the fields of logits processors by name, arrays [R, ...]
    (enginebay_runtime.processing.empty_rows). `tables`: the rows' page tables int32 [R, P] by
    group (`enginebay_runtime.tables`).
    """

    cache: ModelCache
    rows: DeviceRows
    processor_state: Mapping[str, ProcessorState] = dataclasses.field(default_factory=dict)
    tables: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


@functools.partial(
    tree_util.register_dataclass,
    data_fields=["tokens", "logprobs", "logits", "full_vocab", "hidden"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The results of a step, beside its state, for S rows and N tokens each.

    tokens int32 [S, N], -1 where none was sampled, NOT_FINITE where the logits had NaN or infinity.
    logprobs [S, N, W], undefined for tokens below 0, and when all sampled rows have a num_logprobs
    of -1. logits: None unless the program returns them. A prefill returns f32 [T, vocab], the
    logits after each of its tokens; a decode returns f32 [S, N, vocab], the logits that each token
    was sampled from. full_vocab: None unless the program returns it. hidden: f32 [S, 2,
    hidden_size] if the step is a prefill that pools, else None. It has two vectors for each row:
    the sum of the final hidden states of the row's tokens, and the final hidden state of its last
    token.
    """

    tokens: jax.Array
    logprobs: Logprobs
    logits: jax.Array | None = None
    full_vocab: FullVocab | None = None
    hidden: jax.Array | None = None


_Carry = tuple[jax.Array, ModelCache, DeviceRows, Mapping[str, ProcessorState], Sampled]
"""Number of steps done, and their results so far."""


def processors_of(parts: EngineParts, key: StepKey) -> Processors:
    """The logits processors of a step, in the order of their application."""
    return tuple((n, one) for n, one in parts.processors if key.names is None or n in key.names)


def adapters_of(key: StepKey, rows: DeviceRows) -> jax.Array | None:
    """The rows' adapters int32 [S]; None when the step computes nothing for adapters."""
    return rows.adapters if key.adapts else None


def _returns_logits(parts: EngineParts, key: StepKey) -> bool:
    """Whether a step returns all its logits; those of a prefill come from its forward program."""
    return parts.returns_logits and key.kind != "sample"


def nothing_sampled(parts: EngineParts, key: StepKey, shape: tuple[int, int]) -> Sampled:
    """Results of a step of `shape` [S, tokens] before anything is sampled."""
    info = parts.info

    def zeros(width: int) -> jax.Array:
        return jnp.zeros((*shape, width), jnp.float32)

    return Sampled(
        jnp.full(shape, -1, jnp.int32),
        Logprobs.empty(shape, info.num_token_ids),
        zeros(info.vocab_size) if _returns_logits(parts, key) else None,
        FullVocab(zeros(info.num_token_ids)) if key.full_vocab else None,
    )


def sample_rows(
    parts: EngineParts,
    key: StepKey,
    logits: jax.Array,
    rows: DeviceRows,
    processor_state: Mapping[str, ProcessorState],
) -> tuple[Sampled, Mapping[str, ProcessorState]]:
    """Sample a token for each unfinished row of logits f32 [S, vocab]; NOT_FINITE for a row with
    NaN or infinity. Returns the results and the rows' new fields. The padding of the vocabulary is
    neither sampled nor part of log-probabilities.

    The results have no axis of tokens: [S] and [S, W].
    """
    run: Any = functools.partial(_sampled_rows, parts, key)
    if key.variant is not StepVariant.GREEDY:
        run.__name__ = SAMPLING_CALL
        run = jax.jit(run)
    return cast("tuple[Sampled, Mapping[str, ProcessorState]]", run(logits, rows, processor_state))


def _sampled_rows(
    parts: EngineParts,
    key: StepKey,
    logits: jax.Array,
    rows: DeviceRows,
    processor_state: Mapping[str, ProcessorState],
) -> tuple[Sampled, Mapping[str, ProcessorState]]:
    returned = logits if _returns_logits(parts, key) else None
    known = logits[:, : parts.info.num_token_ids]
    logits = without_padding(logits, parts.info.padding_from)
    finite = has_finite_best(logits)

    def ending(tokens: jax.Array) -> jax.Array:
        return jnp.where(rows.finished, -1, jnp.where(finite, tokens, NOT_FINITE))

    full_vocab = FullVocab(log_softmax(known)) if key.full_vocab else None
    if key.variant is StepVariant.GREEDY:
        best = ending(first_best(logits.astype(jnp.float32)))
        empty = Logprobs.empty(best.shape, known.shape[1])
        return Sampled(best, empty, returned, full_vocab), processor_state
    processors, rows_at_once = processors_of(parts, key), parts.platform.rows_at_once
    state, scores = rows.sampling_state(), logits
    given: Mapping[str, jax.Array] = {}
    if key.variant is StepVariant.FULL:
        scores = logits.astype(jnp.float32)
        scores, given = process(
            processors, scores, processor_state, state, rows_at_once=rows_at_once
        )
    plain = key.variant is StepVariant.SAMPLE or (
        PENALTIES in processor_state and PENALTIES in dict(processors)
    )
    tokens = parts.sampler(scores, without_stage(state, "penalty") if plain else state)
    active = ~rows.finished
    processor_state = evolve(
        processors, given, tokens, processor_state, state, active, rows_at_once=rows_at_once
    )
    asks = active & (rows.num_logprobs >= 0)
    logprobs = logprobs_of(known, tokens, asks, rows_at_once=rows_at_once)
    return Sampled(ending(tokens), logprobs, returned, full_vocab), processor_state


def batches_of(
    q_lens: jax.Array,
    kv_lens: jax.Array,
    tables: Mapping[str, jax.Array],
    layouts: Layouts,
    bucket: Bucket,
) -> dict[str, AttnBatch]:
    """The rows of a step as each group's attention sees them; tables int32 [S, P] by group."""
    return {
        g: derive_batch(q_lens, kv_lens, tables[g], layouts[g].page_size, bucket) for g in layouts
    }


def _history_length(key: StepKey) -> int:
    """How many tokens of each row's history a step reads, including those that it adds."""
    return key.bucket.max_kv_len + 1 if key.variant is StepVariant.FULL else 0


def take_fields(
    parts: EngineParts,
    key: StepKey,
    processor_state: Mapping[str, ProcessorState],
    row_ids: jax.Array,
) -> Mapping[str, ProcessorState]:
    """Return the fields of rows [S] for the processors that the step applies; a row id past the end
    stands for a row that uses no processor.
    """
    if key.variant is not StepVariant.FULL:
        return {}
    applied = {
        name: dict(processor_state[name])
        for name, _ in processors_of(parts, key)
        if name in processor_state
    }
    taken: Mapping[str, ProcessorState] = jax.tree.map(
        lambda a: a.at[row_ids].get(mode="fill", fill_value=0), applied
    )
    return taken


def put_fields(
    parts: EngineParts,
    key: StepKey,
    processor_state: Mapping[str, ProcessorState],
    row_ids: jax.Array,
    rows: Mapping[str, ProcessorState],
) -> Mapping[str, ProcessorState]:
    """Return `processor_state` with the new fields of rows [S], for processors whose fields change
    with each token. Row ids past the end are ignored.
    """
    evolving = {name for name, processor in processors_of(parts, key) if processor.evolves}
    return {
        name: {n: a.at[row_ids].set(rows[name][n], mode="drop") for n, a in fields.items()}
        if name in evolving and name in rows
        else fields
        for name, fields in processor_state.items()
    }


def decode_step(
    weights: Weights,
    state: StepState,
    changes: Mapping[str, jax.Array],
    inputs: DecodeInputs,
    number: jax.Array | None = None,
    sampled: Sampled | None = None,
    *,
    parts: EngineParts,
    layouts: Layouts,
    key: StepKey,
    max_steps: int,
    pages: Mapping[str, jax.Array] | None = None,
) -> tuple[StepState, Sampled]:
    """Decode up to `num_steps` (traced, at most max_steps) tokens per row; ends early when all rows
    are finished.

    changes: changed entries of the page tables, see `tables.with_changes`. `pages`: the pages of
    the rows, int32 [S, P] by group, of a cache that the state's tables do not describe. With
    `key.bucket.rows_are_pages` row i must be page i; otherwise attention follows the pages. Returns
    max_steps tokens per row, -1 past the row's end.

    With `number`, an int32, only that one of the steps is computed, without a loop. `sampled` then
    has the results of the steps before it; step 0 does not read them.
    """
    row_ids: Any = inputs.row_ids  # traced here
    num_steps: Any = inputs.num_steps
    bucket = key.bucket
    tables = with_changes(state.tables, changes)
    if pages is None:
        num_tokens = length_after(state.rows, row_ids, num_steps)
        pages = pages_of_rows(tables, layouts, bucket, row_ids, num_tokens)
    ops = parts.ops(bucket, layouts)
    ones = jnp.ones(bucket.seqs, jnp.int32)

    def unfinished(carry: _Carry) -> jax.Array:
        step, _, rows, _, _ = carry
        return (step < num_steps) & ~rows.finished.all()

    def one(carry: _Carry) -> _Carry:
        step, cache, rows, processor_state, sampled = carry
        active, adapters = ~rows.finished, adapters_of(key, rows)
        batches = batches_of(ones, jnp.where(active, rows.length, 0), pages, layouts, bucket)
        hidden, cache = parts.model.hidden(
            weights, ops.in_step(batches, adapters), rows.last_token, cache, batches
        )
        logits = parts.model.logits(weights, ops.of_rows(adapters), hidden)
        new, processor_state = sample_rows(parts, key, logits, rows, processor_state)
        sampled = jax.tree.map(lambda before, after: before.at[:, step].set(after), sampled, new)
        return step + 1, cache, rows.advanced(new.tokens, active), processor_state, sampled

    nothing = nothing_sampled(parts, key, (bucket.seqs, max_steps))
    if number is not None:
        nothing = jax.tree.map(lambda a, b: jnp.where(number == 0, a, b), nothing, sampled)
    start = (
        jnp.int32(0) if number is None else number,
        state.cache,
        state.rows.take(row_ids, _history_length(key)),
        take_fields(parts, key, state.processor_state, row_ids),
        nothing,
    )
    _, cache, rows, processor_state, sampled = (
        jax.lax.while_loop(unfinished, one, start) if number is None else one(start)
    )
    return StepState(
        cache,
        state.rows.put(row_ids, rows, ADVANCED),
        put_fields(parts, key, state.processor_state, row_ids, processor_state),
        tables,
    ), sampled


def length_after(rows: DeviceRows, row_ids: jax.Array, num_new: jax.Array) -> jax.Array:
    """int32 [S]: the largest number of tokens that each of these rows may have in the cache after
    a step of `num_new` new tokens.
    """
    length = rows.length.at[row_ids].get(mode="fill", fill_value=0)
    longest = rows.max_length.at[row_ids].get(mode="fill", fill_value=0)
    return jnp.minimum(length - 1 + num_new, longest)


def compact_decode_step(
    weights: Weights,
    state: StepState,
    changes: Mapping[str, jax.Array],
    inputs: DecodeInputs,
    *,
    parts: EngineParts,
    layouts: Layouts,
    key: StepKey,
    max_steps: int,
    pages: Mapping[str, jax.Array] | None = None,
) -> tuple[StepState, Sampled]:
    """Copy the rows' keys and values to one page per row, run decode_step on the copy, and write
    the keys and values of the new tokens back to the cache. Arguments as in decode_step.

    The copy is made once per call of max_steps tokens, and attention on it uses no page table. A
    recurrent state has one page per row already, so it is not copied.
    """
    row_ids: Any = inputs.row_ids  # traced here
    num_steps: Any = inputs.num_steps
    bucket = key.bucket
    tables = with_changes(state.tables, changes)
    if pages is None:
        num_tokens = length_after(state.rows, row_ids, num_steps)
        pages = pages_of_rows(tables, layouts, bucket, row_ids, num_tokens)
    own = {g: layout for g, layout in layouts.items() if isinstance(layout, KVLayout)}
    copies = {
        g: [compact_rows(layout, layer, pages[g], bucket.max_kv_len) for layer in state.cache[g]]
        for g, layout in own.items()
    }
    small = {g: copies[g][0][0] for g in own}
    cache = {**state.cache, **{g: tuple(arrays for _, arrays in copies[g]) for g in own}}
    places = jnp.arange(bucket.seqs, dtype=jnp.int32)[:, None]
    before = _lengths(state.rows, row_ids)
    as_pages = dataclasses.replace(bucket, rows_are_pages=True, pages_per_seq=1)
    done, sampled = decode_step(
        weights,
        StepState(cache, state.rows, state.processor_state),
        {},
        inputs,
        parts=parts,
        layouts={**layouts, **small},
        key=dataclasses.replace(key, bucket=as_pages),
        max_steps=max_steps,
        pages={**pages, **dict.fromkeys(own, places)},
    )
    after = _lengths(done.rows, row_ids)
    whole = {
        g: tuple(
            _write_back(
                layout,
                big,
                small[g],
                part=part,
                table=pages[g],
                before=before,
                after=after,
                max_steps=max_steps,
            )
            for big, part in zip(state.cache[g], done.cache[g], strict=True)
        )
        for g, layout in own.items()
    }
    return StepState({**done.cache, **whole}, done.rows, done.processor_state, tables), sampled


def _lengths(rows: DeviceRows, row_ids: jax.Array) -> jax.Array:
    return rows.length.at[row_ids].get(mode="fill", fill_value=0)


def _write_back(
    layout: KVLayout,
    cache: Mapping[str, jax.Array],
    small: KVLayout,
    part: Mapping[str, jax.Array],
    table: jax.Array,
    before: jax.Array,
    after: jax.Array,
    max_steps: int,
) -> dict[str, jax.Array]:
    """Copy positions before - 1 to after - 1 [S] of a compact decode into the whole cache."""
    row = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None]
    position = before[:, None] - 1 + jnp.arange(max_steps, dtype=jnp.int32)[None]
    new = position < after[:, None] - 1
    inside = jnp.clip(position, 0, small.page_size - 1)
    k, v = small.read_exact(part, (row * small.page_size + inside).reshape(-1))
    pages = jnp.take_along_axis(
        table, jnp.minimum(inside // layout.page_size, table.shape[1] - 1), axis=1
    )
    slots = jnp.where(new, pages * layout.page_size + inside % layout.page_size, -1)
    return layout.write(cache, slots.reshape(-1), k, v)
