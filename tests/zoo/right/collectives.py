"""The collectives all_reduce, all_gather and all_to_all, made of others: of rings, of trees, of one
mesh axis after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Axes = tuple[str, ...]


def count_of(axes: Axes) -> int:
    """Devices along the axes."""
    return int(jax.lax.axis_size(axes))


def from_device(x: jax.Array, axes: Axes, shift: int) -> jax.Array:
    """The array of the device `shift` places before this one."""
    count = count_of(axes)
    pairs = [(i, (i + shift) % count) for i in range(count)]
    return permuted(x, axes, pairs)


def permuted(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends x between pairs of devices, counted along the axes in the order given. JAX takes axes
    in the order of the mesh alone.
    """
    of_mesh = jax.sharding.get_abstract_mesh().axis_names
    ordered = sorted(axes, key=of_mesh.index)
    places = np.arange(count_of(axes)).reshape([jax.lax.axis_size(axis) for axis in ordered])
    numbers = places.transpose([ordered.index(axis) for axis in axes]).reshape(-1).tolist()
    turned = [(numbers[source], numbers[target]) for source, target in pairs]
    return jax.lax.ppermute(x, tuple(ordered), turned)


def by_ring(x: jax.Array, axes: Axes) -> list[jax.Array]:
    """The arrays of this device and of those before it, passed on around a ring."""
    found = [x]
    for _ in range(count_of(axes) - 1):
        found.append(from_device(found[-1], axes, 1))
    return found


def in_order(found: Sequence[jax.Array], axes: Axes) -> jax.Array:
    """Arrays [devices, ...] in the order of the devices, of those that by_ring returns."""
    place = (jax.lax.axis_index(axes) - jnp.arange(len(found))) % len(found)
    return jnp.zeros((len(found), *found[0].shape), found[0].dtype).at[place].set(jnp.stack(found))


def at_once(x: jax.Array, axes: Axes) -> jax.Array:
    """All arrays [devices, ...] by JAX's all_gather."""
    return jax.lax.all_gather(x, axes)


def around(x: jax.Array, axes: Axes) -> jax.Array:
    """All arrays [devices, ...] by a ring."""
    return in_order(by_ring(x, axes), axes)


def by_shifts(x: jax.Array, axes: Axes) -> jax.Array:
    """All arrays [devices, ...], each sent straight from its device."""
    return in_order([from_device(x, axes, i) for i in range(count_of(axes))], axes)


def by_axis(x: jax.Array, axes: Axes) -> jax.Array:
    """All arrays [devices, ...], along the last mesh axis first."""
    found = x[None]
    for axis in reversed(axes):
        found = jax.lax.all_gather(found, axis).reshape(-1, *x.shape)
    return found


def by_pieces(x: jax.Array, axes: Axes) -> jax.Array:
    """All arrays [devices, ...]: every device sends a copy to each other one."""
    copies = jnp.broadcast_to(x, (count_of(axes), *x.shape))
    return jax.lax.all_to_all(copies, axes, 0, 0)


def by_doubling(x: jax.Array, axes: Axes) -> jax.Array:
    """All arrays [devices, ...]: after each step a device knows twice as many, those before it."""
    count, found = count_of(axes), [x]
    while len(found) < count:
        step = len(found)
        more = [from_device(each, axes, step) for each in found[: count - step]]
        found = found + more
    return in_order(found, axes)


def as_bits(x: jax.Array, axes: Axes) -> jax.Array:
    """All arrays [devices, ...]: the sum of arrays of bits that are 0 but for one device's."""
    width = x.dtype.itemsize
    wide = x if x.dtype != jnp.bool else x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(wide, jnp.dtype(f"uint{8 * width}"))
    mine = jnp.zeros((count_of(axes), *bits.shape), jnp.uint32)
    mine = mine.at[jax.lax.axis_index(axes)].set(bits.astype(jnp.uint32))
    found = jax.lax.psum(mine, axes).astype(bits.dtype)
    return jax.lax.bitcast_convert_type(found, wide.dtype).astype(x.dtype)


GatherWay = Callable[[jax.Array, Axes], jax.Array]


@dataclasses.dataclass(frozen=True)
class AllGather:
    """All arrays, put together along a dimension. `turned`: that dimension is the first one while
    they are put together.
    """

    way: GatherWay
    turned: bool = False

    def __call__(self, x: jax.Array, *, axes: Axes, dim: int) -> jax.Array:
        if self.turned:
            first = jnp.moveaxis(x, dim, 0)
            found = self.way(first, axes)
            return jnp.moveaxis(found.reshape(-1, *first.shape[1:]), 0, dim)
        return jnp.concatenate(list(self.way(x, axes)), axis=dim)


@dataclasses.dataclass(frozen=True)
class AllToAll:
    """Each device's pieces: all arrays are gathered in some way, and this device's pieces taken."""

    way: GatherWay

    def __call__(self, x: jax.Array, *, axes: Axes) -> jax.Array:
        count = count_of(axes)
        every = self.way(x, axes).reshape(count, count, -1, *x.shape[1:])
        mine = jax.lax.dynamic_index_in_dim(every, jax.lax.axis_index(axes), 1, keepdims=False)
        return mine.reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class PiecesByShift:
    """Each device sends each of its pieces straight. `backwards`: to the device before it first."""

    backwards: bool = False

    def __call__(self, x: jax.Array, *, axes: Axes) -> jax.Array:
        count, me = count_of(axes), jax.lax.axis_index(axes)
        pieces = x.reshape(count, x.shape[0] // count, *x.shape[1:])
        out = jnp.zeros_like(pieces)
        for shift in reversed(range(count)) if self.backwards else range(count):
            sent = jax.lax.dynamic_index_in_dim(pieces, (me + shift) % count, keepdims=False)
            got = from_device(sent, axes, shift)
            out = jax.lax.dynamic_update_index_in_dim(out, got, (me - shift) % count, 0)
        return out.reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class PiecesByAxis:
    """One mesh axis after the other: a piece's place is a number with a digit for each axis."""

    def __call__(self, x: jax.Array, *, axes: Axes) -> jax.Array:
        sizes = [count_of((axis,)) for axis in axes]
        pieces = x.reshape(*sizes, x.shape[0] // count_of(axes), *x.shape[1:])
        for digit, axis in enumerate(axes):
            pieces = jax.lax.all_to_all(pieces, axis, digit, digit, tiled=True)
        return pieces.reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Untiled:
    """JAX's all_to_all over an axis that counts devices."""

    def __call__(self, x: jax.Array, *, axes: Axes) -> jax.Array:
        count = count_of(axes)
        pieces = x.reshape(count, x.shape[0] // count, *x.shape[1:])
        return jax.lax.all_to_all(pieces, axes, 0, 0).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class GatheredSum:
    """The sum of all arrays, gathered in some way. `wide`: in f32, rounded once; `backwards`: the
    last device first.
    """

    way: GatherWay
    wide: bool = False
    backwards: bool = False

    def __call__(self, x: jax.Array, *, axes: Axes) -> jax.Array:
        every = self.way(x, axes)
        if self.wide and jnp.issubdtype(x.dtype, jnp.floating):
            every = every.astype(jnp.float32)
        parts = list(every[::-1] if self.backwards else every)
        return functools.reduce(jnp.add, parts).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class SumByAxis:
    """JAX's sum, over one mesh axis after the other, the last one first."""

    def __call__(self, x: jax.Array, *, axes: Axes) -> jax.Array:
        for axis in reversed(axes):
            x = jax.lax.psum(x, axis)
        return x


@dataclasses.dataclass(frozen=True)
class ScatteredSum:
    """Each device sums a share of the numbers, and shares are gathered. `ring`: partial sums go
    around a ring; otherwise JAX's psum_scatter makes them.
    """

    ring: bool = False

    def __call__(self, x: jax.Array, *, axes: Axes) -> jax.Array:
        count, me = count_of(axes), jax.lax.axis_index(axes)
        flat = jnp.pad(x.reshape(-1), (0, -x.size % count)).reshape(count, -1)
        if not self.ring:
            share = jax.lax.psum_scatter(flat, axes)
            return jax.lax.all_gather(share, axes).reshape(-1)[: x.size].reshape(x.shape)
        share = jax.lax.dynamic_index_in_dim(flat, me, keepdims=False)
        for step in range(1, count):
            mine = jax.lax.dynamic_index_in_dim(flat, (me - step) % count, keepdims=False)
            share = from_device(share, axes, 1) + mine
        every = in_order(by_ring(share, axes), axes)
        # Device i ends with the share i + 1.
        return jnp.roll(every, 1, axis=0).reshape(-1)[: x.size].reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class SumInPairs:
    """Partners at distances 1, 2, 4 exchange sums; a number of devices that is no power of two goes
    around a ring.
    """

    def __call__(self, x: jax.Array, *, axes: Axes) -> jax.Array:
        count = count_of(axes)
        if count & (count - 1):
            return functools.reduce(jnp.add, by_ring(x, axes))
        distance = 1
        while distance < count:
            pairs = [(i, i ^ distance) for i in range(count)]
            x = x + permuted(x, axes, pairs)
            distance *= 2
        return x


gather_whole = AllGather(at_once)
gather_ring = AllGather(around)
gather_shifts = AllGather(by_shifts, turned=True)
gather_axes = AllGather(by_axis)
gather_copies = AllGather(by_pieces)
gather_doubling = AllGather(by_doubling, turned=True)
gather_bits = AllGather(as_bits)
gather_turned = AllGather(at_once, turned=True)

exchange_whole = AllToAll(at_once)
exchange_ring = AllToAll(around)
exchange_bits = AllToAll(as_bits)
exchange_doubling = AllToAll(by_doubling)
exchange_shifts = PiecesByShift()
exchange_backwards = PiecesByShift(backwards=True)
exchange_axes = PiecesByAxis()
exchange_untiled = Untiled()

sum_whole = GatheredSum(at_once, wide=True)
sum_backwards = GatheredSum(by_shifts, backwards=True)
sum_ring = GatheredSum(around, wide=True, backwards=True)
sum_axes = SumByAxis()
sum_scattered = ScatteredSum()
sum_scattered_ring = ScatteredSum(ring=True)
sum_pairs = SumInPairs()
sum_copies = GatheredSum(by_pieces, wide=True)
