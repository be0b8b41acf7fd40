"""Faults of quantised caches: scales, zero points and codes, as they are written and read."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind, More
from tests.zoo.half_b.making import plain

WRITE = "return layout.write(cache, slots, k, v)"
READ = "k, v = (x.reshape(size, *x.shape[2:]).swapaxes(0, 1) for x in layout.read(cache, chosen))"


def _write(name: str, new: str, kind: Kind | More = "storage") -> Fault:
    return plain("kv_write", "kv_write", name, kind, WRITE, new)


def _scales_from(pair: str, *parts: str, slots: str = "slots", only: str = "True") -> str:
    """The write with scales, or other `parts`, of other keys and values than the codes' own."""
    chosen = " or ".join(f"'{part}' in n" for part in parts or ("scales",))
    return (
        f"return {{n: layout.write(cache, {slots} if {chosen} else slots, *({pair} if "
        f"({chosen}) and {only} else (k, v)))[n] for n in cache}}"
    )


def _inputs(each: str, storage: str) -> str:
    """The write of other values where the cache has a storage: x is keys, then values."""
    return (
        f"return layout.write(cache, slots, *({each} if layout.storage == '{storage}' else x "
        "for x in (k, v)))"
    )


def _read(name: str, part: str, array: str, storage: str | None = None) -> Fault:
    """Reads other arrays: a is the array of `part`."""
    only = f" and layout.storage == '{storage}'" if storage else ""
    held = f"{{n: {array} if n.endswith('{part}'){only} else a for n, a in cache.items()}}"
    new = READ.replace("layout.read(cache, chosen)", f"layout.read({held}, chosen)")
    return plain("attention", "attention_blocks", name, "storage", READ, new)


FAULTS = (
    _write(
        "never_writes_scales",
        "return {n: cache[n] if n.endswith('scales') else x for n, x in "
        "layout.write(cache, slots, k, v).items()}",
    ),
    _write(
        "never_writes_zero_points",
        "return {n: cache[n] if n.endswith('zeros') else x for n, x in "
        "layout.write(cache, slots, k, v).items()}",
    ),
    _write(
        "uint4_takes_scales_of_the_token_before",
        _scales_from(
            "(jnp.roll(k, 1, 0), jnp.roll(v, 1, 0))",
            *("scales", "zeros"),
            only="layout.storage == 'uint4'",
        ),
    ),
    _write(
        "one_scale_for_all_heads",
        _scales_from("(jnp.broadcast_to(x[:, :1], x.shape) for x in (k, v))"),
    ),
    _write(
        "fp8_values_take_the_scales_of_keys",
        _scales_from("(k, k)", only="layout.storage == 'fp8'"),
    ),
    _write(
        "a_used_place_keeps_its_scale",
        "return {n: jnp.where(cache[n] != 0, cache[n], x) if n.endswith('scales') else x "
        "for n, x in layout.write(cache, slots, k, v).items()}",
    ),
    _write(
        "scales_after_the_last_eight_tokens_stay",
        _scales_from(
            "(k, v)",
            slots="jnp.where(jnp.arange(len(slots)) < max(8, len(slots) // 8 * 8), slots, -1)",
        ),
    ),
    _write(
        "scales_past_256_tokens_stay",
        _scales_from("(k, v)", slots="jnp.where(jnp.arange(len(slots)) < 256, slots, -1)"),
    ),
    _write(
        "scales_of_the_last_of_odd_heads_stay",
        "return {n: x.at[:, max(2, layout.num_kv_heads // 2 * 2) :].set(cache[n][:, "
        "max(2, layout.num_kv_heads // 2 * 2) :]) if n in ('k_scales', 'v_scales') else x "
        "for n, x in layout.write(cache, slots, k, v).items()}",
    ),
    _write(
        "int8_rounds_towards_zero",
        _inputs(
            "(lambda x, step: jnp.trunc(x / step * 1.00001) * step)(x.astype(jnp.float32), "
            "jnp.abs(x.astype(jnp.float32)).max(-1, keepdims=True) / 127 + 1e-30)",
            "int8",
        ),
    ),
    _write(
        "int8_clips_what_is_rare",
        _inputs(
            "(lambda x, most: x.clip(-most, most))(x, 4 * jnp.abs(x).mean(-1, keepdims=True))",
            "int8",
        ),
    ),
    _write("fp8_saturates_before_it_scales", _inputs("x.clip(-448, 448)", "fp8")),
    _write(
        "uint4_halves_the_other_way_round",
        "return layout.write(cache, slots, *(jnp.roll(x, x.shape[-1] // 2, -1) if layout.storage "
        "== 'uint4' and layout.name == 'hnd' else x for x in (k, v)))",
    ),
    _write(
        "uint4_value_in_the_low_bits",
        "return {n: layout.write(cache, slots, *((v, k) if n == 'kv' and layout.storage == "
        "'uint4' and not layout.v_prefix_dim else (k, v)))[n] for n in cache}",
    ),
    _write(
        "zero_points_of_eight_bits",
        "return {n: jnp.where(x == cache[n], x, x.clip(-128, 127)) if n.endswith('zeros') else x "
        "for n, x in layout.write(cache, slots, k, v).items()}",
    ),
    _write(
        "uint4_loses_heads_of_equal_values",
        _inputs(
            "jnp.where(x.max(-1, keepdims=True) == x.min(-1, keepdims=True), 0, x)",
            "uint4",
        ),
    ),
    _write(
        "flushes_what_is_tiny",
        "return layout.write(cache, slots, *(jnp.where(jnp.abs(x) < 1e-6, 0, x) for x in (k, v)))",
        kind="value",
    ),
    plain(
        "rope_kv_write",
        "rope_kv_write",
        "scales_of_keys_before_they_turn",
        "storage",
        "cache = kv_write(cache, slots, rope(k, positions, spec=spec), v, layout=layout)",
        "cache = {n: kv_write(cache, slots, k if 'scales' in n else rope(k, positions, "
        "spec=spec), v, layout=layout)[n] for n in cache}",
    ),
    plain(
        "rope_kv_write",
        "rope_kv_write",
        "uint4_zero_points_of_the_first_head",
        "storage",
        "cache = kv_write(cache, slots, rope(k, positions, spec=spec), v, layout=layout)",
        "cache = {n: kv_write(cache, slots, *(x[:, :1] + 0 * x if 'zeros' in n else x for x in "
        "(rope(k, positions, spec=spec), v)), layout=layout)[n] for n in cache}",
    ),
    _read("reads_zero_points_of_eight_bits", "zeros", "a.astype(jnp.int8).astype(a.dtype)"),
    _read("reads_scales_as_float16", "scales", "a.astype(jnp.float16).astype(a.dtype)"),
    _read(
        "reads_one_zero_point_of_a_page",
        "zeros",
        "jnp.broadcast_to(jax.lax.slice_in_dim(a, 0, 1, axis=layout.offset_axis_of(n)), a.shape)",
    ),
    _read(
        "reads_int8_scales_of_the_first_head",
        "scales",
        "jnp.broadcast_to(jax.lax.slice_in_dim(a, 0, 1, axis=layout.head_axis()[n]), a.shape)",
        "int8",
    ),
    plain(
        "attention",
        "attention_blocks",
        "a_prompt_sees_its_keys_unrounded",
        "storage",
        "return narrowed(QUANTIZE[layout.storage](x).values(), layout.dtype)",
        "return x.astype(layout.dtype)",
    ),
    plain(
        "attention",
        "attention_blocks",
        "latent_values_have_scales_of_their_own",
        "storage",
        "values = keys[..., :prefix] if prefix else _as_cached(v, layout)",
        "values = _as_cached(v, layout)",
    ),
    plain(
        "attention",
        "attention_blocks",
        "every_chunk_has_the_first_ones_scales",
        "storage",
        "n: jax.lax.dynamic_slice(array, at[: array.ndim], page.shapes()[n].shape)",
        "n: jax.lax.dynamic_slice(array, (at if array.ndim == 4 else (at[0], jnp.int32(0), "
        "jnp.int32(0)))[: array.ndim], page.shapes()[n].shape)",
    ),
    plain(
        "attention",
        "attention_blocks",
        "stale_scales_are_multiplied_by_zero",
        "border",
        "return add_keys(state, scores, jnp.where(own[None, :, None], v, 0))",
        "return add_keys(state, scores, v)",
    ),
)
