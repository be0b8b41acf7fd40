"""The two compiled functions of the vInference API: prefill of the prompts, and one chunk of decode
steps.

Both are pure and compiled once per shape. They run the core's own steps on arrays that belong to a
SampleState: the same model, ops, sampler and layout as the engine behind `LLM`, on a cache with one
slot per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import KVLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import DecodeInputs
from enginebay.contracts.model import Weights
from enginebay.ops.spec import Bucket
from enginebay.types import StepVariant
from enginebay_runtime.device import DeviceRows
from enginebay_runtime.step import Program, StepState, batches_of, decode_step
from enginebay_vinference.partition import LEAF_NAMES

Arrays = dict[str, Any]
"""The ARRAY_FIELDS of a SampleState by name, which the functions take (donated) and return. The
cache, model_kwargs/past_key_values, exists after the prefill.
"""

Function = Callable[[Weights, Arrays, jax.Array], tuple[Arrays, jax.Array]]
"""(weights, arrays, the rows' raw keys uint32 [B, 2]) -> (arrays, int32 [2]: number of sampled
tokens, number of unfinished rows).
"""


@dataclasses.dataclass(frozen=True)
class InferenceShape:
    """Sizes of one pair of compiled functions.

    num_rows: B. prefill_length: columns of the padded prompt. width: all columns. chunk: tokens per
    decode call. max_batched_tokens: max tokens of one pass over the prompts; more tokens take
    several passes. pad_token_id: written to the columns of finished rows.
    """

    num_rows: int
    prefill_length: int
    width: int
    chunk: int
    max_batched_tokens: int
    pad_token_id: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts at full length."""
        return self.num_rows * self.prefill_length


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The inputs that the functions are compiled from: the program, the shape, the cache's slots
    and each cache group's layout.
    """

    program: Program
    shape: InferenceShape
    slots: CacheShape
    layouts: Mapping[str, KVLayout]

    def tables(self) -> dict[str, jax.Array]:
        """Page tables int32 [B, pages per slot] by group: row i owns slot i."""
        pages = jnp.arange(self.shape.num_rows * self.slots.pages_per_slot, dtype=jnp.int32)
        return dict.fromkeys(self.layouts, pages.reshape(self.shape.num_rows, -1))

    def empty_cache(self) -> dict[str, tuple[dict[str, jax.Array], ...]]:
        """Zero-filled cache arrays of every layer, by group."""
        groups = self.program.model.info.groups
        return {
            g.name: tuple(self.layouts[g.name].init() for _ in range(g.num_layers)) for g in groups
        }


def prefill(
    recipe: Recipe, weights: Weights, arrays: Arrays, keys: jax.Array
) -> tuple[Arrays, jax.Array]:
    """Process the prompts in sequences[:, :prefill_length] with a new cache, and sample each row's
    first token.

    Padding may be anywhere: only tokens under the mask count, in order. A row without tokens is
    finished.
    """
    shape = recipe.shape
    prompt = arrays["sequences"][:, : shape.prefill_length]
    real = arrays["model_kwargs"]["attention_mask"][:, : shape.prefill_length] > 0
    lens = real.sum(axis=1, dtype=jnp.int32)
    last_hidden, cache = _prompts(recipe, weights, prompt, real, lens)
    finished = lens == 0
    rows = _device_rows(recipe, arrays, keys, length=lens, finished=finished)
    logits = recipe.program.model.logits(
        weights,
        recipe.program.make_ops(_bucket(recipe, "prefill"), recipe.layouts),
        last_hidden,
    )
    sampled, _ = recipe.program.sample(logits, rows, {}, StepVariant.FULL)
    after = rows.advanced(sampled.tokens, ~finished)
    return _arrays_after(recipe, arrays, after, cache, sampled.tokens[:, None])


def decode_tokens(
    recipe: Recipe, weights: Weights, arrays: Arrays, keys: jax.Array
) -> tuple[Arrays, jax.Array]:
    """Sample up to `chunk` tokens for each unfinished row."""
    shape = recipe.shape
    rows_are_pages = recipe.slots.pages_per_slot == 1
    bucket = dataclasses.replace(_bucket(recipe, "decode"), rows_are_pages=rows_are_pages)
    kwargs, finished = arrays["model_kwargs"], arrays["is_sequence_finished"]
    length = kwargs["position_ids"][:, 0] + 1
    rows = _device_rows(recipe, arrays, keys, length=length, finished=finished)
    names = {leaf: name for name, leaf in LEAF_NAMES.items()}
    layers = iter(kwargs["past_key_values"]["views"])
    cache = {
        g.name: tuple(
            {names[leaf]: array for leaf, array in next(layers).items()}
            for _ in range(g.num_layers)
        )
        for g in recipe.program.model.info.groups
    }
    row_ids: Any = jnp.arange(shape.num_rows, dtype=jnp.int32)
    done, sampled = decode_step(
        weights,
        StepState(cache, rows),
        {},
        DecodeInputs(row_ids, jnp.int32(shape.chunk)),
        program=recipe.program,
        layouts=recipe.layouts,
        bucket=bucket,
        max_steps=shape.chunk,
        pages=recipe.tables(),
    )
    return _arrays_after(recipe, arrays, done.rows, done.cache, sampled.tokens)


def _bucket(recipe: Recipe, mode: Any) -> Bucket:
    shape, slots = recipe.shape, recipe.slots
    if mode == "decode":
        return Bucket(shape.num_rows, shape.num_rows, slots.pages_per_slot, 1, slots.capacity, mode)
    tokens = min(shape.prompt_tokens, shape.max_batched_tokens)
    longest = min(tokens, shape.prefill_length)
    context = longest if mode == "prefill" else slots.capacity
    return Bucket(tokens, shape.num_rows, slots.pages_per_slot, longest, context, mode)


def _packed(prompt: jax.Array, real: jax.Array, starts: jax.Array, num_tokens: int) -> jax.Array:
    """int32 [num_tokens]: the rows' tokens without padding, one row after the other. Row i begins
    at starts[i]; 0 follows the last row.
    """
    place = starts[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(real, place, num_tokens)
    return (
        jnp.zeros(num_tokens, jnp.int32).at[place.reshape(-1)].set(prompt.reshape(-1), mode="drop")
    )


def _prompts(
    recipe: Recipe, weights: Weights, prompt: jax.Array, real: jax.Array, lens: jax.Array
) -> tuple[jax.Array, Any]:
    """Run the model over the packed prompts, at most max_batched_tokens at a time.

    Memory and work depend on the tokens without padding. Returns (hidden [B, H] of each prompt's
    last token, the cache).
    """
    shape, model = recipe.shape, recipe.program.model
    is_whole = shape.prompt_tokens <= shape.max_batched_tokens
    bucket = _bucket(recipe, "prefill" if is_whole else "mixed")
    num_rows, part = shape.num_rows, bucket.tokens
    ends = jnp.cumsum(lens)
    starts = ends - lens
    packed = _packed(prompt, real, starts, -(-shape.prompt_tokens // part) * part)
    tables, ops = recipe.tables(), recipe.program.make_ops(bucket, recipe.layouts)

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
        # Where each row's tokens start in this part, in the new order, and in the packed prompts.
        first = jnp.cumsum(q_lens) - q_lens
        source = low + jnp.maximum(starts - low, 0)
        row = jnp.searchsorted(jnp.cumsum(q_lens), jnp.arange(part), side="right")
        row = jnp.minimum(row, num_rows - 1)
        token_ids = packed[
            jnp.clip(source[order][row] + jnp.arange(part) - first[row], 0, packed.shape[0] - 1)
        ]
        moved = {g: table[order] for g, table in tables.items()}
        batches = batches_of(q_lens, kv_lens, moved, recipe.layouts, bucket)
        hidden, cache = model.hidden(weights, ops.in_step(batches), token_ids, cache, batches)
        ended = jnp.where((q_lens > 0) & (kv_lens == lens[order]), order, num_rows)
        last = hidden[jnp.maximum(first + q_lens - 1, 0)].astype(last_hidden.dtype)
        return index + 1, last_hidden.at[ended].set(last, mode="drop"), cache

    last_hidden = jnp.zeros((num_rows, model.info.hidden_size), model.info.hidden_dtype)
    start = (jnp.int32(0), last_hidden, recipe.empty_cache())
    done = (
        one(start) if is_whole else jax.lax.while_loop(lambda c: c[0] * part < ends[-1], one, start)
    )
    return done[1], done[2]


def _device_rows(
    recipe: Recipe, arrays: Arrays, keys: jax.Array, *, length: jax.Array, finished: jax.Array
) -> DeviceRows:
    """The state's rows as the core's steps take them."""
    num_rows, width = recipe.shape.num_rows, recipe.shape.width
    mask = arrays["model_kwargs"]["attention_mask"] > 0
    place = jnp.where(mask, jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, width)
    row = jnp.arange(num_rows)[:, None]
    history = jnp.zeros((num_rows, width), jnp.int32)
    columns = {
        "last_token": arrays["running_token"][:, 0],
        "length": length,
        "finished": finished,
        "keys": keys,
        # A state does not store log-probabilities.
        "num_logprobs": jnp.full(num_rows, -1, jnp.int32),
        **arrays["model_kwargs"]["sampling"],
    }
    return DeviceRows.of(columns, history.at[row, place].set(arrays["sequences"], mode="drop"))


def _arrays_after(
    recipe: Recipe, before: Arrays, rows: DeviceRows, cache: Any, sampled: jax.Array
) -> tuple[Arrays, jax.Array]:
    """The arrays with sampled tokens int32 [B, steps] appended; -1 marks a row without a
    new token.
    """
    new, kwargs = sampled >= 0, before["model_kwargs"]
    num_run = new.any(axis=0).sum(dtype=jnp.int32)
    step = jnp.arange(sampled.shape[1], dtype=jnp.int32)
    column = jnp.where(step < num_run, before["current_length"] + step, recipe.shape.width)
    tokens = jnp.where(new, sampled, recipe.shape.pad_token_id)
    mask = kwargs["attention_mask"].at[:, column].set(new.astype(jnp.int32), mode="drop")
    views = [
        {LEAF_NAMES[name]: array for name, array in layer.items()}
        for group in recipe.program.model.info.groups
        for layer in cache[group.name]
    ]
    after = {
        "current_length": before["current_length"] + num_run,
        "sequences": before["sequences"].at[:, column].set(tokens, mode="drop"),
        "running_token": rows.last_token[:, None],
        "is_sequence_finished": rows.finished,
        "model_kwargs": {
            "attention_mask": mask,
            "position_ids": rows.length[:, None] - 1,
            "sampling": kwargs["sampling"],
            "past_key_values": {"views": views},
        },
    }
    return after, jnp.stack([new.sum(dtype=jnp.int32), (~rows.finished).sum(dtype=jnp.int32)])
