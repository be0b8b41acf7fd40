"""Faults that only some numbers show: rows of zeros, of equal numbers, of tiny or of large ones,
sums that need 32 bits, and results that are rounded once too often.
"""

from __future__ import annotations

from tests.zoo.half_b.making import lora, plain, split

ROUNDED = "rounded, factors = rounded_rows(flat)"

PRODUCTS = (
    plain(
        "linear",
        "quantized_linear",
        "rounds_all_rows_with_one_scale",
        "value",
        ROUNDED,
        "rounded, factors = (lambda step: (jnp.rint(flat / jnp.where(step > 0, step, 1))"
        ".astype(jnp.int8), jnp.full((flat.shape[0], 1), step, jnp.float32)))"
        "(jnp.abs(flat).max(initial=0.0).astype(jnp.float32) / 127)",
    ),
    plain(
        "linear",
        "quantized_linear",
        "scale_of_a_row_is_at_least_tiny",
        "value",
        ROUNDED,
        "rounded, factors = (lambda step: (jnp.rint(flat.astype(jnp.float32) / step)"
        ".astype(jnp.int8), step))(jnp.maximum(jnp.abs(flat.astype(jnp.float32))"
        ".max(axis=1, keepdims=True, initial=0.0), 1e-5) / 127)",
    ),
    plain(
        "linear",
        "quantized_linear",
        "rows_of_zeros_are_divided_by_zero",
        "value",
        ROUNDED,
        "rounded, factors = (lambda r, f: (r, f * (f / f)))(*rounded_rows(flat))",
    ),
    plain(
        "linear",
        "quantized_linear",
        "scales_of_rows_in_float16",
        "value",
        ROUNDED,
        "rounded, factors = (lambda r, f: (r, f.astype(jnp.float16).astype(jnp.float32)))"
        "(*rounded_rows(flat))",
    ),
    plain(
        "linear",
        "quantized_linear",
        "sums_of_rounded_rows_in_sixteen_bits",
        "accumulator",
        "totals = inputs.sum(axis=2, dtype=jnp.int32).astype(jnp.float32)",
        "totals = inputs.sum(axis=2, dtype=jnp.int16).astype(jnp.float32)",
    ),
    plain(
        "linear",
        "quantized_linear",
        "int8_products_in_float16",
        "accumulator",
        "inputs, values, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.int32",
        "inputs.astype(jnp.float16), values.astype(jnp.float16), (((2,), (2,)), ((1,), (1,))), "
        "preferred_element_type=jnp.float16",
    ),
    plain(
        "linear",
        "quantized_linear",
        "dequantises_to_sixteen_bits",
        "dtype",
        "return _dot(x, weight.dequantized().astype(x.dtype))",
        "return _dot(x, weight.dequantized().astype(jnp.bfloat16).astype(x.dtype))",
    ),
    plain(
        "linear",
        "quantized_linear",
        "scales_of_float16",
        "dtype",
        "return _dot(x, weight.values.astype(x.dtype)) * weight.scales[:, 0].astype(jnp.float32)",
        "return _dot(x, weight.values.astype(x.dtype)) * weight.scales[:, 0]"
        ".astype(jnp.float16).astype(jnp.float32)",
    ),
    plain(
        "linear",
        "quantized_linear",
        "rounds_to_the_input_dtype_first",
        "dtype",
        "return out.astype(out_dtype or x.dtype)",
        "return out.astype(x.dtype).astype(out_dtype or x.dtype)",
    ),
    plain(
        "grouped_linear",
        "grouped_linear",
        "rounds_to_the_input_dtype_first",
        "dtype",
        "part = linear(jax.lax.dynamic_slice_in_dim(padded, start, block), mine, out_dtype=dtype)",
        "part = linear(jax.lax.dynamic_slice_in_dim(padded, start, block), mine).astype(dtype)",
    ),
    plain(
        "grouped_linear",
        "grouped_linear",
        "other_groups_are_multiplied_by_zero",
        "value",
        "out, jnp.where(inside, part, before), start, axis=0",
        "out, (part * inside + before * ~inside).astype(dtype), start, axis=0",
    ),
)

ADAPTERS = (
    lora(
        "shrinks_to_sixteen_bits",
        "dtype",
        "return out + _product(shrunk.astype(x.dtype), up[slot], 0)",
        "return out + _product(shrunk.astype(jnp.bfloat16).astype(x.dtype), up[slot], 0)",
    ),
    lora(
        "y_in_the_dtype_of_x",
        "dtype",
        "out = add(base.reshape(tokens, -1).astype(jnp.float32), rows, down, up, places)",
        "out = add(base.reshape(tokens, -1).astype(x.dtype).astype(jnp.float32), rows, down, up, "
        "places)",
    ),
    lora(
        "result_in_the_dtype_of_x",
        "dtype",
        "pieces.append(out.reshape(base.shape).astype(y.dtype))",
        "pieces.append(out.reshape(base.shape).astype(x.dtype).astype(y.dtype))",
    ),
    lora(
        "others_are_multiplied_by_zero",
        "value",
        "shrunk = jnp.where(places[:, None] == owner, shrunk, 0).astype(x.dtype)",
        "shrunk = (shrunk * jnp.where(places[:, None] == owner, 1.0, 0.0)).astype(x.dtype)",
    ),
    lora(
        "second_product_in_sixteen_bits",
        "accumulator",
        "return base + _product(shrunk, up.reshape(slots * rank, -1), 0)",
        "return base + _product(shrunk, up.reshape(slots * rank, -1), 0)"
        ".astype(jnp.bfloat16).astype(jnp.float32)",
    ),
)

OTHERS = (
    plain(
        "rms_norm",
        "norm",
        "eps_in_the_input_dtype",
        "value",
        "normed = (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)",
        "normed = (wide * jax.lax.rsqrt(variance + jnp.asarray(eps, x.dtype).astype("
        "jnp.float32))).astype(x.dtype)",
    ),
    plain(
        "rms_norm",
        "norm",
        "the_larger_of_eps_and_variance",
        "value",
        "normed = (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)",
        "normed = (wide * jax.lax.rsqrt(jnp.maximum(variance, eps))).astype(x.dtype)",
    ),
    plain(
        "rms_norm",
        "norm",
        "rows_of_zeros_are_divided_by_zero",
        "value",
        "normed = (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)",
        "normed = (wide / jnp.abs(wide).max(axis=-1, keepdims=True) * jax.lax.rsqrt((variance + "
        "eps) / jnp.square(jnp.abs(wide).max(axis=-1, keepdims=True)))).astype(x.dtype)",
    ),
    plain(
        "rms_norm",
        "norm",
        "mean_square_ends_where_float16_does",
        "value",
        "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)",
        "variance = jnp.minimum(jnp.mean(jnp.square(wide), axis=-1, keepdims=True), 65504.0)",
    ),
    plain(
        "rms_norm",
        "norm",
        "weight_of_float16",
        "dtype",
        "return (normed * weight).astype(x.dtype)",
        "return (normed * weight.astype(jnp.float16)).astype(x.dtype)",
    ),
    plain(
        "add_rms_norm",
        "norm",
        "sum_of_large_numbers_is_cut",
        "value",
        "total = _rounded(x + residual)",
        "total = _rounded(x + residual).clip(-30000, 30000)",
    ),
    plain(
        "short_conv",
        "short_conv",
        "old_inputs_are_multiplied_by_zero",
        "value",
        "return jnp.where(begins[:, None, None], 0, inputs[batch.page_table[:, 0]])",
        "return inputs[batch.page_table[:, 0]] * ~begins[:, None, None]",
    ),
    plain(
        "short_conv",
        "short_conv",
        "state_of_sixteen_bits",
        "dtype",
        'return {INPUTS: inputs.at[places].set(rows.astype(inputs.dtype), mode="drop")}',
        "return {INPUTS: inputs.at[places].set(rows.astype(jnp.bfloat16).astype(inputs.dtype), "
        'mode="drop")}',
    ),
    plain(
        "short_conv",
        "short_conv",
        "sums_in_the_input_dtype",
        "accumulator",
        "total += inputs.astype(jnp.float32) * weight[:, kept - back].astype(jnp.float32)",
        "total = (total + inputs.astype(jnp.float32) * weight[:, kept - back].astype("
        "jnp.float32)).astype(x.dtype).astype(jnp.float32)",
    ),
    plain(
        "all_reduce",
        "collectives",
        "sends_sixteen_bits",
        "dtype",
        "return jax.lax.psum(x, axes)",
        "return jax.lax.psum(x.astype(jnp.bfloat16), axes).astype(x.dtype)",
    ),
    plain(
        "rope",
        "rope",
        "turns_in_the_input_dtype",
        "dtype",
        "wide = x[..., : spec.rotary_dim].astype(jnp.float32)",
        "wide = x[..., : spec.rotary_dim].astype(jnp.bfloat16).astype(jnp.float32)",
    ),
)

ATTENTION = (
    split(
        "maximum_begins_at_zero",
        "value",
        "maximum = jnp.full(q.shape[:-1], LOWEST, jnp.float32)",
        "maximum = jnp.full(q.shape[:-1], 0.0, jnp.float32)",
    ),
    split(
        "masked_is_not_low_enough",
        "value",
        "scores = jnp.where(visible[:, None, None], scores, MASKED)",
        "scores = jnp.where(visible[:, None, None], scores, -1e4)",
    ),
    plain(
        "attention",
        "attention_blocks",
        "queries_in_the_cache_dtype",
        "dtype",
        "wide = jnp.promote_types(q.dtype, layout.dtype)",
        "wide = jnp.dtype(layout.dtype)",
    ),
    plain(
        "attention",
        "softmax",
        "scores_of_float16",
        "value",
        "scores = products * spec.softmax_scale",
        "scores = products.clip(-65504, 65504) * spec.softmax_scale",
    ),
)

FAULTS = (*PRODUCTS, *ADAPTERS, *OTHERS, *ATTENTION)
