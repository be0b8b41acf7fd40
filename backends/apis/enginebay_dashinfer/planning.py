"""The plan of an installed model: its settings as a configuration of the engine "esurge"."""

from __future__ import annotations

import os
from typing import Any

from enginebay.compose.composition import make_plan
from enginebay.compose.plan import Plan
from enginebay.config import make_config
from enginebay.contracts.platform import Platform
from enginebay.errors import ConfigError
from enginebay.plugins.registry import load_registry
from enginebay_dashinfer.memory import host_tier_bytes, memory_limits
from enginebay_dashinfer.runtime_config import AsModelConfig
from enginebay_dashinfer.statuses import AsCacheMode, TargetDevice
from enginebay_dashinfer.stored_model import StoredModel

PLATFORMS = {TargetDevice.CUDA: "cuda", TargetDevice.CPU: "cpu", TargetDevice.CPU_NUMA: "cpu"}
CACHE_DTYPES = {
    AsCacheMode.AsCacheDefault: "auto",
    AsCacheMode.AsCacheQuantI8: "int8",
    AsCacheMode.AsCacheQuantU4: "uint4",
}


def plan_model(settings: AsModelConfig) -> Plan:
    """Open the files of a model and choose every part; nothing is allocated.

    CheckpointError for the files, ConfigError or UnsupportedError for settings that cannot be used
    here.
    """
    stored = StoredModel(settings.model_path, settings.weights_path)
    target, ids = settings.device()
    platform = PLATFORMS[target]
    registry = load_registry()
    found = registry.load(registry.find("platform", platform))()
    _check_devices(found, ids)
    _check_threads(platform, settings.num_threads)
    memory_limits()
    options: dict[str, Any] = {
        "page_size": settings.cache_span_size,
        "enable_prefix_caching": settings.enable_prefix_cache,
        "prefix_ttl_s": settings.prefix_cache_ttl,
        "prefix_host_bytes": host_tier_bytes() if settings.enable_prefix_cache else None,
        "grow": False,
    }
    values: dict[str, Any] = {
        "model": str(stored.graph.with_suffix("")),
        "platform": platform,
        "engine": {"name": "esurge", "options": options},
        "dtype": stored.description.dtype,
        "kv_cache_dtype": CACHE_DTYPES[settings.cache_mode],
        "max_model_len": settings.engine_max_length,
        "max_num_seqs": settings.engine_max_batch,
        "mesh": {"tensor": len(ids)} if len(ids) > 1 else {},
        "max_loras": settings.lora_max_num,
        "max_lora_rank": settings.lora_max_rank,
    }
    if settings.engine_max_prefill_length:
        values["max_num_batched_tokens"] = settings.engine_max_prefill_length
    return make_plan(make_config(values), registry, stored)


def _check_devices(platform: Platform, ids: list[int]) -> None:
    """Raise ConfigError unless the platform has the devices `ids`, which are the first ones."""
    reason = platform.why_not()
    if reason is not None:
        given = f"devices of the platform {platform.name} ({reason})"
        todo = "Choose TargetDevice.CPU, or run on a machine with such a device."
        raise ConfigError(given, "devices that this machine has", todo)
    have = len(platform.devices())
    if sorted(ids) != list(range(len(ids))) or len(ids) > have:
        raise ConfigError(
            f"devices {ids} of the platform {platform.name}",
            f"the first ones in order; this machine has {have}",
            "Choose [0] or [0, 1]; CUDA_VISIBLE_DEVICES selects GPUs.",
        )


def _check_threads(platform: str, num_threads: int) -> None:
    """Raise ConfigError for a number of threads that the process does not have."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if platform == "cpu" and num_threads not in (0, available):
        raise ConfigError(
            f"compute_thread_in_device = {num_threads}",
            f"0, or {available}, the processors that this process may use",
            "Pass 0, and choose the processors with taskset when you start the process.",
        )
