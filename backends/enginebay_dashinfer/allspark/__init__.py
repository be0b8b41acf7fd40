"""The names of DashInfer's module allspark."""

from __future__ import annotations

from enginebay_dashinfer.engine import Engine
from enginebay_dashinfer.generation_config import ASGenerationConfigBuilder
from enginebay_dashinfer.model_loader import DashInferModel, HuggingFaceModel
from enginebay_dashinfer.multimedia import MultiMediaInfo
from enginebay_dashinfer.result_queue import GeneratedElements, ResultQueue
from enginebay_dashinfer.runtime_config import AsModelConfig, AsModelRuntimeConfigBuilder
from enginebay_dashinfer.statistics import AsEngineStat
from enginebay_dashinfer.statuses import (
    AsCacheMode,
    AsStatus,
    GenerateRequestStatus,
    TargetDevice,
)
from enginebay_dashinfer.stored_model import AsFileInfo

__all__ = [
    "ASGenerationConfigBuilder",
    "AsCacheMode",
    "AsEngineStat",
    "AsFileInfo",
    "AsModelConfig",
    "AsModelRuntimeConfigBuilder",
    "AsStatus",
    "DashInferModel",
    "Engine",
    "GenerateRequestStatus",
    "GeneratedElements",
    "HuggingFaceModel",
    "MultiMediaInfo",
    "ResultQueue",
    "TargetDevice",
]
