"""Faults of attention in the plain JAX kernel that every platform has."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _xla(name: str, kind: Kind, module: str, old: str, new: str) -> Fault:
    kernel = "enginebay_xla.attention:xla_attention"
    return Fault(
        f"attention_{name}", "attention", kind, kernel, f"enginebay_xla.{module}", old, new
    )


FAULTS = (
    _xla(
        "blocks_chunk_moved_back_counts_twice",
        "border",
        "attention_blocks",
        "own = (keys >= i * source.size) & (keys < kv_len)",
        "own = keys < kv_len",
    ),
    _xla(
        "blocks_end_rounded_down",
        "border",
        "attention_blocks",
        "begin // source.size, -(-end // source.size), add",
        "begin // source.size, jnp.maximum(end // source.size, 1), add",
    ),
    _xla(
        "blocks_begin_one_chunk_late",
        "mask",
        "attention_blocks",
        "begin // source.size, -(-end",
        "-(-begin // source.size), -(-end",
    ),
    _xla(
        "blocks_count_of_the_first_block",
        "border",
        "attention_blocks",
        "count = jnp.minimum(size, q_lens[row] - offset)",
        "count = jnp.minimum(size, q_lens[row])",
    ),
    _xla(
        "blocks_first_without_the_offset",
        "mask",
        "attention_blocks",
        "first = batch.kv_lens[row] - q_lens[row] + offset",
        "first = batch.kv_lens[row] - q_lens[row]",
    ),
    _xla(
        "blocks_positions_repeat_not_tile",
        "heads",
        "attention_blocks",
        "jnp.tile(jnp.arange(size), group)",
        "jnp.repeat(jnp.arange(size), group)",
    ),
    _xla(
        "blocks_sinks_tile_not_repeat",
        "heads",
        "attention_blocks",
        "jnp.repeat(per_head, size, axis=1)",
        "jnp.tile(per_head, (1, size))",
    ),
    _xla(
        "blocks_fresh_keys_of_the_whole_step",
        "border",
        "attention_blocks",
        "start = batch.cu_q_lens[row] + i * size",
        "start = i * size",
    ),
    _xla(
        "blocks_single_tokens_left_out",
        "size",
        "attention_blocks",
        "sizes = {one_token: batch.q_lens == 1, largest: batch.q_lens > 1}",
        "sizes = {largest: batch.q_lens > 1}",
    ),
    _xla(
        "blocks_not_causal_ends_at_the_block",
        "mask",
        "attention_blocks",
        "end = jnp.minimum(kv_len, first + count) if spec.causal else kv_len",
        "end = jnp.minimum(kv_len, first + count)",
    ),
    _xla(
        "decode_ragged_padding_row",
        "border",
        "attention_decode",
        "visible_keys(jnp.arange(k.shape[2]), kv_lens - 1, kv_lens, spec)",
        "visible_keys(jnp.arange(k.shape[2]), kv_lens, kv_lens + 1, spec)",
    ),
    _xla(
        "softmax_window_inclusive",
        "mask",
        "softmax",
        "visible &= key_positions > positions - spec.window",
        "visible &= key_positions >= positions - spec.window",
    ),
    _xla(
        "softmax_values_rounded_twice",
        "accumulator",
        "softmax",
        "state.weighted * keep[..., None] + values",
        "state.weighted * keep[..., None].astype(v.dtype) + values",
    ),
    _xla(
        "softmax_sink_forgets_the_values",
        "feature",
        "softmax",
        "            weighted * keep[..., None],",
        "            weighted,",
    ),
    _xla(
        "heads_split_the_wrong_way",
        "heads",
        "attention_blocks",
        "heads = jnp.pad(heads.transpose(1, 2, 0, 3)",
        "heads = jnp.pad(heads[:, ::-1].transpose(1, 2, 0, 3)",
    ),
    _xla(
        "latent_values_a_column_off_in_chunks",
        "size",
        "attention_blocks",
        "scores, jnp.where(own[None, :, None], v, 0))",
        "scores, jnp.where(own[None, :, None], jnp.roll(v, int(spec.v_is_k_prefix), -1), 0))",
    ),
    _xla(
        "latent_values_begin_a_column_late",
        "size",
        "attention_decode",
        "out = out[..., : spec.v_dim]",
        "out = jnp.roll(out, -1, axis=-1)[..., : spec.v_dim] if spec.v_is_k_prefix else out",
    ),
    _xla(
        "latent_scale_of_the_values_width",
        "scale",
        "softmax",
        "scores = products * spec.softmax_scale",
        "scores = products * (spec.scale or spec.v_dim**-0.5)",
    ),
    _xla(
        "blocks_slopes_grow_with_distance",
        "feature",
        "attention_blocks",
        "away = keys[None] - positions[:, None]",
        "away = positions[:, None] - keys[None]",
    ),
    _xla(
        "decode_slopes_of_other_heads",
        "heads",
        "attention_decode",
        "{name: x.reshape(heads, group) for name, x in inputs.items()}",
        "{n: x.reshape(group, heads).T if n == 'slopes' else x.reshape(heads, group) "
        "for n, x in inputs.items()}",
    ),
    _xla(
        "decode_slopes_from_one_place_on",
        "feature",
        "attention_decode",
        "away = jnp.arange(k.shape[2]) - (kv_lens - 1)",
        "away = jnp.arange(k.shape[2]) - kv_lens",
    ),
)
