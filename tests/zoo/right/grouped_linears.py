"""The op grouped_linear in plain JAX: many ways to give each row the weight of its group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import UnsupportedError
from enginebay.ops.activations import rounded_rows
from enginebay.weights import FLOAT, QuantizedArray, Weight
from tests.zoo.right import products
from tests.zoo.right.linears import FORMS, ROUNDED, WHOLE, refuse
from tests.zoo.right.products import ProductWay

GroupedWay = Callable[[jax.Array, jax.Array, jax.Array, ProductWay], jax.Array]
"""x f32 [T, inputs], weight f32 [groups, outputs, inputs], sizes int32 [groups], a product -> f32
[T, outputs]; what rows after the last group get is unspecified.
"""


def group_of(rows: int, sizes: jax.Array) -> jax.Array:
    """The group of each row int32 [rows]; the number of groups for rows after the last one."""
    ends = jnp.cumsum(sizes)
    return (jnp.arange(rows)[:, None] >= ends).sum(axis=1).astype(jnp.int32)


def every_group(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, multiply: ProductWay
) -> jax.Array:
    """All rows times each weight, the last weight first; each row keeps one."""
    group = group_of(x.shape[0], sizes)
    numbers = jnp.arange(weight.shape[0])[::-1]

    def add(out: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        number, one = pair
        return jnp.where((group == number)[:, None], multiply(x, one), out), None

    zeros = jnp.zeros((x.shape[0], weight.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, (numbers, weight[::-1]))[0]


def each_row(x: jax.Array, weight: jax.Array, sizes: jax.Array, multiply: ProductWay) -> jax.Array:
    """Each row reads the weight of its group."""
    group = jnp.minimum(group_of(x.shape[0], sizes), weight.shape[0] - 1)

    def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, number = pair
        return multiply(row[None], weight[number])[0]

    return jax.lax.map(one, (x, group))


def ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array, multiply: ProductWay) -> jax.Array:
    """JAX's product of groups. On a CPU it multiplies the weights of other groups with 0, so those
    without rows must be numbers.
    """
    used = jnp.where((sizes > 0)[:, None, None], weight, 0).swapaxes(1, 2)
    return jax.lax.ragged_dot(x, used, sizes, precision=jax.lax.Precision.HIGHEST)


def buckets(x: jax.Array, weight: jax.Array, sizes: jax.Array, multiply: ProductWay) -> jax.Array:
    """Each group has room for all rows, which are moved there and back."""
    rows, groups = x.shape[0], weight.shape[0]
    group = group_of(rows, sizes)
    starts = jnp.cumsum(sizes) - sizes
    place = jnp.arange(rows) - starts[jnp.minimum(group, groups - 1)]
    room = jnp.zeros((groups, rows, x.shape[1]), jnp.float32).at[group, place].set(x, mode="drop")
    found = jax.lax.map(lambda pair: multiply(*pair), (room, weight))
    return found[jnp.minimum(group, groups - 1), place]


def row_blocks(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, multiply: ProductWay, *, size: int
) -> jax.Array:
    """Blocks of rows in turn, each times the weights of all groups that it touches."""
    rows, groups = x.shape[0], weight.shape[0]
    count = max(1, -(-rows // size))
    padded = jnp.pad(x, ((0, count * size - rows), (0, 0)))
    group = group_of(count * size, sizes)

    def one(start: jax.Array) -> jax.Array:
        some = jax.lax.dynamic_slice_in_dim(padded, start, size)
        mine = jax.lax.dynamic_slice_in_dim(group, start, size)

        def add(number: jax.Array, out: jax.Array) -> jax.Array:
            return jnp.where((mine == number)[:, None], multiply(some, weight[number]), out)

        zeros = jnp.zeros((size, weight.shape[1]), jnp.float32)
        return jax.lax.fori_loop(mine[0], jnp.minimum(mine[-1] + 1, groups), add, zeros)

    found = jax.lax.map(one, jnp.arange(count) * size)
    return found.reshape(count * size, weight.shape[1])[:rows]


def masked_inputs(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, multiply: ProductWay
) -> jax.Array:
    """The rows of other groups are rows of zeros, and weights without rows are zeros: one product
    with all weights side by side.
    """
    groups, outputs, inputs = weight.shape
    is_mine = group_of(x.shape[0], sizes)[:, None] == jnp.arange(groups)
    wide = jnp.where(is_mine[..., None], x[:, None], 0).reshape(x.shape[0], groups * inputs)
    used = jnp.where((sizes > 0)[:, None, None], weight, 0)
    return multiply(wide, used.swapaxes(0, 1).reshape(outputs, groups * inputs))


def on_host(x: jax.Array, weight: jax.Array, sizes: jax.Array, multiply: ProductWay) -> jax.Array:
    """A loop of NumPy's over groups."""

    def loop(x: np.ndarray, weight: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        x, weight, sizes = np.asarray(x), np.asarray(weight), np.asarray(sizes)
        out, start = np.zeros((len(x), weight.shape[1]), np.float32), 0
        for one, size in zip(weight, sizes.tolist(), strict=True):
            out[start : start + size] = x[start : start + size] @ one.T
            start += size
        return out

    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), jnp.float32)
    found: jax.Array = jax.pure_callback(loop, shape, x, weight, sizes)
    return found


@dataclasses.dataclass(frozen=True)
class GroupedLinear:
    """See the module. Quantised weights are made f32 first, and rounded inputs are whole numbers of
    f32, so that sums of products are of the same numbers.
    """

    way: GroupedWay
    multiply: ProductWay = products.plain
    quantizations: tuple[str, ...] = ()
    activation_quantizations: tuple[str, ...] = ()
    few_groups: int | None = None

    @property
    def capabilities(self) -> dict[str, tuple[str, ...]]:
        """What a declaration of the kernel would say."""
        return {
            "quantizations": self.quantizations,
            "activation_quantizations": self.activation_quantizations,
        }

    def __call__(
        self, x: jax.Array, weight: Weight, group_sizes: jax.Array, *, out_dtype: Any = None
    ) -> jax.Array:
        groups = weight.shape[0]
        if self.few_groups is not None and groups > self.few_groups:
            allowed = f"at most {self.few_groups}"
            raise UnsupportedError(f"{groups} groups", allowed, "Choose another kernel.")
        wide, factors = x.astype(jnp.float32), None
        if isinstance(weight, QuantizedArray):
            refuse(weight, self.quantizations, self.activation_quantizations)
            if weight.activations != FLOAT:
                rounded, factors = rounded_rows(x)
                wide = rounded.astype(jnp.float32)
            array = weight.dequantized()
        else:
            array = weight.astype(jnp.float32)
        out = self.way(wide, array, group_sizes, self.multiply)
        out = out if factors is None else out * factors
        inside = jnp.arange(x.shape[0]) < group_sizes.sum()
        return jnp.where(inside[:, None], out, 0).astype(out_dtype or x.dtype)


every = GroupedLinear(every_group, quantizations=FORMS, activation_quantizations=ROUNDED)
every_transposed = GroupedLinear(every_group, products.transposed, ("int8", "fp8"))
one_by_one = GroupedLinear(each_row, quantizations=WHOLE, activation_quantizations=ROUNDED)
one_by_one_in_three = GroupedLinear(
    each_row, functools.partial(products.split_inputs, parts=3), ("int8_group",)
)
of_jax = GroupedLinear(ragged, quantizations=("uint4",))
in_buckets = GroupedLinear(buckets, products.pairwise, ("int4",))
blocks_of_five = GroupedLinear(functools.partial(row_blocks, size=5), quantizations=FORMS)
blocks_of_16 = GroupedLinear(functools.partial(row_blocks, size=16), products.backwards)
side_by_side = GroupedLinear(masked_inputs, few_groups=16)
compensated = GroupedLinear(every_group, functools.partial(products.compensated, size=8))
host_loop = GroupedLinear(on_host)
