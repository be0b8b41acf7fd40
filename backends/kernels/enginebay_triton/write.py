"""The ops kv_write and rope_kv_write in Triton, in place, for the layouts nhd and hnd."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay.ops.rotary import RopeSpec, rope_frequencies
from enginebay_triton.cache_arrays import as_bits, from_stored_bits, stored_tokens, strides_of_heads
from enginebay_triton.call import Launch, Launcher, launch, require_versions
from enginebay_triton.interpreter import interpret, require

require_versions()

from enginebay_triton import write_kernels as kernels  # noqa: E402  # needs Triton

LAYOUTS = ("nhd", "hnd")

TILE = 1024
"""Values of one token, over all its heads, that one program writes."""


@dataclasses.dataclass(frozen=True)
class _LayoutArrays:
    """A layout as the kernels see it: its arrays in order, and the strides of write_kernels."""

    arrays: tuple[str, ...]
    strides: dict[str, int]


def _home(layout: KVLayout) -> _LayoutArrays:
    """Return the description of a layout; UnsupportedError for one that the kernels do not know."""
    heads, size, dim = layout.num_kv_heads, layout.page_size, layout.head_dim
    if layout.name == "nhd":
        head = dim if layout.v_prefix_dim else 2 * dim
        token = heads * head
        strides = {"PAGE": size * token, "TOKEN": token, "HEAD": head, "V_OFFSET": dim}
        return _LayoutArrays(("kv",), {"PAGE_SIZE": size, **strides})
    if layout.name == "hnd":
        strides = {"PAGE": heads * size * dim, "TOKEN": dim, "HEAD": size * dim, "V_OFFSET": 0}
        return _LayoutArrays(tuple(layout.shapes()), {"PAGE_SIZE": size, **strides})
    raise UnsupportedError(f"layout {layout.name}", ", ".join(LAYOUTS), "Choose another kv_write.")


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _heads_per_program(num_heads: int, head_dim: int) -> int:
    return max(1, min(_power_of_two(num_heads), TILE // _power_of_two(head_dim)))


def _shapes(layout: KVLayout, heads: int) -> dict[str, int]:
    return {
        "NUM_KV_HEADS": layout.num_kv_heads,
        "HEAD_DIM": layout.head_dim,
        "HEADS": heads,
        "DIM_BLOCK": _power_of_two(layout.head_dim),
    }


@dataclasses.dataclass(frozen=True)
class KvWrite:
    """The op kv_write; KvWriteOp describes it."""

    launcher: Launcher = launch

    def __call__(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, *, layout: KVLayout
    ) -> CacheArrays:
        """Write k and v [T, kv_heads, head_dim] to slots int32 [T]; negative slots are dropped.

        Where the values are a prefix of the keys, only keys are written.
        """
        if layout.storage is not None:
            return self._write_stored(cache, slots, stored_tokens(k, v, layout), layout)
        home = _home(layout)
        heads = _heads_per_program(layout.num_kv_heads, layout.head_dim)
        how = Launch(
            (k.shape[0], -(-layout.num_kv_heads // heads)),
            (),
            {**home.strides, **_shapes(layout, heads)},
            num_warps=2,
            num_stages=1,
            num_in_place=len(home.arrays),
        )
        new = [k, v]
        kernel = kernels.kv_write_nhd if layout.name == "nhd" else kernels.kv_write_hnd
        if layout.v_prefix_dim:
            new, kernel = [k], kernels.write_keys
        written = self.launcher(kernel, [*new, slots, *(cache[name] for name in home.arrays)], how)
        return dict(zip(home.arrays, written, strict=True))

    def _write_stored(
        self, cache: CacheArrays, slots: jax.Array, new: CacheArrays, layout: KVLayout
    ) -> CacheArrays:
        """Copy the bytes of quantised tokens [T, kv_heads, ...], which XLA makes, to the cache."""
        found = {}
        for name, rows in new.items():
            array, heads = cache[name], layout.num_kv_heads
            width = math.prod(rows.shape[2:])
            strides = strides_of_heads(layout, width)
            block = _heads_per_program(heads, width)
            how = Launch(
                (rows.shape[0], -(-heads // block)),
                (),
                {
                    "PAGE_SIZE": layout.page_size,
                    **dict(zip(("PAGE", "TOKEN", "HEAD"), strides, strict=True)),
                    "V_OFFSET": 0,
                    "NUM_KV_HEADS": heads,
                    "HEAD_DIM": width,
                    "HEADS": block,
                    "DIM_BLOCK": _power_of_two(width),
                },
                num_warps=2,
                num_stages=1,
                num_in_place=1,
            )
            arrays = [as_bits(rows), slots, as_bits(array)]
            (written,) = self.launcher(kernels.write_keys, arrays, how)
            found[name] = from_stored_bits(written, array.dtype)
        return found

    def interpreted(self) -> KvWrite:
        """Return the same op in Triton's interpreter; raises UnsupportedError without Triton."""
        require()
        return dataclasses.replace(self, launcher=interpret)


@dataclasses.dataclass(frozen=True)
class RopeKvWrite:
    """The op rope_kv_write; RopeKvWriteOp describes it.

    XLA computes the cosines and sines, once per step for all layers, exactly as enginebay_xla does.
    """

    launcher: Launcher = launch

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: CacheArrays,
        positions: jax.Array,
        slots: jax.Array,
        *,
        spec: RopeSpec,
        layout: KVLayout,
    ) -> tuple[jax.Array, CacheArrays]:
        """Return (rotated q [T, q_heads, head_dim], cache with rotated k and with v at the slots).

        v is [T, kv_heads, head_dim].
        """
        if layout.storage is not None:
            turns = _turns(positions, spec)
            cache = KvWrite(self.launcher)(cache, slots, _turned(k, *turns), v, layout=layout)
            return _turned(q, *turns), cache
        home = _home(layout)
        num_q_heads, dim, half = q.shape[1], layout.head_dim, spec.rotary_dim // 2
        heads = _heads_per_program(max(num_q_heads, layout.num_kv_heads), dim)
        rest = dim - 2 * half
        constants: dict[str, Any] = {
            **home.strides,
            **_shapes(layout, heads),
            "NUM_Q_HEADS": num_q_heads,
            "HALF": half,
            "HALF_BLOCK": _power_of_two(half),
            "REST_BLOCK": _power_of_two(rest) if rest else 0,
        }
        blocks = -(-num_q_heads // heads) + -(-layout.num_kv_heads // heads)
        made = jax.ShapeDtypeStruct(q.shape, q.dtype)
        how = Launch(
            (q.shape[0], blocks),
            (made,),
            constants,
            num_warps=2,
            num_stages=1,
            num_in_place=len(home.arrays),
        )
        arrays = [q, k, v, *_turns(positions, spec), slots, *(cache[name] for name in home.arrays)]
        kernel = kernels.rope_kv_write_nhd if layout.name == "nhd" else kernels.rope_kv_write_hnd
        *written, turned = self.launcher(kernel, arrays, how)
        return turned, dict(zip(home.arrays, written, strict=True))

    def interpreted(self) -> RopeKvWrite:
        """Return the same op in Triton's interpreter; raises UnsupportedError without Triton."""
        require()
        return dataclasses.replace(self, launcher=interpret)


def _turns(positions: jax.Array, spec: RopeSpec) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines f32 [T, rotary_dim / 2] of positions int32 [T]."""
    inv_freq, factor = rope_frequencies(spec)
    angles = positions.astype(jnp.float32)[:, None] * inv_freq
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return x [T, heads, head_dim], rotated by cosines and sines [T, rotary_dim / 2]."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = (x[..., i * half : (i + 1) * half].astype(jnp.float32) for i in range(2))
    pair = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in pair), x[..., 2 * half :]], axis=-1)


kv_write = KvWrite()
rope_kv_write = RopeKvWrite()
