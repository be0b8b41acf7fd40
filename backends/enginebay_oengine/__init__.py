"""The paged engine, and the documented names of the row table that its steps are made of."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginebay.rows import DecodeRowInfo, ModelRunBatch, SequenceBuffer
    from enginebay_oengine.row_arrays import (
        build_allowed_mask,
        build_sampling_arrays,
        fill_slice,
        move_row,
        pack_prompts,
        swap_rows,
        swap_rows_pytree,
    )
    from enginebay_oengine.sampling_metadata import ModelRunnerSamplingMetadata

_HOMES = {
    "DecodeRowInfo": "enginebay.rows",
    "ModelRunBatch": "enginebay.rows",
    "ModelRunnerSamplingMetadata": "enginebay_oengine.sampling_metadata",
    "SequenceBuffer": "enginebay.rows",
    "build_allowed_mask": "enginebay_oengine.row_arrays",
    "build_sampling_arrays": "enginebay_oengine.row_arrays",
    "fill_slice": "enginebay_oengine.row_arrays",
    "move_row": "enginebay_oengine.row_arrays",
    "pack_prompts": "enginebay_oengine.row_arrays",
    "swap_rows": "enginebay_oengine.row_arrays",
    "swap_rows_pytree": "enginebay_oengine.row_arrays",
}

__all__ = [
    "DecodeRowInfo",
    "ModelRunBatch",
    "ModelRunnerSamplingMetadata",
    "SequenceBuffer",
    "build_allowed_mask",
    "build_sampling_arrays",
    "fill_slice",
    "move_row",
    "pack_prompts",
    "swap_rows",
    "swap_rows_pytree",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that listing plugins imports no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'enginebay_oengine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
