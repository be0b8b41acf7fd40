"""More faults of attention: heads and groups, pages and contexts of serving, flags that are lost
beside others, pages that rows share or no longer keep, stray writes.
"""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind, More
from tests.zoo.half_b.making import plain, split


def _blocks(name: str, kind: Kind | More, old: str, new: str) -> Fault:
    return plain("attention", "attention_blocks", name, kind, old, new)


QK = '"thgd,tbhd->thgb", q, k, precision=precision, preferred_element_type=jnp.float32'
MASKED_V = "v = jnp.where(visible[:, :, None, None], v, 0)"
SHAPED = "out = out.transpose(2, 0, 1, 3).reshape(tokens, spec.num_q_heads, spec.v_dim)"
TABLE = "pages = jnp.pad(batch.page_table, ((0, 0), (0, per_chunk)))"
CHOSEN = "chosen = jax.lax.dynamic_slice(pages, (row, i * per_chunk), (1, per_chunk))[0]"
KEYS_WRITTEN = "cache = kv_write(cache, batch.slots, k, v, layout)"

HEADS = (
    split(
        "groups_past_eight_heads_begin_again",
        "heads",
        QK,
        QK.replace("q, k", "q[:, :, jnp.arange(q.shape[2]) % 8], k"),
    ),
    split(
        "values_of_four_heads",
        "heads",
        MASKED_V,
        "v = jnp.where(visible[:, :, None, None], v, 0)[:, :, jnp.arange(v.shape[2]) % 4]",
    ),
    split(
        "last_of_odd_heads_reads_the_one_before",
        "heads",
        QK,
        QK.replace(
            "q, k",
            "q, k[:, :, jnp.minimum(jnp.arange(k.shape[2]), max(1, k.shape[2] // 2 * 2) - 1)]",
        ),
    ),
    _blocks(
        "heads_of_a_group_after_whole_fours_are_zeros",
        "heads",
        SHAPED,
        "out = jnp.where(jnp.arange(spec.group)[:, None, None] < max(4, spec.group // 4 * 4), "
        "out, 0).transpose(2, 0, 1, 3).reshape(tokens, spec.num_q_heads, spec.v_dim)",
    ),
    _blocks(
        "groups_of_no_power_of_two_have_other_slopes",
        "heads",
        "{name: x.reshape(spec.num_kv_heads, spec.group) for name, x in inputs.items()}",
        "{name: x[(jnp.arange(spec.num_kv_heads)[:, None] * "
        "(1 << (spec.group - 1).bit_length()) + jnp.arange(spec.group)).clip(0, len(x) - 1)] "
        "for name, x in inputs.items()}",
    ),
    _blocks(
        "log_sum_exp_of_the_last_head_is_its_neighbours",
        "heads",
        "return out.astype(q.dtype), lse.transpose(2, 0, 1).reshape(tokens, spec.num_q_heads)",
        "return out.astype(q.dtype), lse.transpose(2, 0, 1).reshape(tokens, spec.num_q_heads)"
        "[:, jnp.minimum(jnp.arange(spec.num_q_heads), max(spec.num_q_heads - 2, 0))]",
    ),
    plain(
        "attention",
        "attention_decode",
        "sinks_by_group_first",
        "heads",
        "{name: x.reshape(heads, group) for name, x in inputs.items()}",
        "{n: x.reshape(group, heads).T if n == 'sinks' else x.reshape(heads, group) "
        "for n, x in inputs.items()}",
    ),
    plain(
        "attention",
        "attention_decode",
        "slopes_of_the_first_heads",
        "heads",
        "{name: x.reshape(heads, group) for name, x in inputs.items()}",
        "{n: x[:group].reshape(1, group) if n == 'slopes' else x.reshape(heads, group) "
        "for n, x in inputs.items()}",
    ),
)

SIZES = (
    _blocks(
        "pages_of_eight_bits",
        "size",
        CHOSEN,
        CHOSEN.replace("pages,", "pages.astype(jnp.uint8).astype(jnp.int32),"),
    ),
    split(
        "slots_of_sixteen_bits",
        "size",
        "k, v = layout.read_tokens(cache, slots.reshape(-1))",
        "k, v = layout.read_tokens(cache, slots.reshape(-1).astype(jnp.uint16).astype(jnp.int32))",
    ),
    split(
        "a_row_has_64_pages_at_most",
        "size",
        "pages = jnp.minimum(positions // layout.page_size, batch.bucket.pages_per_seq - 1)",
        "pages = jnp.minimum(positions // layout.page_size, min(batch.bucket.pages_per_seq, 64) "
        "- 1)",
    ),
    split(
        "sees_4096_keys_at_most",
        "size",
        "return Tokens(row, first, jnp.where(real, end, 0), real)",
        "return Tokens(row, first, jnp.where(real, jnp.minimum(end, 4096), 0), real)",
    ),
    split(
        "pages_are_powers_of_two",
        "size",
        "* layout.page_size + positions % layout.page_size",
        "* layout.page_size + (positions & (layout.page_size - 1))",
    ),
    split(
        "four_splits_at_most",
        "split",
        "for split in range(config.splits)",
        "for split in range(min(config.splits, 4))",
    ),
    split(
        "blocks_of_32_keys",
        "split",
        "return add_block(part, q, k, v, i * config.block_kv, tokens, spec), (keys, values)",
        "return add_block(part, q, k, v, i * 32, tokens, spec), (keys, values)",
    ),
    _blocks(
        "queries_past_128_of_a_block_begin_again",
        "size",
        "positions = first + jnp.tile(jnp.arange(size), group)",
        "positions = first + jnp.tile(jnp.arange(size) % 128, group)",
    ),
    _blocks(
        "lengths_of_the_first_64_rows",
        "size",
        "kv_len = batch.kv_lens[row]",
        "kv_len = batch.kv_lens[row % 64]",
    ),
    _blocks(
        "a_key_after_whole_chunks_has_no_chunk",
        "border",
        "begin // source.size, -(-end // source.size), add, empty_partial(block, spec.v_dim)",
        "begin // source.size, jnp.maximum(1, (end + source.size - 2) // source.size), add, "
        "empty_partial(block, spec.v_dim)",
    ),
    plain(
        "attention",
        "attention_decode",
        "sees_the_last_4096_keys",
        "size",
        "visible = visible_keys(jnp.arange(k.shape[2]), kv_lens - 1, kv_lens, spec)",
        "visible = visible_keys(jnp.arange(k.shape[2]), kv_lens - 1, kv_lens, spec) & "
        "(jnp.arange(k.shape[2]) >= kv_lens - 4096)",
    ),
)

FLAGS = (
    plain(
        "attention",
        "softmax",
        "no_window_with_a_softcap",
        "feature",
        "if spec.window is not None:",
        "if spec.window is not None and spec.softcap is None:",
    ),
    plain(
        "attention",
        "softmax",
        "no_slopes_with_a_softcap",
        "feature",
        'if "slopes" in inputs:',
        'if "slopes" in inputs and not spec.softcap:',
    ),
    plain(
        "attention",
        "attention_decode",
        "slopes_count_from_the_first_key",
        "feature",
        "away = jnp.arange(k.shape[2]) - (kv_lens - 1)",
        "away = jnp.arange(k.shape[2])",
    ),
    _blocks(
        "slopes_count_from_the_first_query",
        "feature",
        "away = keys[None] - positions[:, None]",
        "away = keys[None] - first",
    ),
    split(
        "no_sinks_with_a_window",
        "feature",
        "out, lse = finish(merged, sinks, spec)",
        "out, lse = finish(merged, sinks if spec.window is None else None, spec)",
    ),
    split(
        "log_sum_exp_without_the_sink",
        "feature",
        "return part.weighted / total[..., None], part.maximum + jnp.log(total)",
        "return part.weighted / total[..., None], part.maximum + jnp.log(total - (0 if sinks is "
        "None else jnp.exp(sink - part.maximum)))",
    ),
    _blocks(
        "shared_layers_end_a_key_early_at_a_chunk",
        "feature",
        "end = jnp.minimum(kv_len, first + count) if spec.causal else kv_len",
        "end = jnp.minimum(kv_len, first + count) - (1 if spec.kv_shared else 0) "
        "if spec.causal else kv_len",
    ),
    _blocks(
        "a_window_across_chunks_begins_at_its_chunk",
        "mask",
        "own = (keys >= i * source.size) & (keys < kv_len)",
        "own = (keys >= i * source.size) & (keys < kv_len) & (True if spec.window is None else "
        "i >= (first - spec.window + source.size) // source.size)",
    ),
    _blocks(
        "latent_values_are_the_last_columns",
        "feature",
        "return take(k), take(v), i * size",
        "return take(k), take(k[..., -v.shape[-1] :] if v.shape[-1] < k.shape[-1] else v), "
        "i * size",
    ),
)

ROWS = (
    _blocks(
        "live_rows_come_first",
        "border",
        'row = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)',
        'row = jnp.searchsorted(ends, i, side="right").astype(jnp.int32) if size > 2 else i',
    ),
    _blocks(
        "rows_that_share_a_page_share_their_table",
        "feature",
        TABLE,
        TABLE.replace(
            "batch.page_table",
            "batch.page_table[jnp.argmax((batch.page_table[:, :1] == batch.page_table[:, 0]) & "
            "(batch.kv_lens[:, None] > 0), axis=0)]",
        ),
    ),
    _blocks(
        "pages_that_a_row_no_longer_keeps_take_no_place",
        "feature",
        TABLE,
        TABLE.replace(
            "batch.page_table",
            "jnp.take_along_axis(batch.page_table, jnp.argsort(batch.page_table == 0, axis=1, "
            "stable=True), axis=1)",
        ),
    ),
    plain(
        "attention",
        "attention",
        "padding_goes_behind_the_last_token",
        "write",
        KEYS_WRITTEN,
        KEYS_WRITTEN.replace(
            "batch.slots",
            "jax.numpy.where(batch.slots < 0, batch.slots.max() + 1, batch.slots)",
        ),
    ),
    plain(
        "attention",
        "attention",
        "last_place_of_a_full_context_is_not_written",
        "write",
        KEYS_WRITTEN,
        KEYS_WRITTEN.replace(
            "batch.slots",
            "jax.numpy.where(batch.positions == batch.bucket.max_kv_len - 1, -1, batch.slots)",
        ),
    ),
    plain(
        "kv_write",
        "kv_write",
        "last_place_of_a_page_reaches_the_next",
        "write",
        "return layout.write(cache, slots, k, v)",
        "return layout.write(layout.write(cache, jnp.where(slots % layout.page_size == "
        "layout.page_size - 1, slots + 1, -1), k, v), slots, k, v)",
    ),
    plain(
        "rope_kv_write",
        "rope_kv_write",
        "a_token_at_position_0_is_padding",
        "write",
        "cache = kv_write(cache, slots, rope(k, positions, spec=spec), v, layout=layout)",
        "cache = kv_write(cache, (positions > 0) * (slots + 1) - 1, rope(k, positions, "
        "spec=spec), v, layout=layout)",
    ),
    plain(
        "rope_kv_write",
        "rope_kv_write",
        "keys_turn_by_the_factor_of_no_scaling",
        "scale",
        "cache = kv_write(cache, slots, rope(k, positions, spec=spec), v, layout=layout)",
        "cache = kv_write(cache, slots, rope(k, positions, spec=__import__('dataclasses')"
        ".replace(spec, attention_factor=1.0)), v, layout=layout)",
    ),
)

FAULTS = (*HEADS, *SIZES, *FLAGS, *ROWS)
