"""The number of pages of the cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from enginebay.contracts.cache_shape import CacheShape, pages_for
from enginebay.contracts.executor import EngineParts, weight_bytes
from enginebay.errors import ConfigError, UnsupportedError
from enginebay_paged.options import PagedOptions
from enginebay_paged.pools import Pools, make_pools
from enginebay_runtime.account import ACCOUNT
from enginebay_runtime.geometry import Geometry, PoolSizes
from enginebay_runtime.host_pages import MAX_MOVING
from enginebay_runtime.memory import shape_bytes, workspace_bytes

DEFAULT_UTILIZATION = 0.85
DEFAULT_ROW_TOKENS = 1024
"""Tokens of each row that a cache has room for by default, where other programs need the same
memory.
"""

FIRST_BYTES = 128 * 2**20
"""Initial size of a growing cache on a host whose memory is resident as soon as it is allocated:
it is cleared in about 0.1 s.
"""

FEWEST_PAGES = 2
"""The dummy page, and one page for tokens."""


def free_bytes(device: jax.Device, otherwise: int) -> int:
    """Return the free bytes of a device; `otherwise` if they are unknown."""
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


def choose_num_pages(
    parts: EngineParts, options: PagedOptions, pools: Pools, geometry: Geometry
) -> int:
    """Return the number of pages, including the dummy page, of each group whose rows keep all
    pages. ConfigError or UnsupportedError when there is no room for a page.

    Groups whose rows release pages always have room for all rows, and are subtracted first.
    """
    if options.num_pages is not None:
        return options.num_pages
    groups, num_rows = parts.model.info.cache_groups, parts.config.max_num_seqs
    fixed = shape_bytes(parts, pools.shapes(0, groups, num_rows))
    each = shape_bytes(parts, pools.shapes(1, groups, num_rows)) - fixed
    least = fixed + FEWEST_PAGES * each
    needed = 1 + num_rows * pools.row_pages(None)
    if options.cache_bytes is not None:
        if options.cache_bytes < least:
            what = "the windows and states" if parts.model.info.states else "the windows"
            raise ConfigError(
                f"cache_bytes = {options.cache_bytes}",
                f"at least {least}, which is {FEWEST_PAGES} pages of "
                f"{pools.page_size} tokens"
                + (f" and {what} of max_num_seqs rows" if fixed else ""),
                "Raise cache_bytes, or lower page_size or max_num_seqs.",
            )
        return (options.cache_bytes - fixed) // each if each else needed
    utilization = options.memory_utilization or DEFAULT_UTILIZATION
    device, memory_bytes = parts.placement.device, parts.platform.hardware().memory_bytes
    free = min(free_bytes(device, memory_bytes), memory_bytes - ACCOUNT.promised_bytes(device))
    if device.platform == "cpu":
        free -= options.prefix_host_bytes or 0
    rest = (
        int(utilization * free)
        - weight_bytes(parts.model, parts.placement, parts.weight_format)
        - workspace_bytes(parts, geometry)
        - moving_bytes(parts, options)
    )
    if rest < least:
        raise UnsupportedError(
            f"memory_utilization = {utilization} of {free / 2**20:.0f} MiB that are free, which "
            f"leaves {max(0, rest) / 2**20:.0f} MiB for the cache after weights and working "
            "space",
            f"at least {least / 2**20:.1f} MiB",
            "Free memory, raise memory_utilization, lower max_num_batched_tokens or "
            "max_num_seqs, or use a smaller dtype.",
        )
    if options.memory_utilization is None and parts.platform.runtime_bytes:
        typical = 1 + pages_for(num_rows * DEFAULT_ROW_TOKENS, pools.page_size)
        needed = min(needed, max(1 + pools.row_pages(None), typical))
    return min(needed, (rest - fixed) // each) if each else needed


def moving_bytes(parts: EngineParts, options: PagedOptions) -> int:
    """Return the bytes on each device of pages that move between the cache and the host."""
    if options.prefix_host_bytes is None:
        return 0
    page = CacheShape(1, 1, options.page_size)
    return MAX_MOVING * shape_bytes(parts, {g.name: page for g in parts.model.info.groups})


def pool_sizes(parts: EngineParts, options: PagedOptions) -> PoolSizes:
    """Return the sizes of an engine's cache. On a CPU whose memory is resident as soon as it is
    allocated the cache may start small, because clearing it takes most of the start-up time;
    elsewhere all pages are allocated at once.
    """
    info = parts.model.info
    pools = make_pools(parts.config, options.page_size, options.num_state_snapshots)
    sizes = PoolSizes.of(parts, options.page_size, {})
    num_pages = choose_num_pages(parts, options, pools, sizes.geometry({}))
    first = whole = pools.shapes(num_pages, info.cache_groups, parts.config.max_num_seqs)
    clears = parts.placement.device.platform == "cpu" and not parts.platform.demand_memory
    if options.grow and clears:
        page = CacheShape(1, 1, options.page_size)
        page_bytes = shape_bytes(parts, {group.name: page for group in info.groups})
        most = max(FEWEST_PAGES, FIRST_BYTES // page_bytes)
        first = whole | {
            g.name: CacheShape(1, min(whole[g.name].num_pages, most), options.page_size)
            for g in info.groups
        }
    return dataclasses.replace(sizes, first=first, whole=whole)
