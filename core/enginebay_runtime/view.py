"""RunnerView: the attributes of a Runner that its helpers use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.model import ModelInfo, Weights
from enginebay.contracts.placement import Placement
from enginebay_runtime.step import Program, StepState


class RunnerView(Protocol):
    """The attributes of a Runner that its row writer, its compiler and a shadow use."""

    program: Program
    weights: Weights
    placement: Placement
    max_model_len: int
    max_steps: int
    compile_options: dict[str, Any]
    layouts: dict[str, CacheLayout]
    compilations: Compilations
    dump_folder: Path | None
    state: StepState

    @property
    def info(self) -> ModelInfo:
        """The model's facts."""
