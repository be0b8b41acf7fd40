"""The names of DashInfer's module allspark.engine."""

from __future__ import annotations

from enginebay_dashinfer.engine import DashRequest, Engine
from enginebay_dashinfer.generation_config import GenerationConfig
from enginebay_dashinfer.model_loader import LLM
from enginebay_dashinfer.result_queue import GeneratedElements, ResultQueue
from enginebay_dashinfer.runtime_config import AsModelConfig, RuntimeConfig
from enginebay_dashinfer.statistics import AsEngineStat
from enginebay_dashinfer.statuses import (
    AsCacheMode,
    AsStatus,
    GenerateRequestStatus,
    TargetDevice,
)
from enginebay_dashinfer.stored_model import AsFileInfo

__all__ = [
    "LLM",
    "AsCacheMode",
    "AsEngineStat",
    "AsFileInfo",
    "AsModelConfig",
    "AsStatus",
    "DashRequest",
    "Engine",
    "GenerateRequestStatus",
    "GeneratedElements",
    "GenerationConfig",
    "ResultQueue",
    "RuntimeConfig",
    "TargetDevice",
]
