"""How many pages the cache gets, and the memory plan that follows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax

from enginebay.errors import ConfigError, UnsupportedError, explain
from enginebay.memory import ACCOUNT, MemoryPlan
from enginebay.runner.parts import EngineParts, step_workspace_bytes, weight_bytes
from enginebay_oengine.geometry import Geometry
from enginebay_oengine.options import PagedOptions

DEFAULT_UTILIZATION = 0.85
FIRST_BYTES = 128 * 2**20
"""Of the cache, where it grows: what is cleared in about a tenth of a second."""

FEWEST_PAGES = 2
"""The dummy page, and one for tokens."""


def pool_bytes(parts: EngineParts, geometry: Geometry, num_pages: Mapping[str, int]) -> int:
    """Bytes on each device of a cache with so many pages by group."""
    groups = parts.model.info.groups
    layouts = geometry.layouts(num_pages, groups, parts.dtype)
    return sum(
        g.num_layers * layouts[g.name].num_bytes() for g in groups
    ) // parts.placement.num_shards("kv_heads")


def page_bytes(parts: EngineParts, geometry: Geometry) -> int:
    """Bytes of a page of every group on each device, all layers together."""
    return pool_bytes(parts, geometry, {g.name: 1 for g in parts.model.info.groups})


def cache_pages(parts: EngineParts, geometry: Geometry, num_pages: int) -> dict[str, int]:
    """Pages of each group of a cache, where those that keep all of a row's have `num_pages`."""
    return geometry.pool_pages(num_pages, parts.model.info.groups, parts.config.max_num_seqs)


def workspace_bytes(parts: EngineParts, geometry: Geometry) -> int:
    """Bytes on each device for the largest step, with the copy that a compact decode makes of its
    rows' cache.
    """
    compact = [key.bucket for key in geometry.all_steps() if key.kind == "compact"]
    max_copied = max((bucket.seqs * bucket.max_kv_len for bucket in compact), default=0)
    return (
        step_workspace_bytes(parts) + page_bytes(parts, geometry) * max_copied // geometry.page_size
    )


def free_bytes(device: jax.Device, otherwise: int) -> int:
    """Bytes that may still be allocated on a device; `otherwise` where nobody knows."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    meminfo = Path("/proc/meminfo")
    if device.platform == "cpu" and meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return min(otherwise, int(rest.split()[0]) * 1024)
    return otherwise


def choose_num_pages(parts: EngineParts, options: PagedOptions, geometry: Geometry) -> int:
    """Pages of each group whose rows keep all of theirs, the dummy included, as the options say.
    ConfigError or UnsupportedError when there is no room for one.

    Groups that give pages back have room for all rows, which comes first. Where all do, nothing is
    left to choose.
    """
    if options.num_pages is not None:
        return options.num_pages
    fixed = pool_bytes(parts, geometry, cache_pages(parts, geometry, 0))
    each = pool_bytes(parts, geometry, cache_pages(parts, geometry, 1)) - fixed
    least = fixed + FEWEST_PAGES * each
    needed = 1 + parts.config.max_num_seqs * geometry.row_pages(None)
    if options.cache_bytes is not None:
        if options.cache_bytes < least:
            raise ConfigError(
                explain(
                    f"cache_bytes = {options.cache_bytes}",
                    f"at least {least}, which is {FEWEST_PAGES} pages of "
                    f"{geometry.page_size} tokens"
                    + (" and the windows of max_num_seqs rows" if fixed else ""),
                    "Raise it, or make page_size or max_num_seqs smaller.",
                )
            )
        return (options.cache_bytes - fixed) // each if each else needed
    utilization = options.memory_utilization or DEFAULT_UTILIZATION
    device, memory_bytes = parts.placement.device, parts.platform.hardware().memory_bytes
    free = min(free_bytes(device, memory_bytes), memory_bytes - ACCOUNT.promised_bytes(device))
    rest = (
        int(utilization * free)
        - weight_bytes(parts.model, parts.placement, parts.dtype)
        - workspace_bytes(parts, geometry)
    )
    if rest < least:
        raise UnsupportedError(
            explain(
                f"memory_utilization = {utilization} of {free / 2**20:.0f} MiB that are free "
                f"leaves {max(0, rest) / 2**20:.0f} MiB for the cache beside weights and working "
                "space",
                f"at least {least / 2**20:.1f} MiB",
                "Free memory, raise it, lower max_num_batched_tokens or max_num_seqs, "
                "or use a smaller dtype.",
            )
        )
    return min(needed, (rest - fixed) // each) if each else needed


def first_pages(
    parts: EngineParts, options: PagedOptions, geometry: Geometry, num_pages: Mapping[str, int]
) -> Mapping[str, int]:
    """How many of the cache's pages are allocated at once, by group; the others when they are
    needed.

    All but on a CPU, where clearing them is most of the time that a program takes to start.
    """
    if not options.grow or parts.placement.device.platform != "cpu":
        return num_pages
    first = max(FEWEST_PAGES, FIRST_BYTES // page_bytes(parts, geometry))
    return {group: min(count, first) for group, count in num_pages.items()}


def plan_memory(parts: EngineParts, geometry: Geometry, num_pages: int) -> MemoryPlan:
    """Bytes per device of weights, pages and room for one step."""
    return MemoryPlan(
        weights_bytes=weight_bytes(parts.model, parts.placement, parts.dtype),
        cache_bytes=pool_bytes(parts, geometry, cache_pages(parts, geometry, num_pages)),
        workspace_bytes=workspace_bytes(parts, geometry),
        device_bytes=parts.platform.hardware().memory_bytes,
    )
