"""SingleRow: one row that a model computes at once, without an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from enginebay.compose.binding import OpsBinder
from enginebay.compose.kernels import ChosenKernels
from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.executor import Layouts
from enginebay.contracts.model import ModelInfo
from enginebay.contracts.placement import Placement
from enginebay.ops.batches import derive_batch
from enginebay.ops.bound import Ops
from enginebay.ops.spec import AttnBatch, Bucket


@dataclasses.dataclass(frozen=True)
class SingleRow:
    """What Model.hidden needs for a row of at most `bucket.tokens` tokens, from its first one on:
    the ops, and the layouts of a cache that has room for this row alone.
    """

    info: ModelInfo
    layouts: Layouts
    bucket: Bucket
    ops: Ops

    @staticmethod
    def of(info: ModelInfo, kernels: ChosenKernels, placement: Placement, size: int) -> SingleRow:
        """Return the row of at most `size` tokens."""
        page_size = kernels.smallest_page or size
        num_pages = -(-size // page_size)
        bucket = Bucket(size, 1, num_pages, size, size, "prefill")
        layouts: Layouts = {
            group: spec.make_layout(kernels.layout_type, num_pages, page_size)
            for group, spec in info.attention.items()
        } | {s.name: s.make_layout(CacheShape(1, 1, size)) for s in info.states}
        ops = OpsBinder(kernels, info, placement)(bucket, layouts)
        return SingleRow(info, layouts, bucket, ops)

    def inputs(
        self, count: jax.Array
    ) -> tuple[dict[str, tuple[CacheArrays, ...]], Mapping[str, AttnBatch]]:
        """Return an empty cache and the batches of a step with `count` tokens, int32 [1]."""
        table = jnp.arange(self.bucket.pages_per_seq, dtype=jnp.int32)[None]
        batches = {
            name: derive_batch(count, count, table, layout.page_size, self.bucket)
            for name, layout in self.layouts.items()
        }
        cache: dict[str, tuple[CacheArrays, ...]] = {
            group.name: tuple(self.layouts[group.name].init() for _ in range(group.num_layers))
            for group in self.info.cache_groups
        }
        return cache, batches
