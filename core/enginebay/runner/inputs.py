"""Host arrays of one launch, and what the helpers of a runner use of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from enginebay.cache import KVLayout
from enginebay.engine import Compilations
from enginebay.model import ModelInfo, Weights
from enginebay.processor import RowValues
from enginebay.runner.full_vocab import FullVocabInputs
from enginebay.runner.scoping import StepNeeds
from enginebay.runner.sharding import Placement
from enginebay.runner.step import Program, StepState


class RunnerView(Protocol):
    """The attributes of a Runner that its row writer, its compiler and a shadow use."""

    program: Program
    weights: Weights
    placement: Placement
    max_model_len: int
    max_steps: int
    compile_options: dict[str, Any]
    layouts: dict[str, KVLayout]
    compilations: Compilations
    dump_folder: Any
    state: StepState

    @property
    def info(self) -> ModelInfo:
        """The model's facts."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowUpdate:
    """Fields of logits processors to write to a row."""

    row: int
    values: tuple[RowValues, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class KnownTokens:
    """The first tokens of a row, int32, which no chunk brings."""

    row: int
    token_ids: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Host arrays of a prefill call; see `prefill_step`. `known` is written to the rows' history
    before, and `used`, an entry for each row that samples, becomes all that these rows have of
    logits processors.

    `returns_logprobs`: a row asks for log-probabilities, so that they are sent to the host with the
    tokens. `need`: the least that serves the rows. `full_vocab`: what the rows request of full-vocabulary log-probabilities.
    """

    token_ids: np.ndarray
    ints: np.ndarray
    floats: np.ndarray
    tables: Mapping[str, np.ndarray]
    need: StepNeeds
    known: tuple[KnownTokens, ...] = ()
    returns_logprobs: bool = False
    used: tuple[RowUpdate, ...] = ()
    full_vocab: FullVocabInputs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Host arrays of a decode call; see `decode_step`, and PrefillInputs. `updates` are written
    before.

    With `draft_ids` they are those of a `verify_step`.
    """

    row_ids: np.ndarray
    num_steps: int
    tables: Mapping[str, np.ndarray]
    need: StepNeeds
    returns_logprobs: bool = False
    updates: tuple[RowUpdate, ...] = ()
    full_vocab: FullVocabInputs | None = None
    draft_ids: np.ndarray | None = None
