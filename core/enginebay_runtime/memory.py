"""The memory of an engine: bytes per device of weights, the whole cache, and the largest step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp

from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.executor import EngineParts, weight_bytes
from enginebay.contracts.processor import Processors, Sizes
from enginebay.contracts.proposer import MAX_VERIFIED_ROWS
from enginebay.contracts.step_key import Kind
from enginebay.memory import MemoryPlan
from enginebay.weights import stored_bytes
from enginebay_runtime.geometry import CacheSizes, Geometry, Shapes
from enginebay_runtime.programs import parts_of

LAYER_BYTES: Mapping[Kind, int] = {"forward": 4 * 2**20, "sample": 0}
"""Bytes that a compiled step takes on a CPU for each layer of the model, 1 MiB for other kinds of
steps; measured for programs in which the layers are written out.
"""
SAMPLER_BYTES = 30 * 2**20
"""Bytes that the sampler takes in a compiled step on a CPU."""


def plan_memory(parts: EngineParts, sizes: CacheSizes) -> MemoryPlan:
    """Bytes per device of weights, the whole cache, and the workspace of one step; and of the
    process, where the devices use its memory.
    """
    platform = parts.platform
    uses_host = platform.runtime_bytes > 0
    fills = uses_host and not platform.demand_memory
    start_bytes = shape_bytes(parts, sizes.first) if fills else 0
    return MemoryPlan(
        weights_bytes=weight_bytes(parts.model, parts.placement, parts.weight_format),
        cache_bytes=shape_bytes(parts, sizes.whole),
        workspace_bytes=workspace_bytes(parts, sizes.geometry(sizes.whole)),
        device_bytes=platform.hardware().memory_bytes,
        runtime_bytes=platform.runtime_bytes,
        programs_bytes=programs_bytes(parts, sizes.geometry(sizes.whole)) if uses_host else 0,
        start_cache_bytes=start_bytes,
    )


def programs_bytes(parts: EngineParts, geometry: Geometry) -> int:
    """Bytes of a CPU's memory for the programs of all steps."""
    num_layers = sum(group.num_layers for group in parts.model.info.cache_groups)
    programs = {part for key in geometry.all_steps() for part in parts_of(key)}
    return sum(
        num_layers * LAYER_BYTES.get(part.kind, 2**20)
        + (0 if part.kind == "forward" else SAMPLER_BYTES)
        for part in programs
    )


def shape_bytes(parts: EngineParts, shapes: Shapes) -> int:
    """Bytes on each device of a cache of these sizes."""
    layouts, num_shards = parts.layouts(shapes), parts.placement.num_shards
    total = 0
    for group in parts.model.info.cache_groups:
        if (layout := layouts.get(group.name)) is not None:
            axes = layout.logical_axes()
            total += group.num_layers * sum(
                stored_bytes(s.shape, s.dtype) // math.prod(map(num_shards, axes[name]))
                for name, s in layout.shapes().items()
            )
    return total


def workspace_bytes(parts: EngineParts, geometry: Geometry) -> int:
    """Bytes on each device for the largest step, including the copy of the rows' cache that a
    compact decode makes.
    """
    compact = [key.bucket for key in geometry.all_steps() if key.kind == "compact"]
    num_copied = max((bucket.seqs * bucket.max_kv_len for bucket in compact), default=0)
    page = CacheShape(1, 1, geometry.page_size)
    page_bytes = shape_bytes(parts, {g.name: page for g in parts.model.info.groups})
    return step_workspace_bytes(parts) + page_bytes * num_copied // geometry.page_size


def step_workspace_bytes(parts: EngineParts) -> int:
    """Bytes that the largest step may need beside weights and cache.

    It counts 16 f32 activations per token; the logits of each row four times, because penalties
    keep token counts of the same size; the token history of the rows twice; the fields of logits
    processors twice. A verify step has logits for `max_drafts` + 1 tokens of each row, in at most
    MAX_VERIFIED_ROWS rows.
    """
    info, config = parts.model.info, parts.config
    assert config.max_model_len is not None, "the composition root resolves max_model_len"
    row = 4 * info.vocab_size + 2 * config.max_model_len
    verified = (
        min(config.max_num_seqs, MAX_VERIFIED_ROWS) * (config.max_drafts + 1)
        if config.max_drafts
        else 0
    )
    rows = max(config.max_num_seqs * row, verified * 4 * info.vocab_size)
    own = _own_bytes(parts.processors, Sizes(info.vocab_size, config.max_model_len))
    return (
        4 * (16 * config.max_num_batched_tokens * info.hidden_size + rows)
        + 2 * config.max_num_seqs * own
    )


def _own_bytes(processors: Processors, sizes: Sizes) -> int:
    """Bytes of the fields that logits processors keep for each row."""
    fields = [field for _, processor in processors for field in processor.fields(sizes).values()]
    return sum(math.prod(field.shape) * jnp.dtype(field.dtype).itemsize for field in fields)
