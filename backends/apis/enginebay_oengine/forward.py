"""execute_forward: one step over the paged cache. It is pure, compiled once per shape, and calls
the core's step functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util

from enginebay.contracts.cache import KVLayout
from enginebay.contracts.commands import DecodeInputs, PrefillInputs
from enginebay.contracts.model import Weights
from enginebay.ops import prefill_columns as columns
from enginebay_oengine.model_inputs import DecodePart, ModelInputBatch, PrefillPart
from enginebay_oengine.paged_cache import PagedAttentionCache
from enginebay_runtime.device import DeviceRows
from enginebay_runtime.prefill import prefill_step
from enginebay_runtime.step import Program, StepState, compact_decode_step, decode_step

_FIELDS = ("complete", "token_id", "next_position", "packed")


@dataclasses.dataclass(frozen=True, eq=False)
class GraphDef:
    """The static argument of a step: the program, each cache group's layout, whether decodes use a
    compact copy of the cache, number of slots, and pad token id.
    """

    program: Program
    layouts: Mapping[str, KVLayout]
    compact_decode: bool
    num_slots: int
    pad_token_id: int


@functools.partial(
    tree_util.register_dataclass,
    data_fields=[f"{part}_{field}" for part in ("prefill", "decodes") for field in _FIELDS],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class ModelOutputBatch:
    """The results of a step for the P rows of its prefill and the B slots; None for a part that did
    not run.

    complete bool [P], [B]: whether the row has ended. token_id int32: its new token, -1 for none.
    next_position int32: the position of its next token, or of its next chunk; -1 when it has ended
    or did not run. packed int32 [., 3]: the data of ResultTokens.
    """

    prefill_complete: Any = None
    prefill_token_id: Any = None
    prefill_next_position: Any = None
    prefill_packed: Any = None
    decodes_complete: Any = None
    decodes_token_id: Any = None
    decodes_next_position: Any = None
    decodes_packed: Any = None


def execute_forward(
    graphdef: GraphDef,
    graphstate: Weights,
    graphothers: Weights,
    inputs: ModelInputBatch,
    storage: PagedAttentionCache,
    rows: DeviceRows,
    rngs: jax.Array | None,
) -> tuple[ModelOutputBatch, PagedAttentionCache, DeviceRows]:
    """Run the parts of `inputs`, the prefill first. The compiled version donates storage and rows.

    rngs uint32 [2]: folded into the rows' own keys for this decode. None: rows use their own keys.
    """
    weights = {**graphstate, **graphothers}
    state = StepState(storage.views, rows)
    found: dict[str, jax.Array] = {}
    if inputs.prefill is not None:
        state, output = _prefill(graphdef, weights, inputs.prefill, state)
        found |= {f"prefill_{name}": value for name, value in output.items()}
    if inputs.decode is not None:
        state, output = _decode(graphdef, weights, inputs.decode, state, rngs)
        found |= {f"decodes_{name}": value[: graphdef.num_slots] for name, value in output.items()}
    return ModelOutputBatch(**found), PagedAttentionCache(state.cache), state.rows


def _prefill(
    graphdef: GraphDef, weights: Weights, part: PrefillPart, state: StepState
) -> tuple[StepState, dict[str, jax.Array]]:
    token_ids: Any = jnp.asarray(part.token_ids)
    ints: Any = jnp.asarray(part.ints)
    floats: Any = jnp.asarray(part.floats)
    state, sampled = prefill_step(
        weights,
        state,
        PrefillInputs(token_ids, ints, floats),
        dict.fromkeys(graphdef.layouts, jnp.asarray(part.table)),
        program=graphdef.program,
        layouts=graphdef.layouts,
        bucket=part.bucket,
    )
    return state, _output(
        graphdef, state.rows, ints[:, columns.ROW], sampled.tokens[:, 0], ints[:, columns.KV_LEN]
    )


def _decode(
    graphdef: GraphDef, weights: Weights, part: DecodePart, state: StepState, rngs: jax.Array | None
) -> tuple[StepState, dict[str, jax.Array]]:
    row_ids: Any = jnp.asarray(part.row_ids)
    own = state.rows.keys
    if rngs is not None:
        state = StepState(state.cache, dataclasses.replace(state.rows, keys=_folded(own, rngs)))
    step = compact_decode_step if graphdef.compact_decode else decode_step
    state, sampled = step(
        weights,
        state,
        {},
        DecodeInputs(row_ids, jnp.int32(1)),
        program=graphdef.program,
        layouts=graphdef.layouts,
        bucket=part.bucket,
        max_steps=1,
        pages=dict.fromkeys(graphdef.layouts, jnp.asarray(part.table)),
    )
    rows = dataclasses.replace(state.rows, keys=own)
    lengths = rows.length.at[row_ids].get(mode="fill", fill_value=0)
    return StepState(state.cache, rows), _output(
        graphdef, rows, row_ids, sampled.tokens[:, 0], lengths - 1
    )


def _folded(keys: jax.Array, words: jax.Array) -> jax.Array:
    def fold(key: jax.Array) -> jax.Array:
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.key_data(
            jax.random.fold_in(jax.random.fold_in(typed, words[0]), words[1])
        )

    return jax.vmap(fold)(keys)


def _output(
    graphdef: GraphDef,
    rows: DeviceRows,
    row_ids: jax.Array,
    tokens: jax.Array,
    next_position: jax.Array,
) -> dict[str, jax.Array]:
    """The output fields of rows [S] with tokens [S], -1 for none."""
    is_row = row_ids < rows.length.shape[0]
    valid = tokens >= 0
    complete = valid & rows.finished.at[row_ids].get(mode="fill", fill_value=False)
    columns = (rows.length, rows.prompt_length)
    length, prompt = (column.at[row_ids].get(mode="fill", fill_value=0) for column in columns)
    num_sampled = jnp.maximum(length - prompt, 0)
    packed = jnp.stack(
        [jnp.where(valid, tokens, graphdef.pad_token_id), valid, num_sampled], axis=1
    )
    return {
        "complete": complete,
        "token_id": tokens,
        "next_position": jnp.where(is_row & ~complete, next_position, -1),
        "packed": packed.astype(jnp.int32),
    }
