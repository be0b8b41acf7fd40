"""Faults of the op sample: the order of its filters, equal tokens at a border, large vocabularies,
and rows that reach their neighbours.
"""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind
from tests.zoo.half_b.making import plain


def _sample(name: str, kind: Kind, old: str, new: str) -> Fault:
    return plain("sample", "sample", name, kind, old, new)


IN_TOP_P = "in_top_p = (rows.top_p >= 1.0) | (before < rows.top_p * total) | (jnp.arange(num) == 0)"
TOTAL = (
    "total = jnp.where(cut, jnp.where(in_top_k, mass, 0.0).sum(axis=-1, keepdims=True), rows.total)"
)
ASKED = "asked = (z, seeds, top_k[:, None], top_p[:, None], jnp.log(min_p)[:, None])"
DRAWN = "drawn = jnp.argmax(jnp.where(kept, z + gumbel_noise(rows.seeds, ids), -jnp.inf), axis=-1)"
NOISE = "noise = gumbel_noise(rows.seeds, jnp.arange(vocab, dtype=jnp.int32)[None])"

FAULTS = (
    _sample(
        "top_p_of_what_min_p_keeps",
        "feature",
        TOTAL,
        "total = jnp.where(in_top_k & (z >= rows.min_z), mass, 0.0).sum(axis=-1, keepdims=True)",
    ),
    _sample(
        "min_p_of_the_whole_mass",
        "scale",
        "kept = in_top_k & in_top_p & (z >= rows.min_z)",
        "kept = in_top_k & in_top_p & (mass >= jnp.exp(rows.min_z) * rows.total)",
    ),
    _sample(
        "top_k_drops_what_is_equal",
        "border",
        "in_top_k = ~cut | (z >= kth)",
        "in_top_k = ~cut | (jnp.arange(num) < rows.top_k)",
    ),
    _sample(
        "top_p_takes_all_equals_of_the_border",
        "border",
        IN_TOP_P,
        "in_top_p = (rows.top_p >= 1.0) | (z >= jnp.where(before < rows.top_p * total, z, "
        "jnp.inf).min(axis=-1, keepdims=True))",
    ),
    _sample(
        "top_p_of_the_whole_mass_past_256_tokens",
        "accumulator",
        "wanted = rows.top_p * down_to(kth, mass)",
        "wanted = rows.top_p * rows.total",
    ),
    _sample(
        "equals_past_256_tokens_are_forgotten",
        "size",
        "known = ~cut | ((rows.top_k <= num) & (z[:, -1:] < kth))",
        "known = ~cut | (rows.top_k <= num)",
    ),
    _sample(
        "draws_among_256_tokens_alone",
        "size",
        "settled = best | (known & ~kept[:, -1:]) if num < vocab else jnp.ones_like(known)",
        "settled = best | known",
    ),
    _sample(
        "all_but_one_token_is_all",
        "border",
        "cut = rows.top_k < vocab",
        "cut = rows.top_k < vocab - 1",
    ),
    _sample(
        "no_filter_where_a_neighbour_has_none",
        "feature",
        "return first_best(lax.cond(jnp.any(cut), cut_scores, lambda: scores))",
        "return first_best(lax.cond(jnp.all(cut), cut_scores, lambda: scores))",
    ),
    _sample(
        "top_p_is_at_most_that_of_the_first_row",
        "feature",
        "rows = _Rows(z, seeds, jnp.exp(z).sum(axis=-1, keepdims=True), top_k, top_p, min_z)",
        "rows = _Rows(z, seeds, jnp.exp(z).sum(axis=-1, keepdims=True), top_k, "
        "jnp.minimum(top_p, top_p[:1]), min_z)",
    ),
    _sample(
        "noise_of_the_place_among_the_best",
        "feature",
        DRAWN,
        "drawn = jnp.argmax(jnp.where(kept, z + gumbel_noise(rows.seeds, "
        "jnp.arange(num)[None]), -jnp.inf), axis=-1)",
    ),
    _sample(
        "noise_of_ids_of_sixteen_bits",
        "size",
        DRAWN,
        "drawn = jnp.argmax(jnp.where(kept, z + gumbel_noise(rows.seeds, "
        "ids.astype(jnp.uint16)), -jnp.inf), axis=-1)",
    ),
    _sample(
        "noise_repeats_after_65536_tokens",
        "size",
        NOISE,
        "noise = gumbel_noise(rows.seeds, jnp.arange(vocab, dtype=jnp.int32)[None] % 65536)",
    ),
    _sample(
        "candidates_of_the_first_32768_tokens",
        "size",
        "z, ids = (lax.optimization_barrier(part) for part in lax.top_k(rows.z, num))",
        "z, ids = (lax.optimization_barrier(part) for part in lax.top_k(rows.z[:, :32768], num))",
    ),
    _sample(
        "seeds_of_64_rows",
        "size",
        ASKED,
        ASKED.replace("seeds,", "seeds[jnp.arange(z.shape[0]) % 64],"),
    ),
    _sample(
        "greedy_rows_take_the_last_of_equals",
        "border",
        "best = first_best(asked[0])",
        "best = asked[0].shape[1] - 1 - first_best(asked[0][:, ::-1])",
    ),
    _sample(
        "sums_the_mass_in_sixteen_bits",
        "accumulator",
        "before = jnp.cumsum(mass, axis=-1) - mass",
        "before = jnp.cumsum(mass, axis=-1).astype(jnp.bfloat16).astype(jnp.float32) - mass",
    ),
    _sample(
        "adds_the_noise_in_sixteen_bits",
        "dtype",
        DRAWN,
        "drawn = jnp.argmax(jnp.where(kept, (z + gumbel_noise(rows.seeds, ids))"
        ".astype(jnp.bfloat16), -jnp.inf), axis=-1)",
    ),
)
