"""The op lora in plain JAX: many ways to bring each token together with its adapter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import UnsupportedError
from tests.zoo.right import products
from tests.zoo.right.products import ProductWay


class Part(NamedTuple):
    """One part of the outputs, flat, in the dtypes of the arguments: inputs x [T, n], down [slots,
    rank, n], up [slots, rank, O], places int32 [T].
    """

    x: jax.Array
    down: jax.Array
    up: jax.Array
    places: jax.Array


AddedWay = Callable[[Part, ProductWay], jax.Array]
"""What is added to the outputs, f32 [T, O]; unspecified for tokens without an adapter."""


def _rounded(shrunk: jax.Array, part: Part) -> jax.Array:
    """Shrunk inputs, rounded as the op says, in f32."""
    return shrunk.astype(part.x.dtype).astype(jnp.float32)


def by_slots(part: Part, multiply: ProductWay) -> jax.Array:
    """One slot after the other, the last one first: all tokens are multiplied, its own keep it."""
    slots = len(part.down)

    def add(i: jax.Array, out: jax.Array) -> jax.Array:
        slot = slots - 1 - i
        shrunk = _rounded(multiply(part.x, part.down[slot]), part)
        mine = (part.places == slot + 1)[:, None]
        return jnp.where(mine, multiply(shrunk, part.up[slot].T), out)

    zeros = jnp.zeros((len(part.x), part.up.shape[2]), jnp.float32)
    return jax.lax.fori_loop(0, slots, add, zeros)


def by_tokens(part: Part, multiply: ProductWay) -> jax.Array:
    """One token after the other, with its own adapter."""

    def one(token: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, place = token
        slot = jnp.maximum(place - 1, 0)
        shrunk = _rounded(multiply(x[None], part.down[slot]), part)
        return multiply(shrunk, part.up[slot].T)[0]

    return jax.lax.map(one, (part.x, part.places))


def by_segments(part: Part, multiply: ProductWay) -> jax.Array:
    """Tokens in the order of their adapters, as products of groups, and back."""
    slots = len(part.down)
    group = jnp.where(part.places > 0, part.places - 1, slots)
    order = jnp.argsort(group)
    sizes = (group[:, None] == jnp.arange(slots)).sum(axis=0, dtype=jnp.int32)
    wide = part.x[order].astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    down = part.down.astype(jnp.float32).swapaxes(1, 2)
    shrunk = jax.lax.ragged_dot(wide, down, sizes, precision=highest)
    up = part.up.astype(jnp.float32)
    found = jax.lax.ragged_dot(_rounded(shrunk, part), up, sizes, precision=highest)
    return jnp.zeros_like(found).at[order].set(found)


def by_ranks(part: Part, multiply: ProductWay) -> jax.Array:
    """The sum over ranks of a number times a row of the token's adapter."""
    slot = jnp.maximum(part.places - 1, 0)
    total = jnp.zeros((len(part.x), part.up.shape[2]), jnp.float32)
    wide = part.x.astype(jnp.float32)
    for rank in range(part.down.shape[1]):
        row = part.down[:, rank].astype(jnp.float32)[slot]
        shrunk = _rounded((wide * row).sum(axis=1, keepdims=True), part)
        total = total + shrunk * part.up[:, rank].astype(jnp.float32)[slot]
    return total


def all_side_by_side(part: Part, multiply: ProductWay) -> jax.Array:
    """The adapters of all slots are one: shrunk numbers of others are 0."""
    slots, rank, inputs = part.down.shape
    shrunk = multiply(part.x, part.down.reshape(slots * rank, inputs))
    owner = jnp.arange(slots * rank) // rank + 1
    shrunk = jnp.where(part.places[:, None] == owner, _rounded(shrunk, part), 0)
    return multiply(shrunk, part.up.reshape(slots * rank, -1).T)


def by_blocks(part: Part, multiply: ProductWay, *, size: int) -> jax.Array:
    """Blocks of tokens in turn, each with all slots from its lowest place to its highest."""
    count = -(-len(part.x) // size)
    missing = count * size - len(part.x)
    x = jnp.pad(part.x, ((0, missing), (0, 0))).reshape(count, size, -1)
    places = jnp.pad(part.places, (0, missing)).reshape(count, size)

    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, places = block

        def add(slot: jax.Array, out: jax.Array) -> jax.Array:
            shrunk = _rounded(multiply(x, part.down[slot]), part)
            mine = (places == slot + 1)[:, None]
            return jnp.where(mine, multiply(shrunk, part.up[slot].T), out)

        first = jnp.where(places > 0, places, len(part.down) + 1).min() - 1
        zeros = jnp.zeros((size, part.up.shape[2]), jnp.float32)
        return jax.lax.fori_loop(first, places.max(), add, zeros)

    return jax.lax.map(one, (x, places)).reshape(count * size, -1)[: len(part.x)]


def chosen_by_masks(part: Part, multiply: ProductWay) -> jax.Array:
    """Each token's adapter is a sum over slots of which one is not 0."""
    mine = (part.places[:, None] == jnp.arange(1, len(part.down) + 1)).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    down = jnp.einsum("ts,sri->tri", mine, part.down.astype(jnp.float32), precision=highest)
    wide = part.x.astype(jnp.float32)
    shrunk = _rounded((down * wide[:, None]).sum(axis=2), part)
    up = jnp.einsum("ts,sro->tro", mine, part.up.astype(jnp.float32), precision=highest)
    return (shrunk[..., None] * up).sum(axis=1)


def on_host(part: Part, multiply: ProductWay) -> jax.Array:
    """NumPy's loop over tokens."""
    dtype = part.x.dtype

    def loop(x: np.ndarray, down: np.ndarray, up: np.ndarray, places: np.ndarray) -> np.ndarray:
        x, down, up, places = map(np.asarray, (x, down, up, places))
        out = np.zeros((len(x), up.shape[2]), np.float32)
        for token in np.flatnonzero(places > 0):
            slot = places[token] - 1
            shrunk = (down[slot] @ x[token]).astype(dtype).astype(np.float32)
            out[token] = shrunk @ up[slot]
        return out

    shape = jax.ShapeDtypeStruct((len(part.x), part.up.shape[2]), jnp.float32)
    floats = (each.astype(jnp.float32) for each in part[:3])
    found: jax.Array = jax.pure_callback(loop, shape, *floats, part.places)
    return found


@dataclasses.dataclass(frozen=True)
class Lora:
    """See the module. `most_parts`: a kernel for so many parts at most."""

    way: AddedWay
    multiply: ProductWay = products.plain
    most_parts: int | None = None

    def __call__(
        self,
        y: jax.Array,
        x: jax.Array,
        a: jax.Array,
        b: jax.Array,
        places: jax.Array,
        *,
        axis: int = 0,
        ends: Sequence[int] = (),
    ) -> jax.Array:
        ends = tuple(ends) or (y.shape[axis + 1],)
        if self.most_parts is not None and len(ends) > self.most_parts:
            given, allowed = f"{len(ends)} parts", f"at most {self.most_parts}"
            raise UnsupportedError(given, allowed, "Choose another kernel.")
        tokens, (slots, _, rank) = len(x), a.shape[:3]
        if not tokens:
            return y
        flat = x.reshape(tokens, -1)
        out = []
        for number, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
            base = jax.lax.slice_in_dim(y, first, end, axis=axis + 1)
            up = jax.lax.slice_in_dim(b, first, end, axis=axis + 2)
            size = math.prod(base.shape[1:])
            down = a[:, number].reshape(slots, rank, -1)
            part = Part(flat, down, up.reshape(slots, rank, size), places)
            added = self.way(part, self.multiply)
            wide = base.reshape(tokens, size).astype(jnp.float32)
            wide = jnp.where((places > 0)[:, None], wide + added, wide)
            out.append(wide.reshape(base.shape).astype(y.dtype))
        return jnp.concatenate(out, axis=axis + 1)


slots = Lora(by_slots)
slots_backwards = Lora(by_slots, products.backwards)
tokens = Lora(by_tokens)
segments = Lora(by_segments)
ranks = Lora(by_ranks)
side_by_side = Lora(all_side_by_side, functools.partial(products.split_inputs, parts=3))
side_by_side_pairwise = Lora(all_side_by_side, products.pairwise, most_parts=1)
blocks_of_five = Lora(functools.partial(by_blocks, size=5))
masks = Lora(chosen_by_masks)
host = Lora(on_host)
