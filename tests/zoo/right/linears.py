"""The op linear in plain JAX: one frame, with many ways to multiply, and to read weights that are
quantised.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.errors import UnsupportedError
from enginebay.ops.activations import rounded_rows
from enginebay.weights import FLOAT, QuantizedArray, Weight
from tests.zoo.right import products
from tests.zoo.right.products import ProductWay

FORMS = ("int8", "int8_group", "int4", "uint4", "fp8")
WHOLE = ("int8", "int8_group", "int4", "uint4")
ONE_SCALE = ("int8", "fp8")


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A quantised weight as a matrix: values [O, n], scales and points [O, groups]."""

    values: jax.Array
    scales: jax.Array
    points: jax.Array | None

    @classmethod
    def of(cls, weight: QuantizedArray, num_in: int) -> Matrix:
        """The weight with its outputs, and its inputs, in one dimension each."""
        groups = weight.scales.shape[-1]
        points = weight.zero_points
        return cls(
            weight.values.reshape(-1, num_in),
            weight.scales.reshape(-1, groups),
            None if points is None else points.reshape(-1, groups),
        )

    def group(self, x: jax.Array, index: int) -> tuple[jax.Array, jax.Array]:
        """The inputs of x [T, n], and the values f32 [O, inputs], of one group."""
        size = self.values.shape[1] // self.scales.shape[1]
        share = slice(index * size, (index + 1) * size)
        return x[:, share], self.values.astype(jnp.float32)[:, share]

    def wide(self) -> jax.Array:
        """The weight in f32 [O, n]."""
        points = None if self.points is None else self.points
        return QuantizedArray(self.values, self.scales, points, "").dequantized()


QuantizedWay = Callable[[jax.Array, Matrix, ProductWay], jax.Array]
"""x f32 [T, n], the weight, a product -> f32 [T, O]."""


def dequantized_first(x: jax.Array, matrix: Matrix, multiply: ProductWay) -> jax.Array:
    """The whole weight in f32, then one product."""
    return multiply(x, matrix.wide())


def scaled_after(x: jax.Array, matrix: Matrix, multiply: ProductWay) -> jax.Array:
    """The stored numbers are multiplied, and sums of a group are scaled; the zero point times the
    sum of the inputs is taken away.
    """
    total = jnp.zeros((x.shape[0], matrix.values.shape[0]), jnp.float32)
    for index in range(matrix.scales.shape[1]):
        inputs, values = matrix.group(x, index)
        sums = multiply(inputs, values)
        if matrix.points is not None:
            sums = sums - inputs.sum(axis=1)[:, None] * matrix.points[:, index].astype(jnp.float32)
        total = total + sums * matrix.scales[:, index].astype(jnp.float32)
    return total


def groups_in_turn(x: jax.Array, matrix: Matrix, multiply: ProductWay) -> jax.Array:
    """The last group first; the numbers of one group are made whole, multiplied, and scaled."""
    total = jnp.zeros((x.shape[0], matrix.values.shape[0]), jnp.float32)
    for index in reversed(range(matrix.scales.shape[1])):
        inputs, values = matrix.group(x, index)
        if matrix.points is not None:
            values = values - matrix.points[:, index, None].astype(jnp.float32)
        total = total + multiply(inputs, values) * matrix.scales[:, index].astype(jnp.float32)
    return total


def scaled_inputs(x: jax.Array, matrix: Matrix, multiply: ProductWay) -> jax.Array:
    """For one scale an output: the numbers are multiplied, the product is scaled."""
    return multiply(x, matrix.values.astype(jnp.float32)) * matrix.scales[:, 0]


def whole_numbers(x: jax.Array, matrix: Matrix) -> jax.Array:
    """Inputs int8 [T, n] times a weight of whole numbers, with sums of int32 for each group."""
    rows, (outputs, groups) = x.shape[0], matrix.scales.shape
    inputs = x.reshape(rows, groups, -1).astype(jnp.int32)
    values = matrix.values.astype(jnp.int32).reshape(outputs, groups, -1)
    sums = jnp.einsum("tgi,ogi->tog", inputs, values).astype(jnp.float32)
    if matrix.points is not None:
        totals = inputs.sum(axis=2).astype(jnp.float32)
        sums = sums - totals[:, None] * matrix.points.astype(jnp.float32)
    return (sums * matrix.scales.astype(jnp.float32)).sum(axis=2)


@dataclasses.dataclass(frozen=True)
class Linear:
    """See the module. `quantizations` and `activation_quantizations` are what a declaration would
    say; others are refused. `whole`: rounded inputs are multiplied as whole numbers.
    """

    multiply: ProductWay
    quantized: QuantizedWay = dequantized_first
    quantizations: tuple[str, ...] = ()
    activation_quantizations: tuple[str, ...] = ()
    whole: bool = False

    @property
    def capabilities(self) -> dict[str, tuple[str, ...]]:
        """What a declaration of the kernel would say."""
        return {
            "quantizations": self.quantizations,
            "activation_quantizations": self.activation_quantizations,
        }

    def __call__(
        self,
        x: jax.Array,
        weight: Weight,
        bias: jax.Array | None = None,
        *,
        out_dtype: Any = None,
    ) -> jax.Array:
        out_dims = weight.shape[: weight.ndim - (x.ndim - 1)]
        num_in = math.prod(x.shape[1:])
        flat = x.reshape(x.shape[0], num_in)
        if isinstance(weight, QuantizedArray):
            wide = self.of_quantized(flat, weight)
        else:
            wide = self.multiply(flat, weight.reshape(-1, num_in))
        wide = wide.reshape(x.shape[0], *out_dims)
        if bias is not None:
            wide = wide + bias.astype(jnp.float32)
        return wide.astype(out_dtype or x.dtype)

    def of_quantized(self, x: jax.Array, weight: QuantizedArray) -> jax.Array:
        """x [T, n] times a quantised weight, f32 [T, O]."""
        refuse(weight, self.quantizations, self.activation_quantizations)
        matrix = Matrix.of(weight, x.shape[1])
        if weight.activations == FLOAT:
            return self.quantized(x.astype(jnp.float32), matrix, self.multiply)
        rounded, factors = rounded_rows(x)
        if self.whole and jnp.issubdtype(matrix.values.dtype, jnp.integer):
            return whole_numbers(rounded, matrix) * factors
        return self.quantized(rounded.astype(jnp.float32), matrix, self.multiply) * factors


def refuse(weight: QuantizedArray, methods: tuple[str, ...], roundings: tuple[str, ...]) -> None:
    """UnsupportedError for a weight that a kernel does not list."""
    if weight.method not in methods:
        given = f"a weight of the form {weight.method!r}"
        raise UnsupportedError(given, ", ".join(methods) or "plain arrays", "Choose another.")
    if weight.activations not in (FLOAT, *roundings):
        given = f"inputs rounded to {weight.activations!r}"
        raise UnsupportedError(given, ", ".join((FLOAT, *roundings)), "Choose another.")


ROUNDED = ("int8",)

upcast = Linear(products.plain, quantizations=FORMS, activation_quantizations=ROUNDED)
in_narrow = Linear(products.narrow)
split_in_three = Linear(functools.partial(products.split_inputs, parts=3), quantizations=FORMS)
strided = Linear(
    functools.partial(products.strided_inputs, parts=5),
    scaled_after,
    FORMS,
    ROUNDED,
)
reversed_order = Linear(products.backwards, groups_in_turn, FORMS, ROUNDED)
seven_outputs = Linear(
    functools.partial(products.blocks_of_outputs, size=7), quantizations=("int8_group", "uint4")
)
row_by_row = Linear(products.by_sums, quantizations=("int4",))
transposed = Linear(products.transposed, scaled_inputs, ONE_SCALE)
compensated = Linear(functools.partial(products.compensated, size=16), groups_in_turn, ("fp8",))
pairwise = Linear(products.pairwise, scaled_after, WHOLE, ROUNDED, whole=True)
tiles_of_128 = Linear(functools.partial(products.tiles, size=128))
tiles_of_24 = Linear(
    functools.partial(products.tiles, size=24),
    quantizations=("int8",),
    whole=True,
    activation_quantizations=ROUNDED,
)
outer = Linear(products.outer)
on_host = Linear(products.on_host)
