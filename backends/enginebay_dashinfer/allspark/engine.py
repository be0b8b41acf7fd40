"""The names of DashInfer's module allspark.engine."""

from __future__ import annotations

from enginebay_dashinfer.engine import DashRequest, Engine
from enginebay_dashinfer.result_queue import GeneratedElements, ResultQueue
from enginebay_dashinfer.runtime_config import AsModelConfig
from enginebay_dashinfer.statistics import AsEngineStat
from enginebay_dashinfer.statuses import (
    AsCacheMode,
    AsStatus,
    GenerateRequestStatus,
    TargetDevice,
)
from enginebay_dashinfer.stored_model import AsFileInfo

__all__ = [
    "AsCacheMode",
    "AsEngineStat",
    "AsFileInfo",
    "AsModelConfig",
    "AsStatus",
    "DashRequest",
    "Engine",
    "GenerateRequestStatus",
    "GeneratedElements",
    "ResultQueue",
    "TargetDevice",
]
