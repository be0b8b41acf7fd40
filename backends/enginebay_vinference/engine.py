"""The contiguous engine: every row has one slot, which grows by doubling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.cache import KVLayout, Lease
from enginebay.engine import Engine, MemoryPlan, Pending, RowState, StepPlan
from enginebay.errors import InternalError
from enginebay.ops.spec import Bucket
from enginebay.rows import SequenceBuffer
from enginebay.runner.assemble import decode_inputs, prefill_inputs
from enginebay.runner.buckets import default_sizes, round_up
from enginebay.runner.parts import EngineParts, step_workspace_bytes, weight_bytes
from enginebay.runner.rowio import put_row, take_row
from enginebay.runner.runner import Runner, StepKey
from enginebay.runner.step import Program
from enginebay_vinference.grow import SlotShape, grow_cache
from enginebay_vinference.ledger import SlotLedger

ONE_PAGE_LAYOUTS = ("hnd",)
"""Layouts in which a slot is a single page: their kernels take pages of any size."""


class VInferenceOptions(BaseModel):
    """Options of the contiguous engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: int = Field(default=64, ge=8, le=1024, description="tokens a page, for layouts whose slots are runs of pages")
    grow: bool = Field(default=True, description="start with small slots and double them; False allocates all at once")


class VInferenceEngine(Engine):
    """Contiguous slots over the core's runner.

    Decode steps use the cache as it lies when all slots take part at their full length; otherwise, where the attention
    implementation asks for it, a copy of the rows that do (see `compact_decode_step`), else the page tables.
    """

    def __init__(self, parts: EngineParts, options: VInferenceOptions) -> None:
        config = parts.config
        assert config.max_model_len is not None, "the composition root resolves max_model_len"
        self.parts = parts
        self.options = options
        min_rows = parts.platform.min_rows(parts.dtype)
        self.sizes = default_sizes(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            min_rows=min_rows,
        )
        self.rows = SequenceBuffer(
            max_num_reqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=parts.model.info.vocab_size,
            page_sizes=[config.max_model_len],
        )
        self.ledger = SlotLedger(config.max_num_seqs, config.max_model_len)
        self.memory = plan_memory(parts, self._largest_shape(), self._layouts)
        self.memory.check()
        self.runner = Runner(
            Program(parts.model, parts.ops, parts.sampler),
            parts.load_weights(),
            parts.placement,
            num_rows=config.max_num_seqs,
            max_steps=config.decode_steps,
            compile_options=parts.platform.compile_options(),
        )
        self._shape = self._largest_shape() if not options.grow else self._shape_for(1, 1)
        self.make_arrays()

    def _shape_for(self, num_rows: int, num_tokens: int) -> SlotShape:
        """The smallest size with room for `num_rows` rows of `num_tokens` tokens."""
        slots = round_up(self.sizes.decode_rows, num_rows)
        capacity = round_up(self.sizes.kv_lens, num_tokens)
        if self.parts.layout in ONE_PAGE_LAYOUTS:
            return SlotShape(slots, 1, capacity)
        page_size = min(self.options.page_size, capacity)
        return SlotShape(slots, -(-capacity // page_size), page_size)

    def _largest_shape(self) -> SlotShape:
        return self._shape_for(self.sizes.decode_rows[-1], self.sizes.kv_lens[-1])

    def _layouts(self, shape: SlotShape) -> dict[str, KVLayout]:
        kind = self.parts.layout_type
        return {
            g.name: kind(shape.num_slots * shape.pages_per_slot, shape.page_size, g.num_kv_heads, g.head_dim, self.parts.dtype)
            for g in self.parts.model.info.groups
        }

    def make_arrays(self) -> None:
        if self.runner.has_state:
            return
        self.ledger.pages_per_slot = self._shape.pages_per_slot
        self.runner.make_state(self._layouts(self._shape))

    def drop_arrays(self) -> None:
        if self.rows.num_reqs:
            raise InternalError(f"the cache is dropped while {self.rows.num_reqs} rows are running")
        self.runner.state = None
        if self.options.grow:
            self._shape = self._shape_for(1, 1)

    def _make_room(self, num_rows: int, num_tokens: int) -> None:
        wanted = self._shape_for(max(num_rows, self._shape.num_slots), max(num_tokens, self._shape.capacity))
        if wanted != self._shape:
            grow_cache(self.runner, self._shape, wanted)
            self._shape = wanted
            self.ledger.pages_per_slot = wanted.pages_per_slot

    def step(self, plan: StepPlan) -> Pending:
        num_rows = max(max(r.row for r in plan.rows) + 1, min(plan.demand.num_rows, self.ledger.num_slots))
        num_tokens = max(max(r.lease.capacity for r in plan.rows), min(plan.demand.num_tokens_per_row, self.ledger.max_model_len))
        self._make_room(num_rows, num_tokens)
        return self._decode(plan) if plan.is_decode else self._prefill(plan)

    def _prefill(self, plan: StepPlan) -> Pending:
        fresh = all(row.num_computed == 0 for row in plan.rows)
        num_tokens = sum(row.num_tokens for row in plan.rows)
        longest = max(row.num_computed + row.num_tokens for row in plan.rows)
        bucket = self._prefill_bucket(len(plan.rows), num_tokens, None if fresh else longest)
        inputs, places = prefill_inputs(plan.rows, bucket, self.rows, self.ledger, self.runner.layouts)
        return self.runner.prefill(bucket, inputs, places)

    def _prefill_bucket(self, num_rows: int, num_tokens: int, longest: int | None) -> Bucket:
        """`longest` is the longest context of rows with a prefix, None when no row has one."""
        seqs = round_up(self.sizes.prefill_rows, num_rows)
        # the rarer shapes come in every other size only: fewer programs for a little more padding
        sizes = self.sizes.prefill_tokens if seqs == 1 and longest is None else self.sizes.prefill_tokens[::-1][::2][::-1]
        tokens = round_up(sizes, num_tokens)
        kv_len = min(tokens, self._shape.capacity) if longest is None else round_up(self.sizes.kv_lens, longest)
        mode = "prefill" if longest is None else "mixed"
        return Bucket(tokens, seqs, self._shape.pages_per_slot, tokens, kv_len, mode)

    def _decode(self, plan: StepPlan) -> Pending:
        longest = max(min(row.num_computed + plan.num_steps, row.lease.capacity) for row in plan.rows)
        bucket, compact = self._decode_bucket(len(plan.rows), longest)
        places = np.array([row.row for row in plan.rows]) if bucket.rows_are_pages else np.arange(len(plan.rows))
        inputs = decode_inputs(plan.rows, places, bucket, plan.num_steps, self.rows, self.ledger, self.runner.layouts)
        return self.runner.decode(bucket, inputs, places, compact=compact)

    def _decode_bucket(self, num_rows: int, longest: int) -> tuple[Bucket, bool]:
        """The bucket, and whether the call works on a compact copy."""
        seqs = round_up(self.sizes.decode_rows, num_rows)
        kv_len = min(round_up(self.sizes.kv_lens, longest), self._shape.capacity)
        whole = seqs == self._shape.num_slots and kv_len == self._shape.capacity and self._shape.pages_per_slot == 1
        bucket = Bucket(seqs, seqs, self._shape.pages_per_slot, 1, kv_len, "decode", rows_are_pages=whole)
        return bucket, self.parts.compact_decode and not whole

    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        largest = self._largest_shape()
        self._make_room(largest.num_slots, largest.capacity)
        keys = self._prefill_keys()
        for num_rows in self.sizes.decode_rows:
            for kv_len in self.sizes.kv_lens:
                bucket, compact = self._decode_bucket(num_rows, kv_len)
                keys.append(StepKey("compact" if compact else "decode", bucket))
        return self.runner.compile_all(keys, progress)

    def _prefill_keys(self) -> list[StepKey]:
        buckets = []
        for num_rows in self.sizes.prefill_rows:
            for num_tokens in self.sizes.prefill_tokens:
                buckets.append(self._prefill_bucket(num_rows, num_tokens, None))
                buckets += [self._prefill_bucket(num_rows, num_tokens, kv_len) for kv_len in self.sizes.kv_lens]
        return [StepKey("prefill", bucket) for bucket in dict.fromkeys(buckets)]

    def take(self, lease: Lease) -> RowState:
        length = int(self.rows.num_tokens[lease.row])
        return take_row(self.runner, lease.row, self._pages(lease), self.rows.token_ids[lease.row, :length])

    def put(self, lease: Lease, state: RowState) -> None:
        self._make_room(lease.row + 1, lease.capacity)
        put_row(self.runner, lease.row, self._pages(lease), state)

    def _pages(self, lease: Lease) -> np.ndarray:
        table = np.zeros((1, self._shape.pages_per_slot), np.int32)
        self.ledger.write_table([lease], table)
        return table[0]


def plan_memory(parts: EngineParts, largest: SlotShape, layouts: Callable[[SlotShape], dict[str, KVLayout]]) -> MemoryPlan:
    """Bytes per device of weights, the largest cache, and room for one step's activations."""
    info = parts.model.info
    shards = parts.placement.num_shards("kv_heads")
    cache = sum(g.num_layers * layouts(largest)[g.name].num_bytes() for g in info.groups) // shards
    return MemoryPlan(
        weights_bytes=weight_bytes(parts),
        cache_bytes=cache,
        workspace_bytes=step_workspace_bytes(parts),
        device_bytes=parts.platform.hardware().memory_bytes,
    )
