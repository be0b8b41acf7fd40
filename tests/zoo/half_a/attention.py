"""Faults of attention in a right kernel with splits and buffers: what a token sees, and how it is
summed.
"""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _split(name: str, kind: Kind, old: str, new: str) -> Fault:
    kernel = "right.split_attention:attention"
    return Fault(f"attention_{name}", "attention", kind, kernel, "right.split_attention", old, new)


SEEN = (
    _split(
        "causal_mask_shows_one_key_too_many",
        "mask",
        "batch.positions + 1 if spec.causal",
        "batch.positions + 2 if spec.causal",
    ),
    _split(
        "causal_mask_hides_the_token_itself",
        "mask",
        "batch.positions + 1 if spec.causal",
        "jnp.maximum(batch.positions, 1) if spec.causal",
    ),
    _split("causal_always", "mask", "if spec.causal else kv_len", "if True else kv_len"),
    _split(
        "window_one_too_long",
        "mask",
        "batch.positions - spec.window + 1, 0",
        "batch.positions - spec.window, 0",
    ),
    _split(
        "window_one_too_short",
        "mask",
        "batch.positions - spec.window + 1, 0",
        "batch.positions - spec.window + 2, 0",
    ),
    _split(
        "window_counts_from_the_rows_end",
        "mask",
        "jnp.maximum(batch.positions - spec.window + 1, 0)",
        "jnp.maximum(kv_len - spec.window, 0)",
    ),
    _split(
        "window_only_where_longer_than_a_page",
        "mask",
        "if spec.window is not None:",
        "if spec.window is not None and spec.window > 16:",
    ),
    _split(
        "window_rounded_down_to_blocks",
        "mask",
        "(positions >= tokens.first[:, None])",
        "(positions >= tokens.first[:, None] // 32 * 32)",
    ),
    _split(
        "masked_score_is_zero",
        "mask",
        "scores = jnp.where(visible[:, None, None], scores, MASKED)",
        "scores = jnp.where(visible[:, None, None], scores, 0.0)",
    ),
    _split("masked_score_is_minus_a_hundred", "mask", "MASKED = -1e30", "MASKED = -100.0"),
    _split(
        "softcap_after_the_mask",
        "mask",
        "scores = jnp.where(visible[:, None, None], scores, MASKED)",
        "scores = jnp.where(visible[:, None, None], scores, -(spec.softcap or 1e30))",
    ),
    _split(
        "masked_values_are_read",
        "mask",
        "v = jnp.where(visible[:, :, None, None], v, 0)",
        "v = jnp.where((positions < tokens.end[:, None])[:, :, None, None], v, v)",
    ),
    _split(
        "scale_ignores_the_given_one",
        "scale",
        "products * spec.softmax_scale",
        "products * spec.head_dim**-0.5",
    ),
    _split(
        "scale_of_the_padded_head",
        "scale",
        "products * spec.softmax_scale",
        "products * spec.softmax_scale * (1.0 if spec.head_dim != 80 else 0.9)",
    ),
    _split(
        "scale_after_softcap",
        "scale",
        "scores = spec.softcap * jnp.tanh(scores / spec.softcap)",
        "scores = spec.softcap * jnp.tanh(products / spec.softcap) * spec.softmax_scale",
    ),
    _split(
        "softcap_is_a_clip",
        "scale",
        "scores = spec.softcap * jnp.tanh(scores / spec.softcap)",
        "scores = jnp.clip(scores, -spec.softcap, spec.softcap)",
    ),
    _split(
        "softcap_is_not_scaled_back",
        "scale",
        "scores = spec.softcap * jnp.tanh(scores / spec.softcap)",
        "scores = jnp.tanh(scores / spec.softcap)",
    ),
    _split(
        "heads_interleaved",
        "heads",
        "grouped = q.reshape(shape)",
        "grouped = q.reshape(shape[0], shape[2], shape[1], shape[3]).swapaxes(1, 2)",
    ),
    _split(
        "heads_of_the_first_group",
        "heads",
        "grouped = q.reshape(shape)",
        "grouped = q.reshape(shape) if spec.group < 16 else q.reshape(shape)[:, :, ::-1]",
    ),
    _split(
        "sinks_of_other_heads",
        "heads",
        "sinks.reshape(spec.num_kv_heads, spec.group)",
        "sinks.reshape(spec.group, spec.num_kv_heads).T",
    ),
    _split(
        "block_past_the_table_wraps",
        "border",
        "pages = jnp.minimum(positions // layout.page_size, batch.bucket.pages_per_seq - 1)",
        "pages = positions // layout.page_size % max(1, batch.bucket.pages_per_seq - 1)",
    ),
    _split(
        "offset_in_page_by_block",
        "border",
        "+ positions % layout.page_size",
        "+ positions % min(layout.page_size, 64)",
    ),
    _split(
        "last_block_dropped",
        "border",
        "blocks = -(-batch.bucket.pages_per_seq * layout.page_size // config.block_kv)",
        "blocks = max(1, batch.bucket.pages_per_seq * layout.page_size // config.block_kv)",
    ),
    _split(
        "contexts_past_a_thousand_cut",
        "border",
        "kv_len = batch.kv_lens[row]",
        "kv_len = jnp.minimum(batch.kv_lens[row], 1024)",
    ),
    _split(
        "contexts_past_512_masked",
        "border",
        "return Tokens(row, first, jnp.where(real, end, 0), real)",
        "return Tokens(row, first, jnp.where(real, jnp.minimum(end, 512), 0), real)",
    ),
    _split(
        "exactly_full_page_reads_one_less",
        "border",
        "return Tokens(row, first, jnp.where(real, end, 0), real)",
        "return Tokens(row, first, jnp.where(real, end - (end % 64 == 0), 0), real)",
    ),
)

SUMMED = (
    _split(
        "splits_overlap",
        "split",
        "one_split(grouped, tokens, read, split * share, (split + 1) * share, spec, config)",
        "one_split(grouped, tokens, read, split * share, (split + 1) * share + 1, spec, config)",
    ),
    _split(
        "share_rounded_down",
        "split",
        "share = -(-blocks // config.splits)",
        "share = max(1, blocks // config.splits)",
    ),
    _split(
        "last_split_forgotten",
        "split",
        "for split in range(config.splits)",
        "for split in range(max(1, config.splits - 1))",
    ),
    _split(
        "fifth_split_forgotten",
        "split",
        "for split in range(config.splits)",
        "for split in range(min(4, config.splits))",
    ),
    _split(
        "merge_keeps_the_left_maximum",
        "split",
        "maximum = jnp.maximum(one.maximum, other.maximum)",
        "maximum = one.maximum",
    ),
    _split(
        "merge_adds_without_weights",
        "split",
        "total = one.total * left + other.total * right",
        "total = one.total + other.total",
    ),
    _split(
        "merge_swaps_the_weights",
        "split",
        "weighted = one.weighted * left[..., None] + other.weighted * right[..., None]",
        "weighted = one.weighted * right[..., None] + other.weighted * left[..., None]",
    ),
    _split("maximum_begins_at_zero", "accumulator", "LOWEST = -5e29", "LOWEST = 0.0"),
    _split("maximum_begins_at_minus_a_hundred", "accumulator", "LOWEST = -5e29", "LOWEST = -100.0"),
    _split(
        "no_maximum_is_subtracted",
        "accumulator",
        "maximum = jnp.maximum(part.maximum, scores.max(axis=-1))",
        "maximum = jnp.zeros_like(part.maximum)",
    ),
    _split(
        "old_values_are_not_rescaled",
        "accumulator",
        "part.weighted * keep[..., None] + values",
        "part.weighted + values",
    ),
    _split(
        "old_sum_is_not_rescaled",
        "accumulator",
        "total = part.total * keep + weights.sum(axis=-1)",
        "total = part.total + weights.sum(axis=-1)",
    ),
    _split(
        "sum_in_16_bits",
        "accumulator",
        "total = part.total * keep + weights.sum(axis=-1)",
        "total = (part.total * keep + weights.sum(axis=-1)).astype(v.dtype).astype(jnp.float32)",
    ),
    _split(
        "values_in_16_bits",
        "accumulator",
        "return Part(maximum, total, part.weighted * keep[..., None] + values)",
        "return Part(maximum, total, (part.weighted * keep[..., None] + "
        "values).astype(v.dtype).astype(jnp.float32))",
    ),
    _split(
        "scores_in_16_bits",
        "dtype",
        "scores = products * spec.softmax_scale",
        "scores = (products * spec.softmax_scale).astype(q.dtype).astype(jnp.float32)",
    ),
    _split(
        "queries_scaled_in_16_bits",
        "dtype",
        '"thgd,tbhd->thgb", q, k,',
        '"thgd,tbhd->thgb", (q * spec.softmax_scale).astype(q.dtype) / spec.softmax_scale, k,',
    ),
    _split(
        "merged_in_16_bits",
        "dtype",
        "merged = functools.reduce(merge, parts)",
        "merged = jax.tree.map(lambda x: x.astype(q.dtype).astype(jnp.float32), "
        "functools.reduce(merge, parts))",
    ),
    _split(
        "exponentials_in_16_bits",
        "dtype",
        "weights = jnp.exp(scores - maximum[..., None])",
        "weights = jnp.exp((scores - maximum[..., None]).astype(v.dtype)).astype(jnp.float32)",
    ),
    _split(
        "float16_products_in_bfloat16",
        "dtype",
        "v = jnp.where(visible[:, :, None, None], v, 0)",
        "v = jnp.where(visible[:, :, None, None], v.astype(jnp.bfloat16).astype(v.dtype) if "
        "v.dtype == jnp.float16 else v, 0)",
    ),
    _split(
        "buffer_read_before_it_is_loaded",
        "race",
        "here, other = (i - start) % 2, (i - start + 1) % 2",
        "here, other = (i - start) % 2, (i - start) % 2",
    ),
    _split(
        "buffer_parity_from_the_block",
        "race",
        "here, other = (i - start) % 2, (i - start + 1) % 2",
        "here, other = i % 2, (i + 1) % 2",
    ),
    _split(
        "next_block_loaded_twice",
        "race",
        "next_k, next_v = read(tokens.row, i + 1)",
        "next_k, next_v = read(tokens.row, jnp.minimum(i + 1, start + 2))",
    ),
    _split(
        "sometimes_another_sum",
        "race",
        "keep = jnp.exp(part.maximum - maximum)",
        "keep = jnp.exp(part.maximum - maximum) * jax.pure_callback(lambda x: "
        "__import__('numpy').float32(1.0 + 1e-3 * (__import__('time').perf_counter_ns() // 1000 % "
        "5 == 0)), jax.ShapeDtypeStruct((), jnp.float32), base)",
    ),
    _split(
        "padding_writes_to_the_first_slot",
        "write",
        "cache = layout.write(cache, batch.slots, k, v)",
        "cache = layout.write(cache, jnp.maximum(batch.slots, 0), k, v)",
    ),
    _split(
        "last_token_is_not_written",
        "write",
        "cache = layout.write(cache, batch.slots, k, v)",
        "cache = layout.write(cache, batch.slots.at[jnp.argmax(batch.seq_ids == "
        "batch.bucket.seqs) - 1].set(-1), k, v)",
    ),
    _split(
        "keys_written_as_values",
        "write",
        "cache = layout.write(cache, batch.slots, k, v)",
        "cache = layout.write(cache, batch.slots, k, k)",
    ),
    _split(
        "written_one_place_on",
        "write",
        "cache = layout.write(cache, batch.slots, k, v)",
        "cache = layout.write(cache, jnp.where(batch.slots < 0, -1, batch.slots + 1), k, v)",
    ),
    _split(
        "shared_cache_is_written",
        "write",
        "if k is not None and v is not None:",
        "if True:  # noqa",
    ),
    _split(
        "padding_is_not_zero",
        "feature",
        "jnp.where(tokens.real[:, None, None], out.reshape(q.shape), 0.0)",
        "jnp.where(tokens.real[:, None, None], out.reshape(q.shape), q)",
    ),
    _split(
        "lse_without_the_sum",
        "feature",
        "part.maximum + jnp.log(total)",
        "part.maximum + jnp.log(jnp.maximum(total, 1e-3)) * 0.0",
    ),
    _split(
        "lse_in_base_two",
        "feature",
        "part.maximum + jnp.log(total)",
        "part.maximum + jnp.log2(total)",
    ),
    _split(
        "sink_weighs_nothing",
        "feature",
        "jnp.ones_like(part.total), zeros",
        "jnp.zeros_like(part.total), zeros",
    ),
    _split(
        "groups_of_three_lose_a_head",
        "size",
        "out = jnp.where(tokens.real",
        "out = jnp.where((spec.group != 3) | (jnp.arange(q.shape[1]) % 3 < 2)[:, None] if True "
        "else tokens.real, out.reshape(q.shape), 0.0); out = jnp.where(tokens.real",
    ),
    _split(
        "rows_past_sixteen_use_the_last_table",
        "size",
        "slots = batch.page_table[row][:, pages]",
        "slots = batch.page_table[jnp.minimum(row, 15)][:, pages]",
    ),
)


FAULTS = (*SEEN, *SUMMED)
