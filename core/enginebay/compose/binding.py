"""Binds the chosen implementations of ops into the Ops that a model calls in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from enginebay.compose.kernels import ChosenKernels, writes_cache
from enginebay.compose.ops import ATTENTION
from enginebay.compose.partition import partitioned, split_model
from enginebay.compose.plan import Bound
from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.contracts.executor import Layouts
from enginebay.contracts.model import Model, ModelInfo
from enginebay.contracts.placement import Placement
from enginebay.ops.bound import AttentionImpl, Ops
from enginebay.ops.head_rotation import rotate, rotated_widths
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay.plugins.registry import import_target


def bind(kernels: ChosenKernels, model: Model, placement: Placement) -> Bound:
    """Bind the chosen implementations for the steps of a model on a mesh."""
    ops = OpsBinder(kernels, model.info, placement)
    return Bound(split_model(model, placement), ops, bound_ops(kernels, placement))


def bound_ops(kernels: ChosenKernels, placement: Placement) -> dict[str, Any]:
    """Return the ops other than attention by name, each with its tuned configuration and split over
    devices. A fused op that no implementation computes is composed of its parts.
    """
    bound = {op: kernels.tuned.bound(op, impl, kernels.env) for op, impl in kernels.plain.items()}
    if placement.mesh is not None:
        bound |= {
            op: partitioned(kernels.ops[op], impl, bound, placement) for op, impl in bound.items()
        }
    for op in kernels.ops.values():
        if op.composed and op.name not in bound and bound.keys() >= set(op.made_of):
            compose = import_target(op.composed, f"op {op.name!r} composed of its parts")
            bound[op.name] = compose(*(bound[part] for part in op.made_of))
    return bound


@dataclasses.dataclass(frozen=True)
class OpsBinder:
    """Makes the Ops of a step. Attention is the implementation of the step's phase, split over the
    heads; the spec of a layer selects its cache layout.
    """

    chosen: ChosenKernels
    info: ModelInfo
    placement: Placement

    def __call__(self, bucket: Bucket, layouts: Layouts) -> Ops:
        impl = self.chosen.attention[bucket.mode]
        # The model's specs have the dtype of the computation; the cache may have another dtype.
        by_spec = {
            spec.stored_as(spec.q_dtype): (spec, layout)
            for group, spec in self.info.attention.items()
            if isinstance(layout := layouts[group], KVLayout)
        }
        plain = bound_ops(self.chosen, self.placement)
        turn, *_ = self.chosen.ops[ATTENTION].calls

        def attention(
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            cache: CacheArrays,
            batch: AttnBatch,
            *,
            spec: AttnSpec,
            rope: RopeSpec | None = None,
            sinks: jax.Array | None = None,
            slopes: jax.Array | None = None,
        ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
            cached, layout = by_spec[spec]
            widths = rotated_widths(cached)
            fused = not writes_cache(impl) and k is not None and not widths
            if rope is not None and not fused:
                q = plain[turn](q, batch.positions, spec=rope)
                k = None if k is None else plain[turn](k, batch.positions, spec=rope)
                rope = None
            if widths:
                q = rotate(q, widths)
                k, v = (None if x is None else rotate(x, widths) for x in (k, v))
            args = (q, k, v, cache, batch, {"sinks": sinks, "slopes": slopes})
            out, cache, lse = self._attention(
                impl, plain, bucket, layout=layout, spec=cached, rope=rope, args=args
            )
            return rotate(out, widths) if widths else out, cache, lse

        return Ops({**plain, ATTENTION: attention})

    def _attention(
        self,
        impl: AttentionImpl,
        plain: Mapping[str, Any],
        bucket: Bucket,
        layout: KVLayout,
        spec: AttnSpec,
        rope: RopeSpec | None,
        args: tuple[Any, ...],
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        """Write k and v to the cache and attend, on each shard. With `rope`, q and k are not
        rotated yet, and the op rope_kv_write rotates them.
        """
        shards = self.placement.num_shards("kv_heads")
        local_spec = spec.per_shard(shards)
        local = layout.per_shard(shards)
        _, write, rotate_and_write = self.chosen.ops[ATTENTION].calls
        config, _ = self.chosen.tuned.config(
            ATTENTION, impl, self.chosen.env, local_spec, bucket, local
        )

        def run(
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            cache: CacheArrays,
            batch: AttnBatch,
            per_head: Mapping[str, jax.Array | None],
        ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
            if not writes_cache(impl) and k is not None:
                if rope is None:
                    cache = plain[write](cache, batch.slots, k, v, layout=local)
                else:
                    where = (batch.positions, batch.slots)
                    q, cache = plain[rotate_and_write](
                        q, k, v, cache, *where, spec=rope, layout=local
                    )
                k = v = None
            given: dict[str, Any] = {
                name: array for name, array in per_head.items() if array is not None
            }
            return impl(
                *(q, k, v, cache, batch), spec=local_spec, layout=local, config=config, **given
            )

        if shards == 1:
            return run(*args)
        heads = PartitionSpec(None, self.placement.rules["kv_heads"])
        keys = PartitionSpec() if spec.v_is_k_prefix else heads
        arrays = {n: self.placement.spec(axes) for n, axes in layout.logical_axes().items()}
        sharded = jax.shard_map(
            run,
            mesh=self.placement.mesh,
            in_specs=(heads, keys, keys, arrays, PartitionSpec(), PartitionSpec(heads[1])),
            out_specs=(heads, arrays, heads),
            check_vma=False,
        )
        return sharded(*args)
