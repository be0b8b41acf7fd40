"""ExecutorView: the attributes of a LocalExecutor that its helpers use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import ModelInfo, Weights
from enginebay.contracts.placement import Placement
from enginebay_runtime.step import StepState
from enginebay_runtime.stored_programs import ProgramStore
from enginebay_runtime.tables import ResidentTables


class ExecutorView(Protocol):
    """What the parts of a LocalExecutor use of it: its row writer, its compiler, a shadow, and what
    makes, moves and reads its arrays.
    """

    parts: EngineParts
    model_weights: Weights
    placement: Placement
    num_rows: int
    max_model_len: int
    max_steps: int
    compile_options: dict[str, Any]
    layouts: dict[str, CacheLayout]
    shapes: Mapping[str, CacheShape]
    tables: ResidentTables
    compilations: Compilations
    dump_folder: Path | None
    store: ProgramStore | None

    @property
    def info(self) -> ModelInfo:
        """The model's facts."""

    @property
    def state(self) -> StepState:
        """The step state. InternalError after the arrays were dropped."""

    @state.setter
    def state(self, state: StepState | None) -> None: ...

    def set_layouts(self, shapes: Mapping[str, CacheShape]) -> None:
        """Record the cache's sizes; all entries of the page tables become 0."""
