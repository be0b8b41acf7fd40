"""The op linear on TPUs: products with quantised weights in a kernel, others by XLA."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from enginebay.ops.products import plain_product
from enginebay.weights import QuantizedArray, Weight
from enginebay_pallas.interpret import interpreting
from enginebay_pallas.products import Matrices, block_rows, multiply, prepared_rows


@dataclasses.dataclass(frozen=True)
class PallasLinear:
    """The op linear; LinearOp describes it. float16 is computed as f32 on TPUs."""

    is_interpreted: bool = False

    def interpreted(self) -> PallasLinear:
        """Return the same kernel, run by Pallas' TPU interpreter."""
        return dataclasses.replace(self, is_interpreted=True)

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
        [T, *out_dims]. Sums and the bias are f32, rounded once.
        """
        out_dims = weight.shape[: weight.ndim - (x.ndim - 1)]
        flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        dtype = jnp.dtype(out_dtype or x.dtype)
        if isinstance(weight, QuantizedArray):
            made = jnp.dtype(jnp.float32) if bias is not None else dtype
            out = self._quantized(flat, weight, made)
        else:
            out = plain_product(flat, weight.reshape(-1, flat.shape[1]))
        out = out.reshape(x.shape[0], *out_dims)
        if bias is not None:
            out = out + bias.astype(jnp.float32)
        return out.astype(dtype)

    def _quantized(self, x: jax.Array, weight: QuantizedArray, dtype: jnp.dtype) -> jax.Array:
        """Return the products [T, outputs] in `dtype`, or in f32 where a TPU lacks the dtype."""
        if x.shape[0] == 0:
            return jnp.zeros((0, weight.values.size // x.shape[1]), dtype)
        x, x_scales = prepared_rows(x, weight, is_interpreted=self.is_interpreted)
        out_dtype = dtype if x_scales is None and dtype != jnp.float16 else jnp.float32
        rows = x.shape[0]
        block = block_rows(rows, 1, x)
        blocks = -(-rows // block)
        padded = jnp.pad(x, ((0, blocks * block - rows), (0, 0)))
        group, used = jnp.zeros(blocks, jnp.int32), jnp.full(1, blocks, jnp.int32)
        matrices = Matrices.of(weight, 1, x.shape[1])
        run = interpreting(multiply) if self.is_interpreted else multiply
        out: jax.Array = run(group, used, padded, matrices, out_dtype=out_dtype)[:rows]
        return out if x_scales is None else out * x_scales


linear = PallasLinear()
