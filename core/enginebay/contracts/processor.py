"""The contract of logits processors, which change a row's logits before its token is chosen."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel

from enginebay.contracts.sampler import SamplingState
from enginebay.row_value import RowValue, declared

ProcessorState = Mapping[str, jax.Array]
"""The fields of one processor for S rows: name -> array [S, *field.shape]."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowField:
    """One field that a processor keeps for each row on the device: its dtype and fixed shape."""

    dtype: str
    shape: tuple[int, ...] = ()


def option_fields(options: type[BaseModel]) -> dict[str, RowField]:
    """Return the fields of a processor whose options declare a RowValue for each field."""
    return {name: RowField(one.dtype) for name, one in declared(options, RowValue).items()}


def option_values(options: BaseModel) -> dict[str, Any]:
    """Return a request's values of the fields of `option_fields`, within their declared limits."""
    values = declared(type(options), RowValue)
    return {name: one.clip(getattr(options, name)) for name, one in values.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the engine that the shapes of a processor's fields may depend on."""

    vocab_size: int
    max_model_len: int
    padding_from: int | None = None
    """As in ModelInfo. A processor refuses the ids from here on, and the logits that it receives
    have -inf there.
    """

    @property
    def num_token_ids(self) -> int:
        """The number of ids that a request may name: vocab_size without its padding."""
        return self.vocab_size if self.padding_from is None else self.padding_from


@dataclasses.dataclass(frozen=True, slots=True)
class RowFacts:
    """Facts about a request that a processor may use, on the host, to make the row's fields."""

    prompt_token_ids: np.ndarray
    eos_token_ids: tuple[int, ...]
    """The end-of-sequence ids that end this request; () when it ignores them."""
    sizes: Sizes


class LogitsProcessor(ABC):
    """A plugin registers a subclass as kind "processor". One instance serves all rows and
    has no state of its own.

    The parameters of a request, and all values that change from token to token, are *fields* of the
    row: arrays on the device that are written when the request gets its row. Requests name a
    processor and its options in `SamplingParams.processors`; the options model of the declaration
    validates them. A step calls the processor only when one of its rows uses it, with all rows or
    with a few at a time (`Platform.rows_at_once`). The core discards the results for rows that do
    not use the processor.

    Invariants (tested by the conformance suite, enginebay_testing.processors):

    - A row's result depends only on its own logits, fields, key, tokens, position and temperature.
    - The result is finite or -inf. A logit of -inf stays -inf. If some token was possible before,
      some token is possible afterwards.
    - With `keeps_argmax`, the first token with the highest logit stays the same.
    - The computation ends whatever the fields contain: the fields of rows that do not use the
      processor have arbitrary values.
    - A processor that draws random numbers uses `enginebay.ops.sampling.position_keys` with a
      stream number of its own.
    """

    keeps_argmax = False
    """Whether the first token with the highest logit always stays the same. If so, rows that decode
    greedily skip the processor.
    """

    reads_tokens = False
    """Whether the processor reads state.token_ids, which is kept only for rows that need it."""

    @abstractmethod
    def fields(self, sizes: Sizes) -> Mapping[str, RowField]:
        """Return the fields of a row, by name."""

    @abstractmethod
    def row(self, options: Any, facts: RowFacts) -> Mapping[str, Any]:
        """Return a request's values of all fields, in any form that NumPy converts. Raises
        RequestError for a request that the processor cannot serve, which is then not queued.
        """

    @abstractmethod
    def __call__(
        self, logits: jax.Array, processor_state: ProcessorState, state: SamplingState
    ) -> jax.Array:
        """Return the new logits, f32 [S, vocab], for logits f32 [S, vocab], which may be -inf.
        Traced inside the step. `processor_state` and `state` are of the same S rows.
        """

    def after(
        self,
        logits: jax.Array,
        tokens: jax.Array,
        processor_state: ProcessorState,
        state: SamplingState,
    ) -> ProcessorState:
        """Return the fields after tokens int32 [S] were chosen; fields that do not change may be
        left out. `logits` [S, vocab] are those that the processor received.

        Called only when `evolves` is True.
        """
        raise NotImplementedError(f"{type(self).__name__} declares `evolves` and has no after()")

    evolves = False
    """Whether the fields change with each token; `after` then computes the new values."""


Processors = tuple[tuple[str, LogitsProcessor], ...]
"""Pairs of name and processor, in the order in which the processors are applied."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowValues:
    """The values of one processor's fields for one row, on the host: arrays without a row axis."""

    name: str
    values: Mapping[str, np.ndarray]


def row_values(name: str, processor: LogitsProcessor, options: Any, facts: RowFacts) -> RowValues:
    """Return the values of `processor.row` for a request, each converted to its field's dtype.

    TypeError when a field is missing, is unknown or has the wrong shape; errors of `row` pass
    through.
    """
    fields = processor.fields(facts.sizes)
    values = processor.row(options, facts)
    if set(values) != set(fields):
        raise TypeError(
            f"logits processor {name!r}: row() returned the fields {sorted(values)}, but fields() "
            f"declares {sorted(fields)}"
        )
    arrays = {n: np.asarray(values[n], field.dtype) for n, field in fields.items()}
    wrong = next((n for n, field in fields.items() if arrays[n].shape != field.shape), None)
    if wrong is not None:
        raise TypeError(
            f"logits processor {name!r}: row() returned {wrong} of shape {arrays[wrong].shape}; "
            f"fields() declares {fields[wrong].shape}"
        )
    return RowValues(name, arrays)


IS_USED = "is_used"
"""The field that the core adds to the fields of each processor: whether the row uses it."""
