"""Faults of the ops beside attention that only the sizes of serving meet: many rows, features,
outputs, groups, ranks, slots and tokens.
"""

from __future__ import annotations

from tests.zoo.faults import Fault
from tests.zoo.half_b.making import lora, plain


def _size(op: str, module: str, name: str, old: str, new: str) -> Fault:
    return plain(op, module, name, "size", old, new)


OUT = "out = out[:rows].reshape(rows, *out_dims)"
WIDE = "out = wide[: x.shape[0]].reshape(x.shape[0], *out_dims)"

PRODUCTS = (
    _size(
        "linear",
        "linear",
        "rows_past_256_are_zeros",
        OUT,
        "out = jnp.where(jnp.arange(rows)[:, None] < 256, out[:rows], 0).reshape(rows, *out_dims)",
    ),
    _size(
        "linear",
        "linear",
        "a_row_after_whole_blocks_has_no_block",
        OUT,
        "out = jnp.where(jnp.arange(rows)[:, None] < max(128, (rows + 126) // 128 * 128), "
        "out[:rows], 0).reshape(rows, *out_dims)",
    ),
    _size(
        "linear",
        "linear",
        "inputs_past_4096_are_left_out",
        "flat = x.reshape(x.shape[0], num_in)",
        "flat = jnp.where(jnp.arange(num_in) < 4096, x.reshape(x.shape[0], num_in), 0)",
    ),
    _size(
        "linear",
        "linear",
        "inputs_after_the_last_whole_eight_are_left_out",
        "flat = x.reshape(x.shape[0], num_in)",
        "flat = jnp.where(jnp.arange(num_in) < max(8, num_in // 8 * 8), "
        "x.reshape(x.shape[0], num_in), 0)",
    ),
    _size(
        "linear",
        "linear",
        "outputs_of_sixteen_bits",
        "matrix = array.reshape(math.prod(out_dims), num_in)",
        "matrix = array.reshape(-1, num_in)[jnp.arange(math.prod(out_dims)) % 65536]",
    ),
    _size(
        "linear",
        "linear",
        "bias_repeats_after_1024_outputs",
        "out = out + bias.astype(jnp.float32)",
        "out = out + bias.reshape(-1)[jnp.arange(bias.size) % 1024].reshape(bias.shape)",
    ),
    _size(
        "linear",
        "quantized_linear",
        "scales_of_128_groups_at_most",
        "return _dot(x, weight.dequantized().astype(x.dtype))",
        "return _dot(x, dataclasses.replace(weight, scales=weight.scales[:, "
        "jnp.arange(weight.scales.shape[1]) % 128]).dequantized().astype(x.dtype))",
    ),
    _size(
        "linear",
        "quantized_linear",
        "last_outputs_are_in_no_block",
        "return jax.lax.fori_loop(0, -(-outputs // block), add, "
        "jnp.zeros((rows, outputs), jnp.float32))",
        "return jax.lax.fori_loop(0, outputs // block, add, "
        "jnp.zeros((rows, outputs), jnp.float32))",
    ),
    _size(
        "linear",
        "quantized_linear",
        "last_block_is_written_where_it_is_not_read",
        "return jax.lax.dynamic_update_slice_in_dim(out, part, i * block, axis=1)",
        "return out.at[:, i * block + jnp.arange(block)].set(part, mode='drop')",
    ),
    _size(
        "linear",
        "quantized_linear",
        "rounded_rows_past_64_have_the_scales_of_the_first",
        "rounded, factors = rounded_rows(flat)",
        "rounded, factors = (lambda r, f: (r, f[jnp.arange(len(f)) % 64]))(*rounded_rows(flat))",
    ),
    _size(
        "grouped_linear",
        "grouped_linear",
        "experts_past_128_take_its_weight",
        "return jax.lax.dynamic_index_in_dim(array, group, keepdims=False)",
        "return jax.lax.dynamic_index_in_dim(array, jnp.minimum(group, 127), keepdims=False)",
    ),
    _size(
        "grouped_linear",
        "grouped_linear",
        "counts_blocks_in_eight_bits",
        "last = jnp.cumsum(counts)",
        "last = jnp.cumsum(counts.astype(jnp.uint8), dtype=jnp.uint8).astype(jnp.int32)",
    ),
    _size(
        "grouped_linear",
        "grouped_linear",
        "a_row_after_whole_blocks_has_no_block",
        "counts = -(-group_sizes // block)",
        "counts = jnp.maximum((group_sizes > 0).astype(int), (group_sizes + block - 2) // block)",
    ),
    _size(
        "grouped_linear",
        "grouped_linear",
        "quantised_groups_of_more_than_64_rows_end_there",
        "inside = (start + jnp.arange(block) < ends[group])[:, None]",
        "inside = (start + jnp.arange(block) < (jnp.minimum(ends[group], ends[group] - "
        "group_sizes[group] + 64) if isinstance(weight, QuantizedArray) else ends[group]))"
        "[:, None]",
    ),
)

ADAPTERS = (
    lora(
        "many_tokens_use_32_of_a_rank",
        "size",
        "return out + _product(shrunk.astype(x.dtype), up[slot], 0)",
        "return out + _product(shrunk.astype(x.dtype)[:, :32], up[slot, :32], 0)",
    ),
    lora(
        "few_tokens_use_16_of_a_rank",
        "size",
        '"tr,tro->to", shrunk, up[slot], precision=precision, preferred_element_type=jnp.float32',
        '"tr,tro->to", shrunk[:, :16], up[slot, :16], precision=precision, '
        "preferred_element_type=jnp.float32",
    ),
    lora(
        "owners_of_eight_bits",
        "size",
        "owner = jnp.arange(slots * rank, dtype=jnp.int32) // rank + 1",
        "owner = jnp.arange(slots * rank, dtype=jnp.int32).astype(jnp.int8) // rank + 1",
    ),
    lora(
        "tokens_past_256_have_no_adapter",
        "size",
        "is_mine = places == slot + 1",
        "is_mine = (places == slot + 1) & (jnp.arange(len(places)) < 256)",
    ),
    lora(
        "slots_past_16_are_not_visited",
        "size",
        "return jax.lax.fori_loop(0, down.shape[0], of_slot, base)",
        "return jax.lax.fori_loop(0, min(16, down.shape[0]), of_slot, base)",
    ),
    lora(
        "asks_the_first_32_tokens_for_adapters",
        "size",
        "out: jax.Array = jax.lax.cond((places > 0).any(), added, lambda: y)",
        "out: jax.Array = jax.lax.cond((places[:32] > 0).any(), added, lambda: y)",
    ),
    lora(
        "a_third_part_shrinks_as_the_second",
        "size",
        "down = a[:, part].reshape(slots, rank, -1)",
        "down = a[:, min(part, 1)].reshape(slots, rank, -1)",
    ),
    lora(
        "inputs_past_1024_are_left_out_for_one_token_each",
        "size",
        '"ti,tri->tr", x, down[slot], precision=precision, preferred_element_type=jnp.float32',
        '"ti,tri->tr", x[:, :1024], down[slot, :, :1024], precision=precision, '
        "preferred_element_type=jnp.float32",
    ),
)

OTHERS = (
    _size(
        "short_conv",
        "short_conv",
        "reads_places_of_eight_bits",
        "return jnp.where(begins[:, None, None], 0, inputs[batch.page_table[:, 0]])",
        "return jnp.where(begins[:, None, None], 0, "
        "inputs[batch.page_table[:, 0].astype(jnp.uint8)])",
    ),
    _size(
        "short_conv",
        "short_conv",
        "every_256_tokens_begin_at_the_state",
        "offset = token - batch.cu_q_lens[seq]",
        "offset = (token - batch.cu_q_lens[seq]) % 256",
    ),
    _size(
        "short_conv",
        "short_conv",
        "rows_past_64_keep_the_inputs_of_the_first",
        "rows = jnp.arange(before.shape[0])[:, None]",
        "rows = jnp.arange(before.shape[0])[:, None] % 64",
    ),
    _size(
        "short_conv",
        "short_conv",
        "four_taps_at_most",
        "for back in range(kept + 1):",
        "for back in range(min(kept, 3) + 1):",
    ),
    _size(
        "rms_norm",
        "norm",
        "squares_of_the_first_4096",
        "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)",
        "variance = jnp.mean(jnp.square(wide[..., :4096]), axis=-1, keepdims=True)",
    ),
    _size(
        "rms_norm",
        "norm",
        "divides_by_the_padded_width",
        "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)",
        "variance = jnp.sum(jnp.square(wide), axis=-1, keepdims=True) / "
        "(-(-wide.shape[-1] // 128) * 128)",
    ),
    _size(
        "rms_norm",
        "norm",
        "heads_share_their_statistics",
        "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)",
        "variance = jnp.mean(jnp.square(wide), axis=tuple(range(1, wide.ndim)), keepdims=True)",
    ),
    _size(
        "add_rms_norm",
        "norm",
        "adds_whole_eights_of_features",
        "total = _rounded(x + residual)",
        "total = _rounded(jnp.where(jnp.arange(x.shape[-1]) < max(8, x.shape[-1] // 8 * 8), "
        "x + residual, x))",
    ),
    _size(
        "add_rms_norm",
        "norm",
        "rows_past_512_get_other_residuals",
        "total = _rounded(x + residual)",
        "total = _rounded(x + residual[jnp.arange(len(x)) % 512])",
    ),
    _size(
        "add_rms_norm",
        "norm",
        "sum_of_the_first_8192_features",
        "return rms_norm(total, weight, eps=eps), total",
        "return rms_norm(total, weight, eps=eps), "
        "jnp.where(jnp.arange(x.shape[-1]) < 8192, total, residual)",
    ),
    _size(
        "rope",
        "rope",
        "a_table_of_32768_positions",
        "angles = positions.astype(jnp.float32)[:, None] * inv_freq",
        "angles = jnp.minimum(positions, 32767).astype(jnp.float32)[:, None] * inv_freq",
    ),
    _size(
        "rope",
        "rope",
        "heads_after_whole_eights_do_not_turn",
        "cos, sin = cos[:, None], sin[:, None]",
        "cos, sin = (jnp.where(jnp.arange(x.shape[1])[:, None] < max(8, x.shape[1] // 8 * 8), "
        "t[:, None], still) for t, still in ((cos, 1.0), (sin, 0.0)))",
    ),
    _size(
        "rope",
        "rope",
        "tokens_past_1024_turn_as_the_first",
        "angles = positions.astype(jnp.float32)[:, None] * inv_freq",
        "angles = positions[jnp.arange(len(positions)) % 1024].astype(jnp.float32)[:, None] "
        "* inv_freq",
    ),
    _size(
        "rope_kv_write",
        "rope_kv_write",
        "queries_have_a_table_of_8192_positions",
        "return rope(q, positions, spec=spec), cache",
        "return rope(q, positions.clip(0, 8191), spec=spec), cache",
    ),
    _size(
        "rope_kv_write",
        "rope_kv_write",
        "queries_past_32_heads_do_not_turn",
        "return rope(q, positions, spec=spec), cache",
        "return q.at[:, :32].set(rope(q[:, :32], positions, spec=spec)), cache",
    ),
    _size(
        "embedding",
        "linear",
        "ids_of_an_unsigned_short",
        'jnp.take(array, ids, axis=0, mode="clip")',
        'jnp.take(array, ids.astype(jnp.uint16), axis=0, mode="clip")',
    ),
    _size(
        "embedding",
        "linear",
        "last_token_of_the_vocabulary_is_the_one_before",
        'jnp.take(array, ids, axis=0, mode="clip")',
        'jnp.take(array, jnp.minimum(ids, len(array) - 2), axis=0, mode="clip")',
    ),
    _size(
        "embedding",
        "linear",
        "tokens_past_1024_are_the_last_one",
        'jnp.take(array, ids, axis=0, mode="clip")',
        'jnp.take(array, ids[jnp.minimum(jnp.arange(len(ids)), 1023)], axis=0, mode="clip")',
    ),
    _size(
        "kv_write",
        "kv_write",
        "slots_of_sixteen_bits",
        "return layout.write(cache, slots, k, v)",
        "return layout.write(cache, slots.astype(jnp.int16).astype(jnp.int32), k, v)",
    ),
    _size(
        "kv_write",
        "kv_write",
        "heads_past_eight_repeat_the_first",
        "return layout.write(cache, slots, k, v)",
        "return layout.write(cache, slots, *(x[:, jnp.arange(x.shape[1]) % 8] for x in (k, v)))",
    ),
    _size(
        "kv_write",
        "kv_write",
        "tokens_past_1024_are_dropped",
        "return layout.write(cache, slots, k, v)",
        "return layout.write(cache, jnp.where(jnp.arange(len(slots)) < 1024, slots, -1), k, v)",
    ),
    _size(
        "all_reduce",
        "collectives",
        "numbers_past_65536_are_its_own",
        "return jax.lax.psum(x, axes)",
        "return jnp.where(jnp.arange(x.size).reshape(x.shape) < 65536, jax.lax.psum(x, axes), x)",
    ),
    _size(
        "all_gather",
        "collectives",
        "of_two_axes_the_second_comes_first",
        "return jax.lax.all_gather(x, axes, axis=dim, tiled=True)",
        "return jax.lax.all_gather(x, axes[::-1], axis=dim, tiled=True)",
    ),
    _size(
        "all_to_all",
        "collectives",
        "of_two_axes_the_second_comes_first",
        "return jax.lax.all_to_all(x, axes, 0, 0, tiled=True)",
        "return jax.lax.all_to_all(x, axes[::-1], 0, 0, tiled=True)",
    ),
)

FAULTS = (*PRODUCTS, *ADAPTERS, *OTHERS)
