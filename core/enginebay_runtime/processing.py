"""Logits processors inside a step: each processor changes the logits of the rows that use it, and
its fields of these rows are updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from enginebay.contracts.processor import (
    IS_USED,
    LogitsProcessor,
    Processors,
    ProcessorState,
    Sizes,
)
from enginebay.contracts.sampler import SamplingState
from enginebay.ops.update_rows import update_rows


def empty_rows(
    processors: Processors, num_rows: int, sizes: Sizes
) -> dict[str, dict[str, np.ndarray]]:
    """Fields by processor, for rows that use no processor. They are NumPy arrays."""
    return {
        name: {IS_USED: np.zeros(num_rows, np.bool_)}
        | {
            n: np.zeros((num_rows, *field.shape), field.dtype)
            for n, field in processor.fields(sizes).items()
        }
        for name, processor in processors
    }


def process(
    processors: Processors,
    logits: jax.Array,
    rows: Mapping[str, ProcessorState],
    state: SamplingState,
    *,
    rows_at_once: int | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Apply the processors to logits f32 [S, vocab], one after the other. Returns the logits, and
    by name the logits that each evolving processor received.

    A processor's cost depends on the rows that use it, see `update_rows`.
    """
    given: dict[str, jax.Array] = {}
    for name, processor in processors:
        if name not in rows:
            continue
        if processor.evolves:
            given[name] = logits

        def processed(
            logits: jax.Array, of: Any, processor: LogitsProcessor = processor
        ) -> jax.Array:
            return processor(logits, *of)

        processor_state = rows[name]
        logits = update_rows(
            processor_state[IS_USED],
            processed,
            logits,
            (processor_state, state),
            rows_at_once=rows_at_once,
        )
    return logits, given


def evolve(
    processors: Processors,
    given: Mapping[str, jax.Array],
    tokens: jax.Array,
    rows: Mapping[str, ProcessorState],
    state: SamplingState,
    active: jax.Array,
    *,
    rows_at_once: int | None = None,
) -> dict[str, ProcessorState]:
    """The rows' fields after tokens int32 [S] were chosen, where `active` bool [S]."""
    after = dict(rows)
    for name, processor in processors:
        if name not in given:
            continue

        def evolved(
            processor_state: ProcessorState, of: Any, processor: LogitsProcessor = processor
        ) -> ProcessorState:
            logits, tokens, state = of
            return {**processor_state, **processor.after(logits, tokens, processor_state, state)}

        processor_state, of = dict(rows[name]), (given[name], tokens, state)
        after[name] = update_rows(
            processor_state[IS_USED] & active,
            evolved,
            processor_state,
            of,
            rows_at_once=rows_at_once,
        )
    return after
