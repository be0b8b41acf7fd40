"""The op linear: products of few rows and with quantised weights in C++, others by XLA."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.activations import INT8
from enginebay.ops.caps import Env
from enginebay.ops.tuning import OpProblem
from enginebay.weights import FLOAT, QuantizedArray, Weight
from enginebay_native.calls import register
from enginebay_native.compiling import begin_compiling, check_library
from enginebay_native.quantized import LIBRARIES, PACKED, in_cpp, in_panels, is_served

MAX_ROWS = {"float32": 128, "bfloat16": 48}
"""Rows of a product with plain weights in C++, at most: with more, XLA is as fast or faster. With
quantised weights and inputs of f32, more rows are multiplied in panels (docs/native.md).
"""

ONE_SCALE = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))
"""dtypes whose values the C++ of plain weights reads; the scale of each output is applied later."""

BLOCK_KIB = (32, 64, 128, 256, 512)
TASKS_PER_THREAD = (2, 4, 8)

FORMS = {"float32": "f32", "bfloat16": "bf16", "int8": "s8", "float8_e4m3fn": "f8"}
"""dtypes of weights, each with the end of the name of its library."""

check_library("linear_f32")


@dataclasses.dataclass(frozen=True)
class WorkSplit:
    """How the outputs are divided into blocks and tasks. Neither changes a bit of a result.

    The weights of a block should stay in the second-level cache while all rows are multiplied. With
    several tasks per thread, a slow thread delays little of the product.
    """

    block_kib: int = 128
    tasks_per_thread: int = 4


@dataclasses.dataclass(frozen=True)
class NativeLinear:
    """The op linear: up to MAX_ROWS rows and all quantised weights in C++, others by XLA."""

    name: str = "native"
    version: str = "2"
    choose: Callable[[OpProblem], WorkSplit] = lambda _: WorkSplit()
    """Returns the configuration of a call, by its rows (the next power of two), inputs, outputs and
    dtype.
    """

    def prepare(self, needs: Mapping[str, Collection[str]]) -> None:
        """Begin to compile the C++ that the form of the weights needs. A checkpoint may have other
        weights besides; their C++ is compiled when a step is traced.
        """
        begin_compiling(*libraries_of(needs))

    def free_padding_rows(self, needs: Mapping[str, Collection[str]]) -> int:
        """Return the largest number of rows that are multiplied in C++, which skips zeros."""
        if needs.get("quantizations"):
            return sys.maxsize
        dtypes = set(needs.get("dtypes", ()))
        return MAX_ROWS.get(dtypes.pop(), 0) if len(dtypes) == 1 else 0

    def default_config(self, env: Env, problem: OpProblem) -> WorkSplit:
        """Return one configuration for all problems."""
        return WorkSplit()

    def candidates(self, env: Env, problem: OpProblem) -> list[WorkSplit]:
        """Return blocks of a quarter to four times the default, with half or twice the tasks."""
        return [WorkSplit(kib, tasks) for kib in BLOCK_KIB for tasks in TASKS_PER_THREAD]

    def tuned(self, choose: Callable[[OpProblem], WorkSplit]) -> NativeLinear:
        """Return the op with configurations from `choose`."""
        return dataclasses.replace(self, choose=choose)

    def __call__(
        self,
        x: jax.Array,
        weight: Weight,
        bias: jax.Array | None = None,
        *,
        out_dtype: jnp.dtype | str | None = None,
    ) -> jax.Array:
        """Return x times the transposed weight, plus the bias, in `out_dtype` or x's dtype.

        x is [T, *in_dims], weight [*out_dims, *in_dims], bias [*out_dims]; the result is
        [T, *out_dims]. Sums and the bias are f32, rounded once. Up to MAX_ROWS rows, the bits of a
        row's result do not depend on the number of rows. Quantised weights are multiplied in C++
        for any number of rows, and no dequantised weight exists.
        """
        if isinstance(weight, QuantizedArray):
            return self._quantized(x, weight, bias, out_dtype or x.dtype)
        num_in = math.prod(x.shape[1:])
        out_dims = weight.shape[: weight.ndim - (x.ndim - 1)]
        matrix = weight.reshape(math.prod(out_dims), num_in)
        flat = x.reshape(x.shape[0], num_in)
        if flat.dtype == matrix.dtype and 0 < flat.shape[0] <= MAX_ROWS.get(str(flat.dtype), 0):
            out = self._in_cpp(flat, matrix)
        else:
            precision = (
                jax.lax.Precision.HIGHEST if flat.dtype == matrix.dtype == jnp.float32 else None
            )
            numbers = (((1,), (1,)), ((), ()))
            out = jax.lax.dot_general(
                flat, matrix, numbers, precision=precision, preferred_element_type=jnp.float32
            )
        out = out.reshape(x.shape[0], *out_dims)
        if bias is not None:
            out = out + bias.astype(jnp.float32)
        return out.astype(out_dtype or x.dtype)

    def _quantized(
        self, x: jax.Array, weight: QuantizedArray, bias: jax.Array | None, out_dtype: Any
    ) -> jax.Array:
        """Multiply few rows, and rows with one scale each, by the kernels for the form of the
        weight, and all others in panels.
        """
        flat = x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(jnp.float32)
        is_rounded, dtype = weight.activations != FLOAT, weight.values.dtype
        has_one_scale = weight.zero_points is None and weight.scales.shape[-1] == 1
        is_few = 0 < flat.shape[0] <= MAX_ROWS["float32"]
        if is_few and not is_rounded and has_one_scale and dtype in ONE_SCALE:
            out = self._in_cpp(flat, weight.values.reshape(-1, flat.shape[1]))
            out = out * weight.scales.reshape(-1).astype(jnp.float32)
        elif (is_few or (weight.activations == INT8 and flat.shape[0] > 0)) and is_served(weight):
            outputs = math.prod(weight.scales.shape[:-1])
            sharing = self._sharing(flat.shape[0], flat.shape[1], outputs, dtype)
            out = in_cpp(
                flat,
                weight,
                block_bytes=sharing.block_kib << 10,
                tasks_per_thread=sharing.tasks_per_thread,
            )
        else:
            out = in_panels(flat, weight)
        out = out.reshape(x.shape[0], *weight.scales.shape[:-1])
        return (out if bias is None else out + bias.astype(jnp.float32)).astype(out_dtype)

    def _in_cpp(self, x: jax.Array, matrix: jax.Array) -> jax.Array:
        rows, outputs = x.shape[0], matrix.shape[0]
        sharing = self._sharing(rows, matrix.shape[1], outputs, matrix.dtype)
        product: jax.Array = jax.ffi.ffi_call(
            register(f"linear_{FORMS[str(matrix.dtype)]}"),
            jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        )(
            x,
            matrix,
            block_bytes=np.int64(sharing.block_kib << 10),
            tasks_per_thread=np.int64(sharing.tasks_per_thread),
        )
        return product

    def _sharing(self, rows: int, num_in: int, outputs: int, dtype: jnp.dtype) -> WorkSplit:
        # One row has a tile of its own. Others use the configuration of the next power of two,
        # because tuning measures these numbers of rows only.
        sizes = (("inputs", num_in), ("outputs", outputs), ("dtype", str(dtype)))
        return self.choose(OpProblem(1 << (rows - 1).bit_length(), sizes))


def libraries_of(needs: Mapping[str, Collection[str]]) -> list[str]:
    """Return the libraries for weights of these forms, as `Preparable.prepare` gets them."""
    methods = needs.get("quantizations") or ()
    if not methods:
        return [f"linear_{FORMS[name]}" for name in needs.get("dtypes", ()) if name in FORMS]
    rounding = next(iter(needs.get("activation_quantizations") or ()), FLOAT)
    name = LIBRARIES[rounding]
    few = {"int8": "linear_s8" if rounding == FLOAT else f"{name}_s8", "fp8": "linear_f8"}
    few |= {method: f"{name}_{form}" for method, form in PACKED.items()}
    return [*(few[name] for name in methods if name in few), "panel_linear"]


linear = NativeLinear()
