"""The oEngine API over the pages of the paged engine, and the documented names of the row table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginebay.on_demand import on_demand

if TYPE_CHECKING:
    from enginebay_oengine.abstract_engine import AbstractInferenceEngine
    from enginebay_oengine.active_batch import ActiveRequest, ActiveSequenceBatch
    from enginebay_oengine.compiling import cjit
    from enginebay_oengine.continuous_forward import (
        ModelInputBatch,
        ModelOutputBatch,
        execute_forward,
    )
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

# Names are imported at first use, so that listing plugins does not import JAX.
__getattr__, __dir__ = on_demand(
    __name__,
    {
        "enginebay_oengine.abstract_engine": "AbstractInferenceEngine",
        "enginebay_oengine.active_batch": "ActiveRequest ActiveSequenceBatch",
        "enginebay_oengine.compiling": "cjit",
        "enginebay_oengine.continuous_forward": "ModelInputBatch ModelOutputBatch execute_forward",
        "enginebay_oengine.generation_state": "GenerationState",
        "enginebay_oengine.inference_scheduler": "InferenceScheduler",
        "enginebay_oengine.iteration": "AllocatedPrefillPages GenerationStepTask "
        "InitialSequenceRequest IterationResult NextIterationPlan SampledToken SlotPageAssignment",
        "enginebay_oengine.model_io": "ModelIOProcessor",
        "enginebay_oengine.oengine": "oEngine",
        "enginebay_oengine.opened_model": "GenerationConfig OpenedModel open_model",
        "enginebay_oengine.page_manager": "HBMPageManager OutOfPagesError",
        "enginebay_oengine.paged_cache": "PagedAttentionCache PagedAttentionCacheMetaData",
        "enginebay_oengine.result_tokens": "ResultTokens SlotData",
        "enginebay_oengine.row_arrays": "build_allowed_mask build_sampling_arrays fill_slice "
        "move_row pack_prompts swap_rows swap_rows_pytree",
        "enginebay_oengine.row_batch": "DecodeRowInfo ModelRunBatch",
        "enginebay_oengine.sampling_metadata": "ModelRunnerSamplingMetadata",
        "enginebay_oengine.sequence_buffer": "SequenceBuffer",
    },
)
