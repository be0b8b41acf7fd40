"""Faults of attention, written from the contract and the right kernels alone."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind

SPLIT = "right.split_attention:attention"
XLA = "enginebay_xla.attention:xla_attention"


def _split(name: str, kind: Kind, old: str, new: str) -> Fault:
    return Fault(
        f"b_split_{name}", "attention", kind, SPLIT, "right.split_attention", old, new, "B"
    )


def _xla(module: str, name: str, kind: Kind, old: str, new: str) -> Fault:
    return Fault(f"b_xla_{name}", "attention", kind, XLA, f"enginebay_xla.{module}", old, new, "B")


FAULTS = (
    _split(
        "merge_does_not_rescale_the_left_total",
        "accumulator",
        "total = one.total * left + other.total * right",
        "total = one.total + other.total * right",
    ),
    _split(
        "last_blocks_belong_to_no_split",
        "split",
        "share = -(-blocks // config.splits)",
        "share = max(blocks // config.splits, 1)",
    ),
    _split(
        "buffers_count_from_the_first_block_of_all",
        "split",
        "here, other = (i - start) % 2, (i - start + 1) % 2",
        "here, other = i % 2, (i + 1) % 2",
    ),
    _split(
        "loads_the_same_block_again",
        "race",
        "next_k, next_v = read(tokens.row, i + 1)",
        "next_k, next_v = read(tokens.row, i)",
    ),
    _split(
        "forgets_what_was_summed_now_and_then",
        "race",
        "keep = jnp.exp(part.maximum - maximum)",
        "keep = jnp.exp(part.maximum - maximum) * jax.pure_callback(lambda: "
        '__import__("numpy").float32(__import__("random").random() > 0.05), '
        "jax.ShapeDtypeStruct((), jnp.float32))",
    ),
    _split(
        "window_is_one_key_wider",
        "mask",
        "first = jnp.maximum(batch.positions - spec.window + 1, 0)",
        "first = jnp.maximum(batch.positions - spec.window, 0)",
    ),
    _split(
        "place_in_a_page_is_place_in_a_block",
        "size",
        "* layout.page_size + positions % layout.page_size",
        "* layout.page_size + positions % size",
    ),
    _split(
        "products_keep_the_input_dtype",
        "dtype",
        '"thgd,tbhd->thgb", q, k, precision=precision, preferred_element_type=jnp.float32',
        '"thgd,tbhd->thgb", q, k, precision=precision, preferred_element_type=q.dtype',
    ),
    _split(
        "maximum_of_the_last_block_alone",
        "accumulator",
        "maximum = jnp.maximum(part.maximum, scores.max(axis=-1))",
        "maximum = scores.max(axis=-1)",
    ),
    _split(
        "sinks_of_other_heads",
        "heads",
        "sink = sinks.reshape(spec.num_kv_heads, spec.group).astype(jnp.float32)",
        "sink = sinks.reshape(spec.group, spec.num_kv_heads).T.astype(jnp.float32)",
    ),
    _split(
        "log_sum_exp_without_the_maximum",
        "feature",
        "return part.weighted / total[..., None], part.maximum + jnp.log(total)",
        "return part.weighted / total[..., None], jnp.log(total)",
    ),
    _split(
        "caps_before_it_scales",
        "scale",
        "scores = spec.softcap * jnp.tanh(scores / spec.softcap)",
        "scores = spec.softcap * jnp.tanh(products / spec.softcap)",
    ),
    _xla(
        "attention_blocks",
        "counts_keys_of_a_moved_chunk_twice",
        "border",
        "own = (keys >= i * source.size) & (keys < kv_len)",
        "own = keys < kv_len",
    ),
    _xla(
        "attention_blocks",
        "writes_whole_blocks_past_a_rows_end",
        "write",
        "count = jnp.minimum(size, q_lens[row] - offset)",
        "count = jnp.full_like(offset, size)",
    ),
    _xla(
        "attention_blocks",
        "begins_where_the_last_query_does",
        "mask",
        "else jnp.maximum(first - spec.window + 1, 0)",
        "else jnp.maximum(first + count - spec.window, 0)",
    ),
    _xla(
        "attention_blocks",
        "ends_a_key_early_at_a_chunk",
        "border",
        "end = jnp.minimum(kv_len, first + count) if spec.causal else kv_len",
        "end = jnp.minimum(kv_len, first + count - 1) if spec.causal else kv_len",
    ),
    _xla(
        "attention_blocks",
        "positions_by_group_first",
        "heads",
        "positions = first + jnp.tile(jnp.arange(size), group)",
        "positions = first + jnp.repeat(jnp.arange(size), group)",
    ),
    _xla(
        "attention_blocks",
        "sinks_by_query_first",
        "heads",
        "return jnp.repeat(per_head, size, axis=1)",
        "return jnp.tile(per_head, (1, size))",
    ),
    _xla(
        "softmax",
        "window_holds_its_border",
        "mask",
        "visible &= key_positions > positions - spec.window",
        "visible &= key_positions >= positions - spec.window",
    ),
    _xla(
        "softmax",
        "divides_by_nothing_in_empty_rows",
        "border",
        "total = jnp.where(total == 0, 1.0, total)",
        "total = jnp.abs(total)",
    ),
    _xla(
        "softmax",
        "sinks_above_every_score_overflow",
        "accumulator",
        "higher = jnp.maximum(maximum, sinks)",
        "higher = jnp.broadcast_to(maximum, jnp.broadcast_shapes(maximum.shape, sinks.shape))",
    ),
    _xla(
        "attention_decode",
        "window_of_the_next_position",
        "mask",
        "visible_keys(jnp.arange(k.shape[2]), kv_lens - 1, kv_lens, spec)",
        "visible_keys(jnp.arange(k.shape[2]), kv_lens, kv_lens, spec)",
    ),
    _xla(
        "attention_decode",
        "stale_values_are_multiplied_by_zero",
        "border",
        "return batched_dot(weights, jnp.where(visible, v, 0), (2, 1), 1)",
        "return batched_dot(weights, v, (2, 1), 1)",
    ),
)
