"""Binds the chosen implementations of ops into the Ops that a model calls in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from enginebay.compose.kernels import ChosenKernels, writes_cache
from enginebay.compose.ops import ATTENTION
from enginebay.compose.partition import partitioned
from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.contracts.executor import Layouts
from enginebay.contracts.model import ModelInfo
from enginebay.contracts.placement import Placement
from enginebay.errors import UnsupportedError
from enginebay.ops.attention import INPUT_AXES, NO_INPUTS, AttentionOp, NamedInputs
from enginebay.ops.bound import Ops
from enginebay.ops.caps import LAYER
from enginebay.ops.head_rotation import rotate, rotated_widths
from enginebay.ops.key_centers import CENTER_AXES, KEY_CENTER, without_center
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay.plugins.registry import import_target


def bound_ops(kernels: ChosenKernels, placement: Placement | None = None) -> dict[str, Any]:
    """Return the ops other than attention by name, each with its tuned configuration, and split
    over the devices of a `placement`; None: for one device. A fused op that no implementation
    computes is composed of its parts.
    """
    bound = {op: kernels.tuned.bound(op, impl, kernels.env) for op, impl in kernels.plain.items()}
    if placement is not None and placement.mesh is not None:
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
        chosen = self.chosen
        impl, shards = chosen.attention[bucket.mode], self.placement.num_shards("kv_heads")
        # The model's specs have the dtype of the computation; the cache may have another dtype.
        by_spec = {
            spec.called: (spec.per_shard(shards), layout.per_shard(shards))
            for group, spec in self.info.attention.items()
            if isinstance(layout := layouts[group], KVLayout)
        }
        plain = bound_ops(chosen)
        around = chosen.ops[ATTENTION].calls
        assert around is not None, "attention names the ops around it"
        rope_op, write_op = plain[around.rotate], plain[around.write]
        rope_write_op = plain[around.rotate_and_write]
        impl_writes = writes_cache(impl)

        def attention(
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            cache: CacheArrays,
            batch: AttnBatch,
            *,
            spec: AttnSpec,
            rope: RopeSpec | None = None,
            inputs: NamedInputs = NO_INPUTS,
        ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
            """Rotate queries and keys, write k and v to the cache, and attend, on one shard."""
            own, layout = by_spec[spec]
            taken = {**dict.fromkeys(own.inputs), **impl.caps.inputs}
            config, _ = chosen.tuned.config(ATTENTION, impl, chosen.env, own, bucket, layout)
            widths = rotated_widths(own)
            cache, centers = without_center(cache)
            writes = k is not None and not impl_writes  # here, before the implementation
            if rope is not None and (widths or not writes):
                q = rope_op(q, batch.positions, spec=rope)
                k = None if k is None else rope_op(k, batch.positions, spec=rope)
                rope = None
            if centers and k is not None:
                k = (k.astype(jnp.float32) - centers[KEY_CENTER]).astype(k.dtype)
            if widths:
                q = rotate(q, widths)
                k, v = (None if x is None else rotate(x, widths) for x in (k, v))
            if writes:
                if rope is None:
                    cache = write_op(cache, batch.slots, k, v, layout=layout)
                else:
                    where = (batch.positions, batch.slots)
                    q, cache = rope_write_op(q, k, v, cache, *where, spec=rope, layout=layout)
                k = v = None
            given: dict[str, Any] = {n: inputs[n] for n in taken if n in inputs}
            if len(given) < len(taken):
                raise missing_inputs(impl.name, taken.keys() - given.keys())
            out, cache, lse = impl(
                *(q, k, v, cache, batch), spec=own, layout=layout, config=config, **given
            )
            return rotate(out, widths) if widths else out, {**cache, **centers}, lse

        if self.placement.mesh is not None:
            plain = bound_ops(chosen, self.placement)
        attend = (
            self._split(attention, layouts, {**INPUT_AXES, **impl.caps.inputs})
            if shards > 1
            else attention
        )
        shares = LAYER not in impl.caps.inputs
        return Ops({**plain, ATTENTION: attend}, shares_layers=shares)

    def _split(
        self, attention: AttentionOp, layouts: Layouts, axes: Mapping[str, tuple[str | None, ...]]
    ) -> AttentionOp:
        """Return attention with its heads and its cache split over the devices of the mesh. `axes`:
        those of its inputs, as in `Caps.inputs`.
        """
        heads = PartitionSpec(None, self.placement.rules["kv_heads"])
        by_spec = {spec.called: layouts[group] for group, spec in self.info.attention.items()}

        def split(
            q: jax.Array,
            k: jax.Array | None,
            v: jax.Array | None,
            cache: CacheArrays,
            batch: AttnBatch,
            *,
            spec: AttnSpec,
            rope: RopeSpec | None = None,
            inputs: NamedInputs = NO_INPUTS,
        ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
            keys = PartitionSpec() if spec.v_is_k_prefix else heads
            cache_axes = by_spec[spec].logical_axes()
            arrays = {name: self.placement.spec(own) for name, own in cache_axes.items()}
            if KEY_CENTER in cache:
                arrays[KEY_CENTER] = self.placement.spec(CENTER_AXES)

            numbers = {n: x for n, x in inputs.items() if isinstance(x, int)}
            parts = {n: x for n, x in inputs.items() if n in axes and n not in numbers}

            def run(q: Any, k: Any, v: Any, cache: Any, batch: Any, parts: Any) -> Any:
                given = {**numbers, **parts}
                return attention(q, k, v, cache, batch, spec=spec, rope=rope, inputs=given)

            split_inputs = {
                name: PartitionSpec(*(heads[1] if axis == "heads" else None for axis in axes[name]))
                for name in parts
            }
            sharded = jax.shard_map(
                run,
                mesh=self.placement.mesh,
                in_specs=(heads, keys, keys, arrays, PartitionSpec(), split_inputs),
                out_specs=(heads, arrays, heads),
                check_vma=False,
            )
            return sharded(q, k, v, cache, batch, parts)

        return split


def missing_inputs(kernel: str, names: Collection[str]) -> UnsupportedError:
    """Return the error for inputs of attention that a model does not pass."""
    return UnsupportedError(
        f"attention by {kernel!r} without its inputs {', '.join(sorted(names))}",
        "models that pass the inputs which their AttnSpec names and the kernel declares",
        "Pass them in `inputs`, or choose another kernel.",
    )
