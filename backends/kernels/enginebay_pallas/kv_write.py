"""The op kv_write on TPUs: copies new tokens to their slots by DMA and touches no other memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.errors import UnsupportedError
from enginebay_pallas.interpret import interpreting
from enginebay_pallas.layout import TpuRpaLayout

LAYOUT = "tpu_rpa"

RUN = 8
"""Tokens that one DMA copies when their slots are consecutive, as they are within a page."""

IN_FLIGHT = 64
"""DMAs of one size that run at the same time, at most."""


@dataclasses.dataclass(frozen=True)
class PallasKvWrite:
    """The op kv_write for layout tpu_rpa; in place when the cache is donated."""

    is_interpreted: bool = False

    def interpreted(self) -> PallasKvWrite:
        """Return the same kernel, run by Pallas' TPU interpreter."""
        return dataclasses.replace(self, is_interpreted=True)

    def __call__(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array, layout: KVLayout
    ) -> CacheArrays:
        """Write k and v [T, kv_heads, head_dim] to slots int32 [T]; negative slots are dropped.

        XLA quantises, and writes the scales and zero points.
        """
        if not isinstance(layout, TpuRpaLayout):
            raise UnsupportedError(f"layout {layout.name}", LAYOUT, "Choose kv_write = xla.")
        kv, stored = cache["kv"], layout.stored(k, v)
        factors = {
            name: _with_factors(cache[name], slots, new, layout)
            for name, new in stored.items()
            if name != "kv"
        }
        missing = -slots.shape[0] % RUN
        new = jnp.pad(stored["kv"].astype(kv.dtype), ((0, missing), (0, 0), (0, 0), (0, 0)))
        slots = jnp.pad(slots, (0, missing), constant_values=-1)
        # A slot is an index over all pages, so that with pages and positions as one axis a run
        # may cross the end of a page.
        flat = kv.reshape(-1, *kv.shape[2:])
        run = interpreting(_write) if self.is_interpreted else _write
        return {"kv": run(slots, new, flat).reshape(kv.shape), **factors}


def _with_factors(
    array: jax.Array, slots: jax.Array, new: jax.Array, layout: TpuRpaLayout
) -> jax.Array:
    """Return scales or zero points [pages, factors, page_size] with those of the tokens, new
    [T, factors].

    A token's numbers are one lane of its page, too little for a DMA. So XLA reads and writes whole
    pages, in the order in which they are stored. Of several tokens of a page, each writes the page
    with the numbers of all.
    """
    count, size = slots.shape[0], layout.page_size
    num_slots = layout.num_pages * size
    place = jnp.where(slots < 0, num_slots, slots)
    token = jnp.full(num_slots, count, jnp.int32)
    token = token.at[place].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
    pages = place // size
    token_at = token.reshape(-1, size).at[pages].get(mode="fill", fill_value=count)
    padded = jnp.pad(new, ((0, 1), (0, 0)))
    before = array.at[pages].get(mode="clip")
    after = jnp.where((token_at < count)[:, None], padded[token_at].swapaxes(1, 2), before)
    return array.at[pages].set(after, mode="drop")


def _write(slots: jax.Array, new: jax.Array, flat: jax.Array) -> jax.Array:
    written: jax.Array = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
        ),
        input_output_aliases={2: 0},
        name="kv_write",
    )(slots, new, flat)
    return written


def _kernel(slots: Any, new: Any, _: Any, cache: Any, done: Any) -> None:
    """Copy runs of RUN tokens and single tokens; each size has a semaphore of its own."""

    def copy(token: Any, slot: Any, size: int) -> Any:
        source, target = new.at[pl.ds(token, size)], cache.at[pl.ds(slot, size)]
        return pltpu.make_async_copy(source, target, done.at[int(size == RUN)])

    def wait(size: int) -> None:
        copy(0, 0, size).wait()  # any DMA of this size: a semaphore counts bytes

    def start(token: Any, slot: Any, size: int, under_way: Any) -> Any:
        """Start a DMA, waiting for another one first when too many run; return how many run."""
        full = under_way >= IN_FLIGHT
        pl.when(full)(lambda: wait(size))
        copy(token, slot, size).start()
        return jnp.where(full, under_way, under_way + 1)

    def turn(i: Any, under_way: tuple[Any, Any]) -> tuple[Any, Any]:
        first, start_slot = i * RUN, slots[i * RUN]
        follows = start_slot >= 0
        for token in range(1, RUN):
            follows = follows & (slots[first + token] == start_slot + token)

        def together(singles: Any, runs: Any) -> tuple[Any, Any]:
            return singles, start(first, start_slot, RUN, runs)

        def apart(singles: Any, runs: Any) -> tuple[Any, Any]:
            for token in range(RUN):
                singles = lax.cond(
                    slots[first + token] >= 0,
                    lambda n, token=token: start(first + token, slots[first + token], 1, n),
                    lambda n: n,
                    singles,
                )
            return singles, runs

        both: tuple[Any, Any] = lax.cond(follows, together, apart, *under_way)
        return both

    zero = jnp.int32(0)
    singles, runs = lax.fori_loop(0, slots.shape[0] // RUN, turn, (zero, zero))
    _repeat(singles, lambda: wait(1))
    _repeat(runs, lambda: wait(RUN))


def _repeat(times: Any, act: Callable[[], None]) -> None:
    lax.fori_loop(0, times, lambda *_: act(), None)


kv_write = PallasKvWrite()
