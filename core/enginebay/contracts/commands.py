"""Commands: every change of the device's state, as a flat record of NumPy arrays, numbers and
names.

An engine makes commands, and an executor runs them in order. They need no pickle:
`enginebay_runtime.codec` turns a command into bytes, and the bytes into a command in any process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Generic, TypeVar

import jax
import numpy as np

from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.engine import Pending, RowState
from enginebay.contracts.processor import RowValues
from enginebay.contracts.step_key import StepKey

Result_co = TypeVar("Result_co", covariant=True)


class ExecutorCommand(Generic[Result_co]):
    """A command; one of COMMANDS. An executor that runs it returns a `Result`."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class KnownTokens:
    """The first tokens of a row, int32, that no prefill chunk brings because their keys and values
    are cached.
    """

    row: int
    token_ids: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class RowUpdate:
    """Fields of logits processors to write to a row."""

    row: int
    values: tuple[RowValues, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "ints", "floats", "targets", "embeds"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Arrays of a prefill of up to T tokens and S rows.

    token_ids int32 [T]; ints int32 [S, NUM_INT_COLUMNS] and floats f32 [S, NUM_FLOAT_COLUMNS], see
    `enginebay.ops.prefill_columns`, padding rows with row id R and lengths 0. Rows that decode
    (`prefill_columns.DECODES`) use their own last token and length. targets: None unless the step
    returns full-vocabulary log-probabilities; int32 [T], the token after each, -1 for a token
    whose next one is not asked for. embeds: None unless the step takes embeddings; f32 [T,
    hidden_size], for positions whose token id is past the vocabulary.
    """

    token_ids: np.ndarray
    ints: np.ndarray
    floats: np.ndarray
    targets: np.ndarray | None = None
    embeds: np.ndarray | None = None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["row_ids", "num_steps"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Arrays of a decode: row_ids int32 [S], R on padding, and num_steps, an int32."""

    row_ids: np.ndarray
    num_steps: np.ndarray


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["row_ids", "draft_ids"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, slots=True)
class VerifyInputs:
    """Arrays of a verify step: row_ids int32 [S], R on padding, which comes last; draft_ids int32
    [S, drafts], at least one draft for each row, then -1.
    """

    row_ids: np.ndarray
    draft_ids: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Step(ExecutorCommand[Pending]):
    """Run one compiled step.

    `program` is the key of the program that serves it, which may be larger than the step.
    `places` int32 [n] is the position of each row of the plan in the bucket; results are returned
    in the plan's order. `spans` is the (start, count) of each row's targets.
    """

    program: StepKey
    inputs: PrefillInputs | DecodeInputs | VerifyInputs
    places: np.ndarray
    tables: Mapping[str, np.ndarray]
    """By cache group, int32 [n, 3]: changed entries of the page table, as row, column, page."""
    returns_logprobs: bool = False
    """Whether a row asks for log-probabilities; then they are copied to the host with the
    tokens.
    """
    returns_all: bool = False
    """Whether a row that samples asks for full-vocabulary log-probabilities."""
    spans: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class WriteRows(ExecutorCommand[None]):
    """Write values to rows without running a step. `known`: tokens of the rows' history. `used`:
    all logits processors that a row uses from now on. `updates`: single fields.
    """

    known: tuple[KnownTokens, ...] = ()
    used: tuple[RowUpdate, ...] = ()
    updates: tuple[RowUpdate, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class CopyPages(ExecutorCommand[None]):
    """Copy pages within the cache, in order: int32 [n, 2] (from, to) by cache group."""

    pages: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class PageOut(ExecutorCommand[Mapping[str, jax.Array]]):
    """Read pages int32 [n] of each cache group. Returns all arrays of all layers by
    "group/layer/array", as the device stores them; reading an array on the host waits for it.
    """

    pages: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class PageIn(ExecutorCommand[None]):
    """Write what a PageOut has returned to pages int32 [n] of each cache group."""

    pages: Mapping[str, np.ndarray]
    arrays: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Make(ExecutorCommand[None]):
    """Load the weights if they are not loaded, and allocate an empty cache of these sizes and rows
    without requests.
    """

    shapes: Mapping[str, CacheShape]


@dataclasses.dataclass(frozen=True, slots=True)
class Grow(ExecutorCommand[None]):
    """Enlarge the cache's arrays to these sizes; their content is kept."""

    shapes: Mapping[str, CacheShape]


@dataclasses.dataclass(frozen=True, slots=True)
class ClearPages(ExecutorCommand[None]):
    """Make pages int32 [n] of each cache group zeros, and give their memory back. Sent only where
    the platform has `demand_memory`. Waits for the steps that run.
    """

    pages: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Drop(ExecutorCommand[None]):
    """Free the cache and the rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Take(ExecutorCommand[RowState]):
    """Read a row's state to the host. `pages` int32 [n] by cache group hold its keys and values;
    `token_ids` int32 [tokens] are its tokens. Without pages, only its sampling state is read.
    """

    row: int
    pages: Mapping[str, np.ndarray]
    token_ids: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Put(ExecutorCommand[None]):
    """Write a row's state to a row, and its keys and values to pages int32 [n] by cache group."""

    row: int
    pages: Mapping[str, np.ndarray]
    state: RowState


@dataclasses.dataclass(frozen=True, slots=True)
class SetParts(ExecutorCommand[None]):
    """Run steps with other parts from now on: registered names or import paths by setting, such as
    {"attention.decode": "xla", "sampler": "package.module:sample"}. Without names, the parts before
    the latest SetParts return.
    """

    names: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class SetWeights(ExecutorCommand[None]):
    """Replace weights by path, each with an array of the same shape and dtype."""

    weights: Mapping[str, np.ndarray | jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class SetAdapter(ExecutorCommand[None]):
    """Write an adapter to slot `slot` of the adapter weights. `arrays` by path of the weight,
    [rank, ...]; missing paths and missing ranks become 0.
    """

    slot: int
    arrays: Mapping[str, np.ndarray]


COMMANDS: tuple[type[ExecutorCommand[object]], ...] = (
    Step,
    WriteRows,
    CopyPages,
    PageOut,
    PageIn,
    Make,
    Grow,
    ClearPages,
    Drop,
    Take,
    Put,
    SetParts,
    SetWeights,
    SetAdapter,
)
"""All commands."""


def values_of(saved: RowState) -> list[RowValues]:
    """The logits processors' fields in a saved row state, whose columns are named
    "processor/field".
    """
    processor_state: dict[str, dict[str, np.ndarray]] = {}
    for column, value in saved.sampling.items():
        name, _, field = column.rpartition("/")
        if name:
            processor_state.setdefault(name, {})[field] = value
    return [RowValues(name, values) for name, values in processor_state.items()]
