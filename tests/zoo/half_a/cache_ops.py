"""Faults of embedding, of the ops that write the cache, and of sample, in the plain JAX kernels."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _fault(
    op: str, name: str, kind: Kind, module: str, old: str, new: str, attribute: str = ""
) -> Fault:
    kernel = f"enginebay_xla.{module}:{attribute or op}"
    return Fault(f"{op}_{name}", op, kind, kernel, f"enginebay_xla.{module}", old, new)


EMBEDDING = (
    _fault(
        "embedding",
        "one_row_early",
        "border",
        "linear",
        'jnp.take(array, ids, axis=0, mode="clip")',
        'jnp.take(array, ids - 1, axis=0, mode="wrap")',
    ),
    _fault(
        "embedding",
        "by_a_product",
        "dtype",
        "linear",
        'jnp.take(array, ids, axis=0, mode="clip")',
        "jax.nn.one_hot(ids, array.shape[0], dtype=array.dtype) @ array",
    ),
    _fault(
        "embedding",
        "ids_in_eight_bits",
        "dtype",
        "linear",
        'jnp.take(array, ids, axis=0, mode="clip")',
        'jnp.take(array, ids.astype(jnp.uint8), axis=0, mode="clip")',
    ),
    _fault(
        "embedding",
        "cleans_what_is_not_finite",
        "write",
        "linear",
        'jnp.take(array, ids, axis=0, mode="clip")',
        'jnp.nan_to_num(jnp.take(array, ids, axis=0, mode="clip"))',
    ),
    _fault(
        "embedding",
        "last_row_out_of_reach",
        "border",
        "linear",
        'jnp.take(array, ids, axis=0, mode="clip")',
        'jnp.take(array, jnp.minimum(ids, max(array.shape[0] - 2, 0)), axis=0, mode="clip")',
    ),
)

WRITE = "return layout.write(cache, slots, k, v)"

KV_WRITE = (
    _fault(
        "kv_write",
        "dropped_tokens_go_to_slot_0",
        "border",
        "kv_write",
        WRITE,
        "return layout.write(cache, jnp.maximum(slots, 0), k, v)",
    ),
    _fault(
        "kv_write",
        "dropped_tokens_go_to_the_end",
        "border",
        "kv_write",
        WRITE,
        "return layout.write(cache, jnp.where(slots < 0, layout.num_pages * layout.page_size - 1, "
        "slots), k, v)",
    ),
    _fault(
        "kv_write",
        "swaps_keys_and_values",
        "write",
        "kv_write",
        WRITE,
        "return layout.write(cache, slots, v, k)",
    ),
    _fault(
        "kv_write",
        "last_token_left_out",
        "border",
        "kv_write",
        WRITE,
        "return layout.write(cache, slots[:-1], k[:-1], v[:-1]) if slots.shape[0] > 64 else "
        "layout.write(cache, slots, k, v)",
    ),
    _fault(
        "kv_write",
        "clears_the_cache",
        "write",
        "kv_write",
        WRITE,
        "return layout.write(jax.tree.map(jnp.zeros_like, cache), slots, k, v)",
    ),
    _fault(
        "kv_write",
        "assumes_a_run_of_slots",
        "write",
        "kv_write",
        WRITE,
        "return layout.write(cache, jnp.where(slots < 0, -1, slots[0] + "
        "jnp.arange(slots.shape[0])), k, v)",
    ),
    _fault(
        "kv_write",
        "through_bfloat16",
        "dtype",
        "kv_write",
        WRITE,
        "return layout.write(cache, slots, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16))",
    ),
    _fault(
        "kv_write",
        "heads_in_reverse",
        "heads",
        "kv_write",
        WRITE,
        "return layout.write(cache, slots, k[:, ::-1], v[:, ::-1])",
    ),
)

TURNED_WRITE = "cache = kv_write(cache, slots, rope(k, positions, spec=spec), v, layout=layout)"

ROPE_KV_WRITE = (
    _fault(
        "rope_kv_write",
        "writes_keys_as_they_came",
        "write",
        "rope_kv_write",
        TURNED_WRITE,
        "cache = kv_write(cache, slots, k, v, layout)",
    ),
    _fault(
        "rope_kv_write",
        "turns_values_too",
        "write",
        "rope_kv_write",
        TURNED_WRITE,
        "cache = kv_write(cache, slots, rope(k, positions, spec=spec), rope(v, positions, "
        "spec=spec), layout)",
    ),
    _fault(
        "rope_kv_write",
        "turns_by_slots",
        "border",
        "rope_kv_write",
        TURNED_WRITE,
        "cache = kv_write(cache, slots, rope(k, slots, spec=spec), v, layout)",
    ),
    _fault(
        "rope_kv_write",
        "leaves_queries",
        "write",
        "rope_kv_write",
        "return rope(q, positions, spec=spec), cache",
        "return q, cache",
    ),
    _fault(
        "rope_kv_write",
        "writes_dropped_tokens",
        "border",
        "rope_kv_write",
        TURNED_WRITE,
        "cache = kv_write(cache, jnp.abs(slots), rope(k, positions, spec=spec), v, layout)".replace(
            "jnp.abs(slots)", "jax.numpy.abs(slots)"
        ),
    ),
    _fault(
        "rope_kv_write",
        "turns_all_features",
        "size",
        "rope_kv_write",
        "return rope(q, positions, spec=spec), cache",
        "return rope(q, positions, spec=type(spec)(spec.theta, q.shape[-1])), cache",
    ),
)

SAMPLE = (
    _fault(
        "sample",
        "no_noise",
        "feature",
        "sample",
        "noise = gumbel_noise(rows.seeds, jnp.arange(vocab, dtype=jnp.int32)[None])",
        "noise = jnp.zeros_like(rows.z)",
    ),
    _fault(
        "sample",
        "noise_of_the_place_not_the_token",
        "race",
        "sample",
        "z + gumbel_noise(rows.seeds, ids)",
        "z + gumbel_noise(rows.seeds, jnp.arange(num)[None])",
    ),
    _fault(
        "sample",
        "top_k_one_less",
        "border",
        "sample",
        "kth = jnp.take_along_axis(z, jnp.minimum(rows.top_k, num) - 1, axis=-1)",
        "kth = jnp.take_along_axis(z, jnp.maximum(jnp.minimum(rows.top_k, num) - 2, 0), axis=-1)",
    ),
    _fault(
        "sample",
        "top_p_of_all_mass",
        "mask",
        "sample",
        "total = jnp.where(cut, jnp.where(in_top_k, mass, 0.0).sum(axis=-1, keepdims=True), "
        "rows.total)",
        "total = rows.total",
    ),
    _fault(
        "sample",
        "top_p_leaves_out_the_border",
        "border",
        "sample",
        "(before < rows.top_p * total)",
        "(before + mass < rows.top_p * total)",
    ),
    _fault(
        "sample",
        "min_p_of_the_draw",
        "mask",
        "sample",
        "kept = in_top_k & in_top_p & (z >= rows.min_z)",
        "kept = in_top_k & in_top_p & (z > rows.min_z)",
    ),
    _fault(
        "sample",
        "no_min_p_over_the_vocabulary",
        "mask",
        "sample",
        "scores = jnp.where(rows.z >= rows.min_z, rows.z + noise, -jnp.inf)",
        "scores = rows.z + noise",
    ),
    _fault(
        "sample",
        "all_equals_at_the_border",
        "border",
        "sample",
        "return (depth <= border) & ~(at_border & crowded & (earlier >= room))",
        "return depth <= border",
    ),
    _fault(
        "sample",
        "bisection_one_too_deep",
        "border",
        "sample",
        "lambda limit: down_to(limit, count) >= rows.top_k",
        "lambda limit: down_to(limit, count) > rows.top_k",
    ),
    _fault(
        "sample",
        "settled_too_early",
        "size",
        "sample",
        "settled = best | (known & ~kept[:, -1:])",
        "settled = best | known",
    ),
)

FAULTS = (*EMBEDDING, *KV_WRITE, *ROPE_KV_WRITE, *SAMPLE)
