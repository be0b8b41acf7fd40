"""The paged engine: rows hold pages of one pool, and share those with equal tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from enginebay.background import Background
from enginebay.cache import CacheGroup, KVLayout, Lease
from enginebay.engine import (
    AttentionProblem,
    Compilations,
    Engine,
    Pending,
    RowState,
    StepPlan,
)
from enginebay.errors import InternalError
from enginebay.memory import ACCOUNT, MemoryPlan
from enginebay.ops.shadow import ShadowReport
from enginebay.processor import RowValues
from enginebay.rows import PageTable, RowTable
from enginebay.runner.assemble import decode_inputs, prefill_inputs, verify_inputs
from enginebay.runner.keys import StepKey
from enginebay.runner.parts import EngineParts, StepFacts
from enginebay.runner.rowio import put_row, take_row
from enginebay.runner.runner import Runner, make_runner
from enginebay_oengine.geometry import Geometry, make_geometry
from enginebay_oengine.growing import GrowingPages
from enginebay_oengine.held import GroupPages
from enginebay_oengine.ledger import PageLedger
from enginebay_oengine.options import PagedOptions
from enginebay_oengine.pool import DUMMY_PAGE, PagePool, pages_for
from enginebay_oengine.prefix import PrefixIndex, Salt
from enginebay_oengine.sizing import (
    FEWEST_PAGES,
    cache_pages,
    choose_num_pages,
    first_pages,
    plan_memory,
)
from enginebay_oengine.store import PageStore


class PagedEngine(Engine):
    """Pages over the core's runner. See `Geometry` for the sizes of steps, `choose_num_pages` for
    that of the cache.
    """

    def __init__(self, parts: EngineParts, options: PagedOptions) -> None:
        config = parts.config
        assert config.max_model_len is not None, "the composition root resolves max_model_len"
        self.parts = parts
        self.options = options
        self.geometry = make_geometry(parts.facts(), options.page_size)
        self.num_pages = choose_num_pages(parts, options, self.geometry)
        self.rows = RowTable(
            max_num_reqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=parts.model.info.vocab_size,
            page_sizes=[options.page_size] * len(parts.model.info.groups),
        )
        self.ledger: PageLedger = make_ledger(
            parts, options, self.geometry, self.num_pages, self.rows.page_tables
        )
        self.memory: MemoryPlan = plan_memory(parts, self.geometry, self.num_pages)
        self.compilations = Compilations()
        self._runner: Runner | None = None
        self._pages: GrowingPages | None = None

    @property
    def runner(self) -> Runner:
        """The compiled steps and all that lies on the device; made by make_arrays()."""
        if self._runner is None:
            raise InternalError("the engine is used before make_arrays()")
        return self._runner

    @property
    def pages(self) -> GrowingPages:
        """The arrays of the cache; made by make_arrays()."""
        if self._pages is None:
            raise InternalError("the engine is used before make_arrays()")
        return self._pages

    def make_arrays(self) -> None:
        if self._runner is None:
            ACCOUNT.promise(self, self.memory, self.parts.placement.devices)
            self._runner = make_runner(self.parts, self.compilations)
            whole = cache_pages(self.parts, self.geometry, self.num_pages)
            first = first_pages(self.parts, self.options, self.geometry, whole)
            self._pages = GrowingPages(self._runner, self._layouts, first, whole)
        self.pages.make()

    def _layouts(self, num_pages: Mapping[str, int]) -> Mapping[str, KVLayout]:
        return self.geometry.layouts(num_pages, self.parts.model.info.groups, self.parts.dtype)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.state, self._runner.weights = None, {}
        self._runner = None
        self._pages = None
        ACCOUNT.release(self)

    def drop_arrays(self) -> None:
        if self.rows.num_reqs:
            raise InternalError(f"the cache is dropped while {self.rows.num_reqs} rows are running")
        self.ledger.forget()
        if self._runner is not None:
            self._runner.state = None

    def step(self, plan: StepPlan) -> Pending:
        demand = plan.demand
        self._catch_up(
            demand.num_rows, pages_for(demand.num_tokens_per_row, self.options.page_size)
        )
        if plan.verifies:
            return _verify(self, plan)
        return self._decode(plan) if plan.is_decode else self._prefill(plan)

    def _catch_up(self, num_rows: int = 0, row_pages: int = 0) -> None:
        """Allocate what the ledger has given out, and what `num_rows` rows of `row_pages` pages
        take, and copy what is to be copied.
        """
        wanted = {}
        for name, group in self.ledger.groups.items():
            each = min(row_pages, self.geometry.row_pages(group.window))
            pool = group.store.pool
            wanted[name] = max(min(1 + num_rows * each, pool.num_pages), pool.reach)
        self.pages.reach(wanted)
        self.pages.copier(self.ledger.take_copies())

    def _prefill(self, plan: StepPlan) -> Pending:
        no_prefix = all(row.num_computed == 0 for row in plan.rows)
        num_tokens = sum(row.num_tokens for row in plan.rows)
        wanted = self.geometry.prefill_bucket(len(plan.rows), num_tokens, no_prefix=no_prefix)
        bucket = self.runner.at_hand(StepKey("prefill", wanted)).bucket
        inputs, places = prefill_inputs(plan.rows, bucket, self.rows, self.ledger)
        return self.runner.prefill(bucket, inputs, places)

    def _decode(self, plan: StepPlan) -> Pending:
        longest = max(
            [min(row.num_computed + plan.num_steps, row.lease.capacity) for row in plan.rows]
        )
        key = self.runner.at_hand(self.geometry.decode_key(len(plan.rows), longest))
        places = np.arange(len(plan.rows))
        inputs = decode_inputs(
            plan.rows,
            places,
            key.bucket,
            plan.num_steps,
            self.rows,
            self.ledger,
        )
        return self.runner.decode(key, inputs, places)

    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        self._make_whole()
        return self.runner.compile_all(self.geometry.all_steps(), progress) + 1

    def begin_warmup(self, progress: Callable[[int, int, str], None] | None = None) -> Background:
        self._make_whole()
        return self.runner.compile_first(self.geometry.all_steps(), progress)

    def _make_whole(self) -> None:
        """Allocate the whole cache, whose programs are those that stay."""
        self.pages.make_all()
        self.pages.copier.compile()

    def attention_problems(self) -> list[AttentionProblem]:
        return _problems(
            self.geometry,
            self._layouts(cache_pages(self.parts, self.geometry, self.num_pages)),
            drafts_are_rows=self.parts.drafts_are_rows,
        )

    def take(self, lease: Lease) -> RowState:
        self._catch_up()
        length = int(self.rows.num_tokens[lease.row])
        pages = {group: np.asarray(its, np.int32) for group, its in lease.pages.items()}
        return take_row(self.runner, lease.row, pages, self.rows.token_ids[lease.row, :length])

    def put(self, lease: Lease, state: RowState) -> None:
        self.ledger.resume(lease, state.num_cached)
        self._catch_up()
        # Shared pages hold the same keys and values already; theirs are written where nobody reads.
        private = {
            name: np.asarray(
                [
                    page if page and group.store.is_private(page) else DUMMY_PAGE
                    for page in lease.pages[name]
                ],
                np.int32,
            )
            for name, group in self.ledger.groups.items()
        }
        put_row(self.runner, lease.row, private, state)

    def row_values(self, lease: Lease) -> tuple[RowValues, ...]:
        return self.runner.writer.read(lease.row)

    @property
    def shadow_report(self) -> ShadowReport | None:
        return None if self._runner is None else self._runner.shadow_report

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        before = self.geometry
        self.drop_arrays()
        swap_back = self.runner.swap(parts.program())
        self.geometry = dataclasses.replace(before, compact_decode=parts.compact_decode)

        def undo() -> None:
            self.drop_arrays()
            swap_back()
            self.geometry = before
            self.make_arrays()

        self.make_arrays()
        return undo


def attention_problems(facts: StepFacts, options: PagedOptions) -> list[AttentionProblem]:
    """The attention problems of an engine of these facts; the layouts have no more pages than they
    must.
    """
    geometry = make_geometry(facts, options.page_size)
    layouts = geometry.layouts(
        {group.name: FEWEST_PAGES for group in facts.groups}, facts.groups, facts.dtype
    )
    return _problems(geometry, layouts, drafts_are_rows=facts.drafts_are_rows)


def _problems(
    geometry: Geometry, layouts: Mapping[str, KVLayout], *, drafts_are_rows: bool
) -> list[AttentionProblem]:
    return [key.attention(layouts, by_rows=drafts_are_rows) for key in geometry.all_steps()]


def _verify(engine: PagedEngine, plan: StepPlan) -> Pending:
    runner = engine.runner
    key = runner.at_hand(engine.geometry.verify_key(len(plan.rows)))
    most = runner.program.drafts_a_step(key.bucket)
    inputs = verify_inputs(plan.rows, key.bucket, most, engine.rows, engine.ledger)
    return runner.decode(key, inputs, np.arange(len(plan.rows)))


def make_ledger(
    parts: EngineParts,
    options: PagedOptions,
    geometry: Geometry,
    num_pages: int,
    tables: Sequence[PageTable],
) -> PageLedger:
    """The books of a cache of so many pages, of which those of each row are written to the table of
    their group.
    """
    config, counts = parts.config, cache_pages(parts, geometry, num_pages)
    assert config.max_model_len is not None, "the composition root resolves max_model_len"

    def pages(group: CacheGroup, table: PageTable) -> GroupPages:
        index = PrefixIndex(options.prefix_ttl_s) if options.prefix_caching else None
        store = PageStore(PagePool(counts[group.name]), index)
        return GroupPages(store, table, geometry.kept_window(group))

    groups = parts.model.info.groups
    return PageLedger(
        {g.name: pages(g, table) for g, table in zip(groups, tables, strict=True)},
        config.max_num_seqs,
        config.max_model_len,
        max_ahead=geometry.max_ahead,
        grows=not options.reserve_all,
        salt=Salt(weights=f"{config.model} {parts.dtype}"),
    )
