"""The paged engine, the oEngine API over its pages, and the documented names of the row table."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginebay_oengine.abstract_engine import AbstractInferenceEngine
    from enginebay_oengine.active_batch import ActiveRequest, ActiveSequenceBatch
    from enginebay_oengine.compiling import cjit
    from enginebay_oengine.forward import ModelOutputBatch, execute_forward
    from enginebay_oengine.generation_state import GenerationState
    from enginebay_oengine.inference_scheduler import InferenceScheduler
    from enginebay_oengine.iteration import (
        AllocatedPrefillPages,
        GenerationStepTask,
        InitialSequenceRequest,
        IterationResult,
        NextIterationPlan,
        SampledToken,
        SlotPageAssignment,
    )
    from enginebay_oengine.model_inputs import ModelInputBatch
    from enginebay_oengine.model_io import ModelIOProcessor
    from enginebay_oengine.oengine import oEngine
    from enginebay_oengine.opened_model import GenerationConfig, OpenedModel, open_model
    from enginebay_oengine.page_manager import HBMPageManager, OutOfPagesError
    from enginebay_oengine.paged_cache import PagedAttentionCache, PagedAttentionCacheMetaData
    from enginebay_oengine.result_tokens import ResultTokens, SlotData
    from enginebay_oengine.row_arrays import (
        build_allowed_mask,
        build_sampling_arrays,
        fill_slice,
        move_row,
        pack_prompts,
        swap_rows,
        swap_rows_pytree,
    )
    from enginebay_oengine.row_batch import DecodeRowInfo, ModelRunBatch
    from enginebay_oengine.sampling_metadata import ModelRunnerSamplingMetadata
    from enginebay_oengine.sequence_buffer import SequenceBuffer

_HOMES = {
    "AbstractInferenceEngine": "enginebay_oengine.abstract_engine",
    "ActiveRequest": "enginebay_oengine.active_batch",
    "ActiveSequenceBatch": "enginebay_oengine.active_batch",
    "AllocatedPrefillPages": "enginebay_oengine.iteration",
    "DecodeRowInfo": "enginebay_oengine.row_batch",
    "GenerationConfig": "enginebay_oengine.opened_model",
    "GenerationState": "enginebay_oengine.generation_state",
    "GenerationStepTask": "enginebay_oengine.iteration",
    "HBMPageManager": "enginebay_oengine.page_manager",
    "InferenceScheduler": "enginebay_oengine.inference_scheduler",
    "InitialSequenceRequest": "enginebay_oengine.iteration",
    "IterationResult": "enginebay_oengine.iteration",
    "ModelIOProcessor": "enginebay_oengine.model_io",
    "ModelInputBatch": "enginebay_oengine.model_inputs",
    "ModelOutputBatch": "enginebay_oengine.forward",
    "ModelRunBatch": "enginebay_oengine.row_batch",
    "ModelRunnerSamplingMetadata": "enginebay_oengine.sampling_metadata",
    "NextIterationPlan": "enginebay_oengine.iteration",
    "OpenedModel": "enginebay_oengine.opened_model",
    "OutOfPagesError": "enginebay_oengine.page_manager",
    "PagedAttentionCache": "enginebay_oengine.paged_cache",
    "PagedAttentionCacheMetaData": "enginebay_oengine.paged_cache",
    "ResultTokens": "enginebay_oengine.result_tokens",
    "SampledToken": "enginebay_oengine.iteration",
    "SequenceBuffer": "enginebay_oengine.sequence_buffer",
    "SlotData": "enginebay_oengine.result_tokens",
    "SlotPageAssignment": "enginebay_oengine.iteration",
    "build_allowed_mask": "enginebay_oengine.row_arrays",
    "build_sampling_arrays": "enginebay_oengine.row_arrays",
    "cjit": "enginebay_oengine.compiling",
    "execute_forward": "enginebay_oengine.forward",
    "fill_slice": "enginebay_oengine.row_arrays",
    "move_row": "enginebay_oengine.row_arrays",
    "oEngine": "enginebay_oengine.oengine",
    "open_model": "enginebay_oengine.opened_model",
    "pack_prompts": "enginebay_oengine.row_arrays",
    "swap_rows": "enginebay_oengine.row_arrays",
    "swap_rows_pytree": "enginebay_oengine.row_arrays",
}

__all__ = [
    "AbstractInferenceEngine",
    "ActiveRequest",
    "ActiveSequenceBatch",
    "AllocatedPrefillPages",
    "DecodeRowInfo",
    "GenerationConfig",
    "GenerationState",
    "GenerationStepTask",
    "HBMPageManager",
    "InferenceScheduler",
    "InitialSequenceRequest",
    "IterationResult",
    "ModelIOProcessor",
    "ModelInputBatch",
    "ModelOutputBatch",
    "ModelRunBatch",
    "ModelRunnerSamplingMetadata",
    "NextIterationPlan",
    "OpenedModel",
    "OutOfPagesError",
    "PagedAttentionCache",
    "PagedAttentionCacheMetaData",
    "ResultTokens",
    "SampledToken",
    "SequenceBuffer",
    "SlotData",
    "SlotPageAssignment",
    "build_allowed_mask",
    "build_sampling_arrays",
    "cjit",
    "execute_forward",
    "fill_slice",
    "move_row",
    "oEngine",
    "open_model",
    "pack_prompts",
    "swap_rows",
    "swap_rows_pytree",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that listing plugins imports no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'enginebay_oengine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
