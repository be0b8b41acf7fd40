"""The contiguous engine's steps as pure functions of arrays that the caller owns: the prefill of a
batch of prompts, and decodes of its rows. An engine keeps its arrays in its executor; an API whose
documents make the arrays a value of the user needs this form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import DecodeInputs
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import Weights
from enginebay.contracts.step_key import StepKey
from enginebay.ops.spec import Bucket
from enginebay_contiguous.slot_sizes import slot_shape
from enginebay_runtime.device import DeviceRows
from enginebay_runtime.step import StepState, batches_of, decode_step, sample_rows

BatchResult = tuple[jax.Array, DeviceRows, list[CacheArrays]]
"""Sampled tokens int32 [B, steps], -1 where a row has none; the rows; the layers of the cache."""


@dataclasses.dataclass(frozen=True)
class BatchSteps:
    """Steps of a batch of B rows, each with a slot of its own.

    num_rows: B. prefill_length: columns of the padded prompts. max_batched_tokens: max tokens of
    one pass over the prompts; more tokens take several passes. slots, layouts: the shape of the
    slots, and the layout of each cache group.
    """

    parts: EngineParts
    num_rows: int
    prefill_length: int
    max_batched_tokens: int
    slots: CacheShape
    layouts: Mapping[str, KVLayout]

    @classmethod
    def of(
        cls,
        parts: EngineParts,
        *,
        page_size: int,
        num_rows: int,
        prefill_length: int,
        width: int,
        max_batched_tokens: int,
    ) -> Self:
        """Make the steps of rows of up to `width` tokens, from the parts of an engine."""
        slots = slot_shape(num_rows, width, page_size)
        return cls(
            parts=parts,
            num_rows=num_rows,
            prefill_length=prefill_length,
            max_batched_tokens=max_batched_tokens,
            slots=slots,
            layouts=parts.kv_layouts(dict.fromkeys(parts.model.info.attention, slots)),
        )

    @property
    def layer_layouts(self) -> list[KVLayout]:
        """The layout of each layer of the cache, in the order in which the steps take layers."""
        groups = self.parts.model.info.groups
        return [self.layouts[group.name] for group in groups for _ in range(group.num_layers)]

    def prefill(
        self, weights: Weights, prompts: jax.Array, is_token: jax.Array, rows: DeviceRows
    ) -> BatchResult:
        """Process prompts int32 [B, prefill_length] with a new cache, and sample the first token of
        each row that is not finished.

        Padding may be anywhere: only tokens where `is_token` bool [B, prefill_length] is true
        count, in order. Memory and work depend on the tokens without padding.
        """
        lens = is_token.sum(axis=1, dtype=jnp.int32)
        last_hidden, cache = self._prompts(weights, prompts, is_token, lens)
        bucket = self._bucket("prefill")
        ops = self.parts.ops(bucket, self.layouts)
        logits = self.parts.model.logits(weights, ops, last_hidden)
        sampled, _ = sample_rows(self.parts, StepKey("sample", bucket), logits, rows, {})
        after = rows.advanced(sampled.tokens, ~rows.finished)
        return sampled.tokens[:, None], after, self._layers(cache)

    def decode(
        self, weights: Weights, layers: Sequence[CacheArrays], rows: DeviceRows, num_steps: int
    ) -> BatchResult:
        """Sample up to `num_steps` tokens for each unfinished row."""
        bucket = dataclasses.replace(
            self._bucket("decode"), rows_are_pages=self.slots.pages_per_slot == 1
        )
        rest = iter(layers)
        groups = self.parts.model.info.groups
        cache = {g.name: tuple(next(rest) for _ in range(g.num_layers)) for g in groups}
        row_ids: Any = jnp.arange(self.num_rows, dtype=jnp.int32)
        steps: Any = jnp.int32(num_steps)
        done, sampled = decode_step(
            weights,
            StepState(cache, rows),
            {},
            DecodeInputs(row_ids, steps),
            parts=self.parts,
            layouts=self.layouts,
            key=StepKey("decode", bucket),
            max_steps=num_steps,
            pages=self._tables(),
        )
        return sampled.tokens, done.rows, self._layers(done.cache)

    def _layers(self, cache: Any) -> list[CacheArrays]:
        return [layer for group in self.parts.model.info.groups for layer in cache[group.name]]

    def _tables(self) -> dict[str, jax.Array]:
        """Page tables int32 [B, pages per slot] by group: row i owns slot i."""
        pages = jnp.arange(self.num_rows * self.slots.pages_per_slot, dtype=jnp.int32)
        return dict.fromkeys(self.layouts, pages.reshape(self.num_rows, -1))

    def _empty_cache(self) -> dict[str, tuple[CacheArrays, ...]]:
        groups = self.parts.model.info.groups
        return {
            g.name: tuple(self.layouts[g.name].init() for _ in range(g.num_layers)) for g in groups
        }

    def _bucket(self, mode: Any) -> Bucket:
        rows, slots = self.num_rows, self.slots
        if mode == "decode":
            return Bucket(rows, rows, slots.pages_per_slot, 1, slots.capacity, mode)
        tokens = min(rows * self.prefill_length, self.max_batched_tokens)
        longest = min(tokens, self.prefill_length)
        context = longest if mode == "prefill" else slots.capacity
        return Bucket(tokens, rows, slots.pages_per_slot, longest, context, mode)

    def _prompts(
        self, weights: Weights, prompts: jax.Array, is_token: jax.Array, lens: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Run the model over the packed prompts, at most max_batched_tokens at a time. Returns
        (hidden [B, H] of each prompt's last token, the cache).
        """
        num_rows, model = self.num_rows, self.parts.model
        num_tokens = num_rows * self.prefill_length
        is_whole = num_tokens <= self.max_batched_tokens
        bucket = self._bucket("prefill" if is_whole else "mixed")
        part = bucket.tokens
        ends = jnp.cumsum(lens)
        starts = ends - lens
        packed = _packed(prompts, is_token, starts, -(-num_tokens // part) * part)
        tables, ops = self._tables(), self.parts.ops(bucket, self.layouts)

        def one(carry: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array, Any]:
            index, last_hidden, cache = carry
            low = index * part
            before = jnp.clip(low - starts, 0, lens)
            after = jnp.clip(low + part - starts, 0, lens)
            new = after - before
            # AttnBatch requires this order of rows: single tokens after a prefix, rows without a
            # prefix, the other rows, and rows without tokens last.
            kind = jnp.where(new == 0, 3, jnp.where(before == 0, 1, jnp.where(new == 1, 0, 2)))
            order = jnp.argsort(kind, stable=True)
            q_lens, kv_lens = new[order], after[order]
            # Where each row's tokens start in this part, in the new order, and in the packed
            # prompts.
            first = jnp.cumsum(q_lens) - q_lens
            source = low + jnp.maximum(starts - low, 0)
            row = jnp.searchsorted(jnp.cumsum(q_lens), jnp.arange(part), side="right")
            row = jnp.minimum(row, num_rows - 1)
            token_ids = packed[
                jnp.clip(source[order][row] + jnp.arange(part) - first[row], 0, packed.shape[0] - 1)
            ]
            moved = {g: table[order] for g, table in tables.items()}
            batches = batches_of(q_lens, kv_lens, moved, self.layouts, bucket)
            hidden, cache = model.hidden(weights, ops.in_step(batches), token_ids, cache, batches)
            ended = jnp.where((q_lens > 0) & (kv_lens == lens[order]), order, num_rows)
            last = hidden[jnp.maximum(first + q_lens - 1, 0)].astype(last_hidden.dtype)
            return index + 1, last_hidden.at[ended].set(last, mode="drop"), cache

        last_hidden = jnp.zeros((num_rows, model.info.hidden_size), model.info.hidden_dtype)
        start = (jnp.int32(0), last_hidden, self._empty_cache())
        done = (
            one(start)
            if is_whole
            else jax.lax.while_loop(lambda c: c[0] * part < ends[-1], one, start)
        )
        return done[1], done[2]


def _packed(
    prompts: jax.Array, is_token: jax.Array, starts: jax.Array, num_tokens: int
) -> jax.Array:
    """int32 [num_tokens]: the rows' tokens without padding, one row after the other. Row i begins
    at starts[i]; 0 follows the last row.
    """
    place = starts[:, None] + jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(is_token, place, num_tokens)
    return (
        jnp.zeros(num_tokens, jnp.int32).at[place.reshape(-1)].set(prompts.reshape(-1), mode="drop")
    )


def batch_rows(
    columns: Mapping[str, jax.Array], token_ids: jax.Array, is_token: jax.Array
) -> DeviceRows:
    """Make the rows of a batch from their columns (those of `DeviceRows`, without num_logprobs: the
    steps return no log-probabilities) and their tokens int32 [B, width], which count where
    `is_token` bool [B, width] is true.
    """
    num_rows, width = token_ids.shape
    place = jnp.where(is_token, jnp.cumsum(is_token, axis=1, dtype=jnp.int32) - 1, width)
    row = jnp.arange(num_rows)[:, None]
    history = jnp.zeros((num_rows, width), jnp.int32).at[row, place].set(token_ids, mode="drop")
    return DeviceRows.of({**columns, "num_logprobs": jnp.full(num_rows, -1, jnp.int32)}, history)
