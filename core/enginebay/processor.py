"""The contract of logits processors: what a request can have done to its scores before its token is
chosen.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel

from enginebay.row_value import RowValue, declared
from enginebay.sampler import SamplingState

ProcessorState = Mapping[str, jax.Array]
"""A processor's fields of S rows: each of shape [S, *field.shape]."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowField:
    """One value that a processor keeps for each row on the device, of a fixed shape."""

    dtype: str
    shape: tuple[int, ...] = ()


def option_fields(options: type[BaseModel]) -> dict[str, RowField]:
    """The fields of a processor whose options declare each a RowValue."""
    return {name: RowField(one.dtype) for name, one in declared(options, RowValue).items()}


def option_values(options: BaseModel) -> dict[str, Any]:
    """A request's values of these fields, within the declared limits."""
    values = declared(type(options), RowValue)
    return {name: one.clip(getattr(options, name)) for name, one in values.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What the shapes of a processor's fields may depend on."""

    vocab_size: int
    max_model_len: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowFacts:
    """What a processor may know of a request, on the host, when its fields are made."""

    prompt_token_ids: np.ndarray
    eos_token_ids: tuple[int, ...]
    """Those that end this request; none when it ignores them."""
    sizes: Sizes


class LogitsProcessor(ABC):
    """What a plugin registers as kind "logits_processor": one instance serves all rows, and keeps
    nothing itself.

    All of a request's parameters, and whatever changes from token to token, are its row's fields:
    arrays on the device that are written when the request gets its row. Requests name a processor
    and its options (`SamplingParams.processors`), which the declaration's options model validates.
    A step calls it only when one of its rows uses it, with all of them or with a few at a time
    (`Platform.rows_at_once`), and rows that do not use it keep their logits, whatever comes back
    for them: the core sees to both.

    Invariants (held by the conformance suite, enginebay_testing.processors): a row's result depends
    on its own logits, fields, key, tokens, position and temperature only; it is finite or -inf,
    what was -inf stays so, and some token stays possible wherever one was; with `keeps_argmax` the
    first best token stays the first best. Fields of a row that does not use it may be anything: it
    must end for them too. A processor that draws takes `position_keys` with a stream of its own.
    """

    keeps_argmax = False
    """Whether the first best token stays the first best: then a row that takes it anyway does
    without the processor.
    """

    reads_tokens = False
    """Whether it looks at state.token_ids: the row's history is kept for those rows only that need
    it.
    """

    @abstractmethod
    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """The fields of a row, by name."""

    @abstractmethod
    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """A request's values of all fields, as NumPy takes them. RequestError for what cannot be
        served: the request is not queued.
        """

    @abstractmethod
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """logits f32 [S, vocab] (-inf allowed) -> f32 [S, vocab]; traced inside the step. `state`
        is that of the same rows.
        """

    def after(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        processor_state: ProcessorState,
        state: SamplingState,
    ) -> ProcessorState:
        """The fields after tokens int32 [S] were chosen, given the logits [S, vocab] that the
        processor was given.

        Only of a processor that declares `evolves`; only the fields that change need be returned.
        """
        raise NotImplementedError(f"{type(self).__name__} declares `evolves` and has no after()")

    evolves = False
    """Whether fields change with each token, by `after`."""


Processors = tuple[tuple[str, LogitsProcessor], ...]
"""Processors by name, in the order in which they are applied."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowValues:
    """A processor's fields of one row on the host, without the axis of rows."""

    name: str
    values: Mapping[str, np.ndarray]


def row_values(name: str, processor: LogitsProcessor, options: Any, facts: RowFacts) -> RowValues:
    """What a request's row has of a processor, each value of its field's dtype and shape. Raises
    what `row` raises.
    """
    fields = processor.fields(facts.sizes)
    values = processor.row(options, facts)
    if set(values) != set(fields):
        raise TypeError(
            f"logits processor {name!r} gives {sorted(values)} for its fields {sorted(fields)}"
        )
    arrays = {n: np.asarray(values[n], field.dtype) for n, field in fields.items()}
    wrong = next((n for n, field in fields.items() if arrays[n].shape != field.shape), None)
    if wrong is not None:
        raise TypeError(
            f"logits processor {name!r} gives {wrong} of shape {arrays[wrong].shape}, "
            f"not {fields[wrong].shape}"
        )
    return RowValues(name, arrays)


IS_USED = "is_used"
"""The field that the core adds to each processor's: whether the row uses it."""
