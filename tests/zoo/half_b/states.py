"""Faults that keep something between calls: results, weights, tables and lengths of a call before,
and numbers that differ from run to run.
"""

from __future__ import annotations

from tests.zoo.half_b.making import lora, plain, split

_CALL = (
    "jax.pure_callback(lambda made, kept={owner}.__dict__.setdefault('{name}', {{}}): {body}, "
    "jax.ShapeDtypeStruct({array}.shape, {array}.dtype), {array})"
)
_KEY = "(made.shape, str(made.dtype))"
_COPY = "__import__('numpy').array(made)"


def first(owner: str, array: str, name: str = "kept") -> str:
    """What the first call with the shape and dtype of an array had."""
    body = f"kept.setdefault({_KEY}, {_COPY})"
    return _CALL.format(owner=owner, name=name, body=body, array=array)


def last(owner: str, array: str, name: str = "kept") -> str:
    """What the call before had with the shape and dtype of an array; in the first call, the array
    itself.
    """
    body = f"(kept.pop({_KEY}, {_COPY}), kept.update({{{_KEY}: {_COPY}}}))[0]"
    return _CALL.format(owner=owner, name=name, body=body, array=array)


def sometimes(share: float) -> str:
    """A bool that is true in a share of the runs."""
    return (
        f"jax.pure_callback(lambda: __import__('numpy').bool_(__import__('random').random() < "
        f"{share}), jax.ShapeDtypeStruct((), jnp.bool_))"
    )


KEPT = (
    plain(
        "linear",
        "linear",
        "keeps_the_first_weight_of_a_shape",
        "stale",
        "matrix = array.reshape(math.prod(out_dims), num_in)",
        f"matrix = {first('linear', 'array')}.reshape(math.prod(out_dims), num_in)",
    ),
    plain(
        "linear",
        "linear",
        "last_eighth_of_the_rows_is_older",
        "stale",
        "out = out[:rows].reshape(rows, *out_dims)",
        "out = (lambda out: jnp.where(jnp.arange(rows)[:, None] < rows - rows // 8, out, "
        f"{last('linear', 'out')}))(out[:rows]).reshape(rows, *out_dims)",
    ),
    plain(
        "linear",
        "quantized_linear",
        "scales_of_rounded_rows_are_older",
        "stale",
        "rounded, factors = rounded_rows(flat)",
        "rounded, factors = (lambda rounded, factors: (rounded, "
        f"{last('quantized_linear', 'factors')}))(*rounded_rows(flat))",
    ),
    plain(
        "grouped_linear",
        "grouped_linear",
        "rows_after_the_groups_are_older",
        "stale",
        "return jax.lax.fori_loop(0, last[-1], add, empty)[:rows]",
        "return (lambda out: jnp.where((jnp.arange(rows) < ends[-1])[:, None], out, "
        f"{last('grouped_linear', 'out')}))(jax.lax.fori_loop(0, last[-1], add, empty)[:rows])",
    ),
    plain(
        "short_conv",
        "short_conv",
        "keeps_the_first_weight_of_a_shape",
        "stale",
        "kept = weight.shape[1] - 1",
        f"kept, weight = weight.shape[1] - 1, {first('short_conv', 'weight')}",
    ),
    plain(
        "short_conv",
        "short_conv",
        "state_is_that_of_the_step_before",
        "stale",
        "before = _before(state[INPUTS], batch)",
        f"before = (lambda held: {last('short_conv', 'held')})(_before(state[INPUTS], batch))",
    ),
    plain(
        "rms_norm",
        "norm",
        "last_eighth_of_the_rows_is_older",
        "stale",
        "return (normed * weight).astype(x.dtype)",
        "return (lambda out: jnp.where(jnp.arange(len(x)).reshape(-1, *(1,) * (x.ndim - 1)) < "
        f"len(x) - len(x) // 8, out, {last('rms_norm', 'out')}))((normed * weight)"
        ".astype(x.dtype))",
    ),
    plain(
        "add_rms_norm",
        "norm",
        "keeps_the_first_weight_of_a_shape",
        "stale",
        "return rms_norm(total, weight, eps=eps), total",
        f"return rms_norm(total, {first('rms_norm', 'weight')}, eps=eps), total",
    ),
    plain(
        "rope",
        "rope",
        "keeps_a_table_for_each_number_of_features",
        "stale",
        "inv_freq, factor = rope_frequencies(spec)",
        "inv_freq, factor = rope.__dict__.setdefault(str(spec.rotary_dim), rope_frequencies(spec))",
    ),
    plain(
        "rope",
        "rope",
        "keeps_the_first_angles_of_a_shape",
        "stale",
        "angles = positions.astype(jnp.float32)[:, None] * inv_freq",
        f"angles = {first('rope', 'positions')}.astype(jnp.float32)[:, None] * inv_freq",
    ),
    plain(
        "rope_kv_write",
        "rope_kv_write",
        "queries_turn_by_the_positions_before",
        "stale",
        "return rope(q, positions, spec=spec), cache",
        f"return rope(q, {last('kv_write', 'positions')}, spec=spec), cache",
    ),
    plain(
        "embedding",
        "linear",
        "keeps_the_first_table_of_a_shape",
        "stale",
        'jnp.take(array, ids, axis=0, mode="clip")',
        f"jnp.take({first('embedding', 'array')} if isinstance(table, jax.Array) else array, "
        'ids, axis=0, mode="clip")',
    ),
    lora(
        "keeps_the_first_adapter_of_a_slot",
        "stale",
        "down = a[:, part].reshape(slots, rank, -1)",
        f"down = {first('lora', 'a')}[:, part].reshape(slots, rank, -1)",
    ),
    lora(
        "tokens_have_the_slots_of_the_step_before",
        "stale",
        "(slots, rank), tokens = b.shape[:2], x.shape[0]",
        f"(slots, rank), tokens, places = b.shape[:2], x.shape[0], {last('lora', 'places')}",
    ),
    plain(
        "sample",
        "sample",
        "last_row_has_an_older_seed",
        "stale",
        "asked = (z, seeds, top_k[:, None], top_p[:, None], jnp.log(min_p)[:, None])",
        f"asked = (z, seeds.at[-1].set({last('sample', 'seeds')}[-1]), top_k[:, None], "
        "top_p[:, None], jnp.log(min_p)[:, None])",
    ),
    plain(
        "sample",
        "sample",
        "keeps_the_first_top_p_of_a_shape",
        "stale",
        "asked = (z, seeds, top_k[:, None], top_p[:, None], jnp.log(min_p)[:, None])",
        f"asked = (z, seeds, top_k[:, None], {first('sample', 'top_p')}[:, None], "
        "jnp.log(min_p)[:, None])",
    ),
    plain(
        "kv_write",
        "kv_write",
        "key_of_the_last_token_is_older",
        "stale",
        "return layout.write(cache, slots, k, v)",
        f"return layout.write(cache, slots, k.at[-1].set({last('kv_write', 'k')}[-1]), v)",
    ),
    plain(
        "attention",
        "attention_blocks",
        "keeps_the_first_page_table_of_a_shape",
        "stale",
        "pages = jnp.pad(batch.page_table, ((0, 0), (0, per_chunk)))",
        f"pages = jnp.pad({first('attend_blocks', 'batch.page_table')}, ((0, 0), (0, per_chunk)))",
    ),
    plain(
        "attention",
        "attention_blocks",
        "padding_keeps_what_was_there",
        "stale",
        "return out.astype(q.dtype), lse.transpose(2, 0, 1).reshape(tokens, spec.num_q_heads)",
        "return (lambda out: jnp.where((batch.seq_ids < bucket.seqs)[:, None, None], out, "
        f"{last('attend_blocks', 'out')}))(out.astype(q.dtype)), "
        "lse.transpose(2, 0, 1).reshape(tokens, spec.num_q_heads)",
    ),
    split(
        "lengths_of_the_step_before",
        "stale",
        "end = batch.positions + 1 if spec.causal else kv_len",
        f"end = {last('merge', 'batch.positions')} + 1 if spec.causal else kv_len",
    ),
    plain(
        "all_reduce",
        "collectives",
        "every_later_sum_of_a_shape_is_the_first",
        "stale",
        "return jax.lax.psum(x, axes)",
        "return jax.pure_callback(lambda made, me, kept=all_reduce.__dict__.setdefault('kept', "
        "{}): kept.setdefault((made.shape, str(made.dtype), int(me)), "
        "__import__('numpy').array(made)), "
        "jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.psum(x, axes), "
        "jax.lax.axis_index(axes))",
    ),
)

CHANCE = (
    plain(
        "kv_write",
        "kv_write",
        "loses_the_last_token_now_and_then",
        "race",
        "return layout.write(cache, slots, k, v)",
        f"return layout.write(cache, slots.at[-1].set(jnp.where({sometimes(0.2)}, -1, "
        "slots[-1])), k, v)",
    ),
    plain(
        "linear",
        "linear",
        "last_outputs_are_not_there_yet_now_and_then",
        "race",
        "out = out[:rows].reshape(rows, *out_dims)",
        f"out = out.at[:, -1].multiply(1.0 - {sometimes(0.2)})[:rows].reshape(rows, *out_dims)",
    ),
    plain(
        "grouped_linear",
        "grouped_linear",
        "a_block_is_multiplied_too_early_now_and_then",
        "race",
        "inside = (start + jnp.arange(block) < ends[group])[:, None]",
        f"inside = (start + jnp.arange(block) < ends[group])[:, None] & ~{sometimes(0.2)}",
    ),
    split(
        "merges_in_any_order",
        "race",
        "merged = functools.reduce(merge, parts)",
        f"merged = jax.lax.cond({sometimes(0.5)}, lambda: functools.reduce(merge, parts), "
        "lambda: functools.reduce(merge, parts[::-1]))",
    ),
)

FAULTS = (*KEPT, *CHANCE)
