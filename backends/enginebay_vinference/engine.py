"""The contiguous engine: every row has one slot, which grows by doubling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.cache import Lease
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
from enginebay.rows import RowTable
from enginebay.runner.assemble import decode_inputs, prefill_inputs, verify_inputs
from enginebay.runner.parts import EngineParts, StepFacts, step_workspace_bytes, weight_bytes
from enginebay.runner.rowio import put_row, take_row
from enginebay.runner.runner import Runner, make_runner
from enginebay_vinference.geometry import Geometry, make_geometry
from enginebay_vinference.grow import SlotShape, grow_cache
from enginebay_vinference.ledger import SlotLedger


class VInferenceOptions(BaseModel):
    """Options of the contiguous engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: int = Field(
        default=64,
        ge=8,
        le=1024,
        description="tokens a page, for layouts whose slots are runs of pages",
    )
    grow: bool = Field(
        default=True,
        description="start with small slots and double them; False allocates all at once",
    )


class VInferenceEngine(Engine):
    """Contiguous slots over the core's runner. See `Geometry` for the sizes of cache and steps."""

    def __init__(self, parts: EngineParts, options: VInferenceOptions) -> None:
        config = parts.config
        assert config.max_model_len is not None, "the composition root resolves max_model_len"
        self.parts = parts
        self.options = options
        self.geometry = make_geometry(parts.facts(), options.page_size)
        self.rows = RowTable(
            max_num_reqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=parts.model.info.vocab_size,
            page_sizes=[config.max_model_len] * len(parts.model.info.groups),
        )
        self.ledger: SlotLedger = SlotLedger(
            config.max_num_seqs,
            config.max_model_len,
            [group.name for group in parts.model.info.groups],
            self.rows.page_tables,
        )
        self.memory = plan_memory(parts, self.geometry)
        self.compilations = Compilations()
        self._runner: Runner | None = None
        self._least = self.geometry.shape_for(1, 1) if options.grow else self.geometry.largest
        self._shape = self._least

    @property
    def runner(self) -> Runner:
        """The compiled steps and all that lies on the device; made by make_arrays()."""
        if self._runner is None:
            raise InternalError("the engine is used before make_arrays()")
        return self._runner

    def make_arrays(self) -> None:
        if self._runner is None:
            ACCOUNT.promise(self, self.memory, self.parts.placement.devices)
            self._runner = make_runner(self.parts, self.compilations)
        if not self.runner.has_state:
            self._shape = self._least
            self.ledger.pages_per_slot = self._shape.pages_per_slot
            self.runner.make_state(
                self.geometry.layouts(self._shape, self.parts.model.info.groups, self.parts.dtype)
            )

    def close(self) -> None:
        if self._runner is not None:
            self._runner.state, self._runner.weights = None, {}
        self._runner = None
        ACCOUNT.release(self)

    def drop_arrays(self) -> None:
        if self.rows.num_reqs:
            raise InternalError(f"the cache is dropped while {self.rows.num_reqs} rows are running")
        if self._runner is not None:
            self._runner.state = None

    def _make_room(self, num_rows: int, num_tokens: int) -> None:
        wanted = self.geometry.shape_for(
            max(num_rows, self._shape.num_slots), max(num_tokens, self._shape.capacity)
        )
        if wanted != self._shape:
            grow_cache(self.runner, self._shape, wanted)
            self._shape = wanted
            self.ledger.pages_per_slot = wanted.pages_per_slot

    def step(self, plan: StepPlan) -> Pending:
        num_rows = max(
            max(r.row for r in plan.rows) + 1, min(plan.demand.num_rows, self.ledger.num_slots)
        )
        demanded = min(plan.demand.num_tokens_per_row, self.ledger.max_model_len)
        self._make_room(num_rows, max(*(r.lease.capacity for r in plan.rows), demanded))
        if plan.verifies:
            return _verify(self, plan)
        return self._decode(plan) if plan.is_decode else self._prefill(plan)

    def _prefill(self, plan: StepPlan) -> Pending:
        no_prefix = all(row.num_computed == 0 for row in plan.rows)
        num_tokens = sum(row.num_tokens for row in plan.rows)
        bucket = self.geometry.prefill_bucket(
            self._shape, len(plan.rows), num_tokens, no_prefix=no_prefix
        )
        inputs, places = prefill_inputs(plan.rows, bucket, self.rows, self.ledger)
        return self.runner.prefill(bucket, inputs, places)

    def _decode(self, plan: StepPlan) -> Pending:
        longest = max(
            min(row.num_computed + plan.num_steps, row.lease.capacity) for row in plan.rows
        )
        key = self.geometry.decode_bucket(self._shape, len(plan.rows), longest)
        places = (
            np.array([row.row for row in plan.rows])
            if key.bucket.rows_are_pages
            else np.arange(len(plan.rows))
        )
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
        # what is compiled is compiled for slots at their full size: they never start smaller again
        self._least = self.geometry.largest
        self._make_room(self._least.num_slots, self._least.capacity)
        return self.runner.compile_all(self.geometry.all_steps(), progress)

    def attention_problems(self) -> list[AttentionProblem]:
        return _problems(self.geometry, self.geometry.largest, self.parts.facts())

    def take(self, lease: Lease) -> RowState:
        length = int(self.rows.num_tokens[lease.row])
        return take_row(
            self.runner,
            lease.row,
            _pages(self.ledger, self._shape, lease),
            self.rows.token_ids[lease.row, :length],
        )

    def put(self, lease: Lease, state: RowState) -> None:
        self._make_room(lease.row + 1, lease.capacity)
        put_row(self.runner, lease.row, _pages(self.ledger, self._shape, lease), state)

    def row_values(self, lease: Lease) -> tuple[RowValues, ...]:
        return self.runner.writer.read(lease.row)

    @property
    def shadow_report(self) -> ShadowReport | None:
        return None if self._runner is None else self._runner.shadow_report

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        before, least = self.geometry, self._least
        self.drop_arrays()
        swap_back = self.runner.swap(parts.program())
        self.geometry = dataclasses.replace(before, compact_decode=parts.compact_decode)

        def undo() -> None:
            self.drop_arrays()
            swap_back()
            self.geometry, self._least = before, least
            self.make_arrays()

        self.make_arrays()
        return undo


def attention_problems(facts: StepFacts, options: VInferenceOptions) -> list[AttentionProblem]:
    """The attention problems of an engine of these facts, at every length to which its slots grow."""
    geometry = make_geometry(facts, options.page_size)
    shapes = [geometry.largest]
    if options.grow:
        shapes = [
            geometry.exact_shape(shapes[0].num_slots, length) for length in geometry.sizes.kv_lens
        ]
    return [problem for shape in shapes for problem in _problems(geometry, shape, facts)]


def _problems(geometry: Geometry, shape: SlotShape, facts: StepFacts) -> list[AttentionProblem]:
    layouts = geometry.layouts(shape, facts.groups, facts.dtype)
    steps = geometry.steps_at(shape)
    return [key.attention(layouts, by_rows=facts.drafts_are_rows) for key in steps]


def _verify(engine: VInferenceEngine, plan: StepPlan) -> Pending:
    key = engine.geometry.verify_key(engine._shape, len(plan.rows))
    runner = engine.runner
    most = runner.program.drafts_a_step(key.bucket)
    inputs = verify_inputs(plan.rows, key.bucket, most, engine.rows, engine.ledger)
    return runner.decode(key, inputs, np.arange(len(plan.rows)))


def _pages(ledger: SlotLedger, shape: SlotShape, lease: Lease) -> dict[str, np.ndarray]:
    """int32 [pages_per_slot] by cache group, the pages of a slot."""
    tables = {group: np.zeros((1, shape.pages_per_slot), np.int32) for group in ledger.windows}
    for group, table in tables.items():
        ledger.write_table(group, [lease], table)
    return {group: table[0] for group, table in tables.items()}


def plan_memory(parts: EngineParts, geometry: Geometry) -> MemoryPlan:
    """Bytes per device of weights, the cache at its full size, and room for one step: activations,
    and a compact copy.
    """
    groups = parts.model.info.groups
    layouts = geometry.layouts(geometry.largest, groups, parts.dtype)
    largest = geometry.largest
    cache_bytes = sum(g.num_layers * layouts[g.name].num_bytes() for g in groups)
    cache_bytes //= parts.placement.num_shards("kv_heads")
    compact = [key.bucket for key in geometry.all_steps() if key.kind == "compact"]
    max_copied = max((bucket.seqs * bucket.max_kv_len for bucket in compact), default=0)
    copy_bytes = cache_bytes * max_copied // (largest.num_slots * largest.capacity)
    return MemoryPlan(
        weights_bytes=weight_bytes(parts.model, parts.placement, parts.dtype),
        cache_bytes=cache_bytes,
        workspace_bytes=step_workspace_bytes(parts) + copy_bytes,
        device_bytes=parts.platform.hardware().memory_bytes,
    )
