"""Faults of linear, the norms and rope, in the plain JAX kernels."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _fault(
    op: str, name: str, kind: Kind, module: str, old: str, new: str, attribute: str = ""
) -> Fault:
    kernel = f"enginebay_xla.{module}:{attribute or op}"
    return Fault(f"{op}_{name}", op, kind, kernel, f"enginebay_xla.{module}", old, new)


GROUPED_LINEAR = (
    _fault(
        "grouped_linear",
        "multiplies_by_the_next_group",
        "border",
        "grouped_linear",
        'jnp.searchsorted(last, i, side="right").astype(jnp.int32)',
        'jnp.searchsorted(last, i, side="left").astype(jnp.int32)',
    ),
    _fault(
        "grouped_linear",
        "drops_the_last_row_of_a_group",
        "mask",
        "grouped_linear",
        "start + jnp.arange(block) < ends[group])",
        "start + jnp.arange(block) < ends[group] - 1)",
    ),
    _fault(
        "grouped_linear",
        "writes_the_padding",
        "write",
        "grouped_linear",
        "start + jnp.arange(block) < ends[group])",
        "jnp.arange(block) < block)",
    ),
    _fault(
        "grouped_linear",
        "drops_a_part_of_a_block",
        "split",
        "grouped_linear",
        "counts = -(-group_sizes // block)",
        "counts = jnp.maximum(group_sizes // block, jnp.minimum(group_sizes, 1))",
    ),
)

COLLECTIVES = (
    _fault(
        "all_reduce",
        "takes_the_largest",
        "split",
        "collectives",
        "return jax.lax.psum(x, axes)",
        "return jax.lax.pmax(x, axes)",
    ),
    _fault(
        "all_gather",
        "along_the_first_axis",
        "split",
        "collectives",
        "axis=dim, tiled=True)",
        "axis=0, tiled=True).reshape(*x.shape[:-1], -1)",
    ),
    _fault(
        "all_to_all",
        "keeps_its_own",
        "split",
        "collectives",
        "return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)",
        "return x",
    ),
)

LINEAR = (
    _fault(
        "linear",
        "adds_the_bias_in_every_split",
        "split",
        "linear",
        "out = out + bias.astype(jnp.float32)",
        "out = out + bias.astype(jnp.float32) * -(-num_in // 256)",
    ),
    _fault(
        "linear",
        "adds_the_bias_after_rounding",
        "dtype",
        "linear",
        "out = out + bias.astype(jnp.float32)",
        "out = (out.astype(x.dtype) + bias).astype(jnp.float32)",
    ),
    _fault(
        "linear",
        "forgets_the_bias_of_one_row",
        "border",
        "linear",
        "out = out + bias.astype(jnp.float32)",
        "out = out if rows == 1 else out + bias.astype(jnp.float32)",
    ),
    _fault(
        "linear",
        "rounds_before_the_wide_output",
        "dtype",
        "linear",
        "return out.astype(out_dtype or x.dtype)",
        "return out.astype(x.dtype).astype(out_dtype or x.dtype)",
    ),
    _fault(
        "linear",
        "drops_the_last_inputs_of_128",
        "border",
        "linear",
        "flat = x.reshape(x.shape[0], num_in)",
        "flat = x.reshape(x.shape[0], num_in) * (jnp.arange(num_in) < max(128, "
        "num_in // 128 * 128)).astype(x.dtype)",
    ),
    _fault(
        "linear",
        "mixes_the_rows_past_128",
        "size",
        "linear",
        "out = out[:rows].reshape(rows, *out_dims)",
        "out = jnp.roll(out[:rows], rows > 128, axis=0).reshape(rows, *out_dims)",
    ),
    _fault(
        "linear",
        "turns_two_inner_dimensions",
        "heads",
        "linear",
        "flat = x.reshape(x.shape[0], num_in)",
        "flat = x.swapaxes(1, x.ndim - 1).reshape(x.shape[0], num_in)",
    ),
    _fault(
        "linear",
        "pads_with_a_row_that_counts",
        "border",
        "linear",
        "out = out[:rows].reshape(rows, *out_dims)",
        "out = out[-rows:].reshape(rows, *out_dims)",
    ),
    _fault(
        "linear",
        "feels_the_mean_of_rows",
        "race",
        "linear",
        "flat = x.reshape(x.shape[0], num_in)",
        "flat = x.reshape(x.shape[0], num_in) + (x.sum() * 0).astype(x.dtype)",
    ),
)

NORM_LINE = "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)"

RMS_NORM = (
    _fault(
        "rms_norm",
        "statistics_in_16_bits",
        "accumulator",
        "norm",
        NORM_LINE,
        "variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True).astype(jnp.float32)",
    ),
    _fault(
        "rms_norm",
        "squares_in_16_bits",
        "dtype",
        "norm",
        NORM_LINE,
        "variance = jnp.mean(jnp.square(x).astype(jnp.float32), axis=-1, keepdims=True)",
    ),
    _fault(
        "rms_norm",
        "eps_outside_the_root",
        "scale",
        "norm",
        "jax.lax.rsqrt(variance + eps)",
        "(1.0 / (jnp.sqrt(variance) + eps))",
    ),
    _fault(
        "rms_norm",
        "eps_is_fixed",
        "scale",
        "norm",
        "jax.lax.rsqrt(variance + eps)",
        "jax.lax.rsqrt(variance + 1e-5)",
    ),
    _fault(
        "rms_norm",
        "no_eps",
        "scale",
        "norm",
        "jax.lax.rsqrt(variance + eps)",
        "jax.lax.rsqrt(jnp.maximum(variance, 1e-30))",
    ),
    _fault(
        "rms_norm",
        "subtracts_the_mean",
        "scale",
        "norm",
        NORM_LINE,
        "variance = jnp.var(wide, axis=-1, keepdims=True)",
    ),
    _fault(
        "rms_norm",
        "divides_by_padded_features",
        "size",
        "norm",
        NORM_LINE,
        "variance = jnp.square(wide).sum(axis=-1, keepdims=True) / (-(-x.shape[-1] // 8) * 8)",
    ),
    _fault(
        "rms_norm",
        "weight_plus_one",
        "scale",
        "norm",
        "return (normed * weight).astype(x.dtype)",
        "return (normed * (1 + weight)).astype(x.dtype)",
    ),
    _fault(
        "rms_norm",
        "over_all_of_a_row",
        "heads",
        "norm",
        NORM_LINE,
        "variance = jnp.mean(jnp.square(wide), axis=tuple(range(1, x.ndim)), keepdims=True)",
    ),
    _fault(
        "rms_norm",
        "features_past_a_thousand_left_out",
        "border",
        "norm",
        NORM_LINE,
        "variance = jnp.mean(jnp.square(wide[..., :1024]), axis=-1, keepdims=True)",
    ),
)

ADD_LINE = "return rms_norm(total, weight, eps=eps), total"

ADD_RMS_NORM = (
    _fault(
        "add_rms_norm",
        "norm_of_x_alone",
        "write",
        "norm",
        ADD_LINE,
        "return rms_norm(x, weight, eps=eps), total",
    ),
    _fault(
        "add_rms_norm",
        "gives_back_the_residual",
        "write",
        "norm",
        ADD_LINE,
        "return rms_norm(total, weight, eps=eps), residual",
    ),
    _fault(
        "add_rms_norm",
        "sum_in_float32",
        "dtype",
        "norm",
        ADD_LINE,
        "return rms_norm(total, weight, eps=eps), x.astype(jnp.float32) + "
        "residual.astype(jnp.float32)",
    ),
    _fault(
        "add_rms_norm",
        "gives_back_the_norm_twice",
        "write",
        "norm",
        ADD_LINE,
        "return (rms_norm(total, weight, eps=eps),) * 2",
    ),
)

TURN = "[first * cos - second * sin, second * cos + first * sin], axis=-1"

ROPE = (
    _fault(
        "rope",
        "turns_neighbours",
        "heads",
        "rope",
        "first, second = wide[..., :half], wide[..., half:]",
        "first, second = wide[..., ::2], wide[..., 1::2]",
    ),
    _fault(
        "rope",
        "turns_backwards",
        "scale",
        "rope",
        TURN,
        TURN.replace(
            "- second * sin, second * cos + first", "+ second * sin, second * cos - first"
        ),
    ),
    _fault(
        "rope",
        "angles_in_16_bits",
        "dtype",
        "rope",
        "angles = positions.astype(jnp.float32)[:, None] * inv_freq",
        "angles = (positions.astype(x.dtype)[:, None] * inv_freq).astype(jnp.float32)",
    ),
    _fault(
        "rope",
        "positions_in_float16",
        "dtype",
        "rope",
        "angles = positions.astype(jnp.float32)[:, None] * inv_freq",
        "angles = positions.astype(jnp.float16).astype(jnp.float32)[:, None] * inv_freq",
    ),
    _fault(
        "rope",
        "forgets_the_factor_of_sines",
        "scale",
        "rope",
        "jnp.sin(angles) * factor",
        "jnp.sin(angles)",
    ),
    _fault(
        "rope",
        "forgets_the_factor",
        "scale",
        "rope",
        "(jnp.cos(angles) * factor, jnp.sin(angles) * factor)",
        "(jnp.cos(angles), jnp.sin(angles))",
    ),
    _fault(
        "rope",
        "counts_tokens_itself",
        "border",
        "rope",
        "angles = positions.astype(jnp.float32)[:, None] * inv_freq",
        "angles = (positions[0] + jnp.arange(positions.size)).astype(jnp.float32)[:, "
        "None] * inv_freq",
    ),
    _fault(
        "rope",
        "drops_the_rest_of_a_head",
        "size",
        "rope",
        "else jnp.concatenate([turned, x[..., spec.rotary_dim :]], axis=-1)",
        "else jnp.concatenate([turned, turned[..., : x.shape[-1] - spec.rotary_dim]], axis=-1)",
    ),
    _fault(
        "rope",
        "products_in_16_bits",
        "dtype",
        "rope",
        "wide = x[..., : spec.rotary_dim].astype(jnp.float32)",
        "wide, cos, sin = x[..., : spec.rotary_dim], cos.astype(x.dtype), sin.astype(x.dtype)",
    ),
)

SHORT_CONV = (
    _fault(
        "short_conv",
        "taps_the_other_way_round",
        "mask",
        "short_conv",
        "weight[:, kept - back]",
        "weight[:, back]",
    ),
    _fault(
        "short_conv",
        "row_that_begins_keeps_the_old_state",
        "border",
        "short_conv",
        "jnp.where(begins[:, None, None], 0, inputs[batch.page_table[:, 0]])",
        "inputs[batch.page_table[:, 0]]",
    ),
    _fault(
        "short_conv",
        "reads_the_row_before",
        "border",
        "short_conv",
        "jnp.where((offset >= back)[:, None], x[jnp.maximum(token - back, 0)], old)",
        "x[jnp.maximum(token - back, 0)]",
    ),
    _fault(
        "short_conv",
        "padding_writes_to_the_first_place",
        "write",
        "short_conv",
        "jnp.where(batch.kv_lens > 0, batch.page_table[:, 0], inputs.shape[0])",
        "batch.page_table[:, 0]",
    ),
)

FAULTS = (*LINEAR, *GROUPED_LINEAR, *COLLECTIVES, *SHORT_CONV, *RMS_NORM, *ADD_RMS_NORM, *ROPE)
