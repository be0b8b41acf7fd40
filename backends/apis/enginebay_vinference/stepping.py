"""Stepper: runs the compiled functions on SampleStates, and makes the first state of a
generation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from enginebay.contracts.model import Weights
from enginebay.errors import InputError, NonFiniteError
from enginebay.ops.row_columns import by_name, neutral_columns, write_row
from enginebay.types import MAX_STOP_TOKENS, NOT_FINITE, Request, key_of
from enginebay_vinference.precompile import vInferencePreCompileConfig
from enginebay_vinference.state import ARRAY_FIELDS, SampleState, row_keys
from enginebay_vinference.state_steps import (
    Arrays,
    Function,
    InferenceShape,
    ProgramKind,
    Programs,
    Use,
)


class Stepper:
    """Steps of states: packs a state's arrays for a function, runs it, and makes the next state."""

    def __init__(self, programs: Programs, *, chunk: int, pad_token_id: int) -> None:
        self.programs = programs
        self.chunk = chunk
        self.pad_token_id = pad_token_id

    def shape(self, num_rows: int, prefill_length: int, width: int) -> InferenceShape:
        """Return the shape of states of these sizes."""
        most = self.programs.engine.parts.config.max_num_batched_tokens
        return InferenceShape(num_rows, prefill_length, width, self.chunk, most, self.pad_token_id)

    def shape_of(self, state: SampleState) -> InferenceShape:
        """Return the shape of a state."""
        num_rows, width = state.sequences.shape
        return self.shape(num_rows, int(state.padded_length), width)

    def first_state(
        self,
        shape: InferenceShape,
        input_ids: np.ndarray,
        attention_mask: np.ndarray,
        sampling: Mapping[str, np.ndarray],
        prng_key: jax.Array,
        compile_config: vInferencePreCompileConfig,
    ) -> SampleState:
        """Make the state before the prefill of input_ids int32 [B, prefill_length] under
        attention_mask; it has no cache.
        """
        tokens = np.full((shape.num_rows, shape.width), shape.pad_token_id, np.int32)
        mask = np.zeros_like(tokens)
        tokens[:, : shape.prefill_length] = np.where(
            attention_mask > 0, input_ids, shape.pad_token_id
        )
        mask[:, : shape.prefill_length] = attention_mask > 0
        counts = mask.sum(axis=1, dtype=np.int32)
        values = {
            "current_length": np.int32(shape.prefill_length),
            "sequences": tokens,
            "running_token": np.zeros((shape.num_rows, 1), np.int32),
            "is_sequence_finished": counts == 0,
            "model_kwargs": {
                "attention_mask": mask,
                "position_ids": counts[:, None] - 1,
                "sampling": dict(sampling),
            },
        }
        where = self.programs.arrays(shape, "prefill")
        arrays = jax.tree.map(lambda v, like: jax.device_put(v, like.sharding), values, where)
        return SampleState(
            **arrays,
            prng_key=prng_key,
            padded_length=shape.prefill_length,
            _compile_config=compile_config,
        )

    def run(
        self,
        kind: ProgramKind,
        state: SampleState,
        weights: Weights,
        function: Function | None = None,
        use: Use | None = None,
    ) -> SampleState:
        """Run a function and return the next state; `state` is spent. `use`: the Use of the
        generation.
        """
        with use or self.programs.use() as held:
            state.check_not_spent()
            _check_stage(kind, state)
            shape = self.shape_of(state)
            arrays = self._pack(shape, kind, state)
            if function is None:
                function = getattr(held.get(shape), kind)
            replicated = self.programs.engine.parts.placement.replicated
            keys = jax.device_put(row_keys(state.prng_key, shape.num_rows), replicated)
            start = time.perf_counter()
            after, counts = function(weights, arrays, keys)
            num_new, _ = np.asarray(counts).tolist()
            _check_finite(kind, np.asarray(after["running_token"]))
            seconds = time.perf_counter() - start
            _spend(arrays, after)
        spent = float(state._time_spent_computing) + (seconds if kind == "decode" else 0.0)
        rate = float(state.tokens_per_second)
        if kind == "decode" and spent > 0:
            decoded = max(rate, 0.0) * float(state._time_spent_computing) + num_new
            rate = decoded / spent
        return SampleState(
            **after,
            prng_key=state.prng_key,
            tokens_per_second=rate,
            generated_tokens=int(state.generated_tokens) + num_new,
            padded_length=state.padded_length,
            _time_spent_computing=spent,
            _compile_config=state._compile_config,
        )

    def check(self, state: SampleState) -> None:
        """Raise SpentStateError for a spent state, and InputError for a state of another model."""
        state.check_not_spent()
        state.check(self.programs.engine.parts.model.info.vocab_size)

    def make_key(self, seed: int) -> jax.Array:
        """Return the typed key of a seed, which is equal to the key of a request with this seed in
        every engine.
        """
        words = np.array(key_of(seed), np.uint32)
        return jax.random.wrap_key_data(jax.device_put(words), impl="threefry2x32")

    def with_sampling(self, state: SampleState, sampling: Mapping[str, np.ndarray]) -> SampleState:
        """Return `state` with other sampling parameters."""
        placed = {
            name: jax.device_put(
                value, self.programs.placement.sharding(f"model_kwargs/sampling/{name}")
            )
            for name, value in sampling.items()
        }
        return state.replace(model_kwargs={**state.model_kwargs, "sampling": placed})

    def _pack(self, shape: InferenceShape, kind: ProgramKind, state: SampleState) -> Arrays:
        """The state's arrays on the devices of the function. InputError when their shapes do not
        match.
        """
        where = self.programs.arrays(shape, kind)
        try:
            arrays = {name: getattr(state, name) for name in ARRAY_FIELDS}
            kwargs = {name: state.model_kwargs[name] for name in where["model_kwargs"]}
            return jax.tree.map(_place, arrays | {"model_kwargs": kwargs}, where)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"a state of another model or configuration ({error})",
                f"a state of {shape}",
                "Use the model and configuration that made this state.",
            ) from error


def sampling_columns(
    requests: Sequence[Request], num_rows: int, max_new_tokens: int
) -> dict[str, np.ndarray]:
    """Return the sampling columns of `num_rows` rows: the requests' parameters first, then neutral
    values.
    """
    floats, ints = neutral_columns(num_rows)
    columns = by_name(floats, ints) | {
        "prompt_length": np.zeros(num_rows, np.int32),
        "max_length": np.zeros(num_rows, np.int32),
        "stop_ids": np.full((num_rows, MAX_STOP_TOKENS), -1, np.int32),
    }
    for row, request in enumerate(requests):
        sampling, length = request.sampling, len(request.prompt_token_ids)
        columns["prompt_length"][row] = length
        columns["max_length"][row] = length + min(sampling.max_tokens, max_new_tokens)
        columns["stop_ids"][row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        write_row(floats[row], ints[row], sampling.params)
    return columns


def has_cache(state: SampleState) -> bool:
    """Whether its prompts were processed."""
    return "past_key_values" in (state.model_kwargs or ())


def is_finished(state: SampleState) -> bool:
    """Return whether all rows have finished; waits for the device."""
    return bool(np.asarray(state.is_sequence_finished).all())


def _check_stage(kind: ProgramKind, state: SampleState) -> None:
    """Raise InputError for a decode before the prefill, and for a second prefill."""
    has_one = has_cache(state)
    if kind == "decode" and not has_one:
        raise InputError(
            "a state without a cache", "a state after its prefill", "Call execute_prefill first."
        )
    if kind == "prefill" and has_one:
        raise InputError(
            "a state after its prefill", "a state of init_state()", "Call execute_decode instead."
        )


def _place(value: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"a {type(value).__name__} in place of {like.dtype}{list(like.shape)}")
    if np.shape(value) != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"{value.dtype}{list(np.shape(value))} in place of {like.dtype}{list(like.shape)}"
        )
    if isinstance(value, jax.Array) and value.sharding == like.sharding:
        return value
    return jax.device_put(value, like.sharding)


def _spend(before: Arrays, after: Arrays) -> None:
    """Delete the arrays that XLA did not reuse, so that a spent state is spent on every
    platform.
    """
    kept = {id(leaf) for leaf in jax.tree.leaves(after)}
    for leaf in jax.tree.leaves(before):
        if id(leaf) not in kept and not leaf.is_deleted():
            leaf.delete()


def _check_finite(kind: ProgramKind, running_token: np.ndarray) -> None:
    """Raise NonFiniteError if the logits of a row had NaN or infinity; running_token [B, 1]."""
    rows = np.flatnonzero(running_token[:, 0] == NOT_FINITE).tolist()
    if rows:
        given = f"the logits of row {rows[0]} in a {kind} step have NaN or infinity"
        todo = "Look for broken weights with verify_weights, and for overflow of dtype float16."
        raise NonFiniteError(given, "finite logits", todo)
