"""The paged engine: rows hold pages of one pool, and rows with equal prefixes share pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeGuard

from enginebay.contracts.cache import CacheGroup
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.engine import AttentionProblem, Engine
from enginebay.contracts.executor import EngineParts
from enginebay.errors import ConfigError, UnsupportedError
from enginebay_paged.lease_records import GroupPages
from enginebay_paged.ledger import PageLedger
from enginebay_paged.options import PagedOptions
from enginebay_paged.pool import PagePool
from enginebay_paged.pools import make_pools
from enginebay_paged.prefix import PrefixIndex
from enginebay_paged.sizing import FEWEST_PAGES, moving_bytes, pool_sizes
from enginebay_paged.state_places import StatePlaces
from enginebay_paged.store import PageStore
from enginebay_paged.tiers import PrefixTiers, make_tiers
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.geometry import Shapes, pool_problems
from enginebay_runtime.rows import PageTable
from enginebay_runtime.rows.make import make_row_table

PagedEngine = StepEngine
"""The class of an engine that make_engine returns; `is_paged` tells such an engine."""


def make_engine(parts: EngineParts, options: PagedOptions) -> PagedEngine:
    """Make a paged engine from these parts. ConfigError or UnsupportedError when the cache has no
    room for a page.
    """
    sizes = pool_sizes(parts, options)
    rows = make_row_table(parts, options.page_size)
    tiers = make_tiers(parts, options, sizes.whole)
    ledger = make_ledger(parts, options, sizes.whole, rows.page_tables, tiers)
    engine = StepEngine(parts, rows, ledger, sizes, tiers.pages, tiers.identify)
    if tiers.files is not None:
        try:
            engine.executor.weights()  # an executor without them is refused now, not in service
        except UnsupportedError:
            engine.close()
            raise
    plan = engine.memory
    workspace_bytes = plan.workspace_bytes + moving_bytes(parts, options)
    engine.memory = dataclasses.replace(plan, workspace_bytes=workspace_bytes, tiers=tiers.plans())
    return engine


def make_ledger(
    parts: EngineParts,
    options: PagedOptions,
    shapes: Shapes,
    tables: Sequence[PageTable],
    tiers: PrefixTiers | None = None,
) -> PageLedger:
    """Make the ledger of a cache of these sizes. It writes each row's pages to the page table of
    their group. ConfigError for an explicit prefix_idle_s that would have no effect.
    """
    config, pools = parts.config, make_pools(parts.config, options.page_size)
    info, num_groups = parts.model.info, len(parts.model.info.groups)
    assert config.max_model_len is not None, "the composition root resolves max_model_len"

    ttl_s, idle_s = options.prefix_ttl_s, options.prefix_idle_s
    has_tier = options.prefix_host_bytes is not None  # which is there to keep pages longer
    is_default = "prefix_idle_s" not in options.model_fields_set
    releases = config.idle_release_s is not None and parts.platform.demand_memory
    if not (releases or is_default or idle_s is None):
        raise ConfigError(
            f"prefix_idle_s = {idle_s:g}, without idle_release_s or on a platform whose memory "
            "stays allocated",
            "engines on a Linux CPU that give memory back while no request runs",
            "Set idle_release_s too, or set prefix_ttl_s, which works everywhere.",
        )
    if (has_tier and is_default) or not parts.platform.demand_memory:
        idle_s = None

    def pages(group: CacheGroup, table: PageTable) -> GroupPages:
        index = PrefixIndex(ttl_s, idle_s) if options.prefix_caching else None
        host = None if tiers is None else tiers.host_tier(group.name, options.prefix_ttl_s)
        store = PageStore(PagePool(shapes[group.name].num_pages), index, host=host)
        return GroupPages(store, table, pools.kept_window(group))

    states = {
        # A fork needs a snapshot of its parent's state even without prefix caching.
        s.name: StatePlaces(
            PageStore(PagePool(shapes[s.name].num_pages), PrefixIndex(ttl_s, idle_s)),
            table,
            options.state_snapshot_tokens,
        )
        for s, table in zip(info.states, tables[num_groups:], strict=True)
    }
    groups = {g.name: pages(g, table) for g, table in zip(info.groups, tables, strict=False)}
    return PageLedger(
        {**groups, **states},
        config.max_num_seqs,
        config.max_model_len,
        max_ahead=pools.max_ahead,
        grows=not options.reserve_all,
        log=None if tiers is None else tiers.log,
    )


def is_paged(engine: Engine) -> TypeGuard[PagedEngine]:
    """Return whether an engine is a paged engine."""
    return isinstance(engine, StepEngine) and isinstance(engine.ledger, PageLedger)


def attention_problems(parts: EngineParts, options: PagedOptions) -> list[AttentionProblem]:
    """Return the attention problems of an engine of these parts, for layouts with the min number
    of pages.
    """
    least = CacheShape(1, FEWEST_PAGES, options.page_size)
    return pool_problems(
        parts, options.page_size, {group.name: least for group in parts.info.groups}
    )
