"""Faults of the ops beside attention, written from their contracts and the right kernels alone."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _fault(op: str, module: str, name: str, kind: Kind, old: str, new: str) -> Fault:
    place = "norm" if op.endswith("norm") else "linear" if op == "embedding" else op
    kernel = f"enginebay_xla.{place}:{op}"
    return Fault(f"b_{op}_{name}", op, kind, kernel, f"enginebay_xla.{module}", old, new, "B")


FAULTS = (
    _fault(
        "linear",
        "linear",
        "rounds_before_it_adds_the_bias",
        "dtype",
        "out = out + bias.astype(jnp.float32)",
        "out = (out.astype(x.dtype) + bias.astype(x.dtype)).astype(jnp.float32)",
    ),
    _fault(
        "linear",
        "linear",
        "result_keeps_the_input_dtype",
        "dtype",
        "numbers, precision=precision, preferred_element_type=jnp.float32",
        "numbers, precision=precision, preferred_element_type=x.dtype",
    ),
    _fault(
        "linear",
        "linear",
        "returns_the_padding",
        "size",
        "out = out[:rows].reshape(rows, *out_dims)",
        "out = out[-rows:].reshape(rows, *out_dims)",
    ),
    _fault(
        "embedding",
        "linear",
        "ids_of_sixteen_bits",
        "size",
        'jnp.take(array, ids, axis=0, mode="clip")',
        'jnp.take(array, ids.astype(jnp.int16), axis=0, mode="clip")',
    ),
    _fault(
        "rms_norm",
        "norm",
        "adds_eps_to_the_root",
        "scale",
        "normed = (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype)",
        "normed = (wide / (jnp.sqrt(variance) + eps)).astype(x.dtype)",
    ),
    _fault(
        "rms_norm",
        "norm",
        "squares_in_the_input_dtype",
        "dtype",
        "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)",
        "variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True).astype(jnp.float32)",
    ),
    _fault(
        "add_rms_norm",
        "norm",
        "sum_is_wider_than_its_input",
        "dtype",
        "total = _rounded(x + residual)",
        "total = x.astype(jnp.float32) + residual.astype(jnp.float32)",
    ),
    _fault(
        "rope",
        "rope",
        "positions_in_the_input_dtype",
        "dtype",
        "angles = positions.astype(jnp.float32)[:, None] * inv_freq",
        "angles = positions.astype(x.dtype).astype(jnp.float32)[:, None] * inv_freq",
    ),
    _fault(
        "rope",
        "rope",
        "scales_the_cosine_alone",
        "scale",
        "(jnp.cos(angles) * factor, jnp.sin(angles) * factor)",
        "(jnp.cos(angles) * factor, jnp.sin(angles))",
    ),
    _fault(
        "rope",
        "rope",
        "passes_the_first_features_on",
        "border",
        "else jnp.concatenate([turned, x[..., spec.rotary_dim :]], axis=-1)",
        "else jnp.concatenate([turned, x[..., : x.shape[-1] - spec.rotary_dim]], axis=-1)",
    ),
    _fault(
        "kv_write",
        "kv_write",
        "puts_padding_at_the_first_slot",
        "write",
        "return layout.write(cache, slots, k, v)",
        "return layout.write(cache, jnp.maximum(slots, 0), k, v)",
    ),
    _fault(
        "kv_write",
        "kv_write",
        "a_lone_token_is_written_twice",
        "write",
        "slots = jnp.concatenate([slots, jnp.full_like(slots, -1)])",
        "slots = jnp.concatenate([slots, jnp.zeros_like(slots)])",
    ),
    _fault(
        "rope_kv_write",
        "rope_kv_write",
        "rotates_keys_by_their_place_in_the_page",
        "size",
        "cache = kv_write(cache, slots, rope(k, positions, spec=spec), v, layout=layout)",
        "cache = kv_write(cache, slots, rope(k, positions % layout.page_size, spec=spec), v, "
        "layout)",
    ),
    _fault(
        "sample",
        "sample",
        "keeps_one_token_more",
        "border",
        "kth = jnp.take_along_axis(z, jnp.minimum(rows.top_k, num) - 1, axis=-1)",
        "kth = jnp.take_along_axis(z, jnp.minimum(rows.top_k, num - 1), axis=-1)",
    ),
    _fault(
        "sample",
        "sample",
        "counts_a_tokens_own_mass_before_it",
        "border",
        "before = jnp.cumsum(mass, axis=-1) - mass",
        "before = jnp.cumsum(mass, axis=-1)",
    ),
    _fault(
        "sample",
        "sample",
        "room_for_one_equal_less",
        "border",
        "room = jnp.maximum(jnp.ceil((wanted - down_to(border - 1, mass)) / each), 1.0)",
        "room = jnp.maximum(jnp.floor((wanted - down_to(border - 1, mass)) / each), 1.0)",
    ),
    _fault(
        "sample",
        "sample",
        "takes_its_share_of_the_whole_mass",
        "accumulator",
        "total = jnp.where(cut, jnp.where(in_top_k, mass, 0.0).sum(axis=-1, keepdims=True), "
        "rows.total)",
        "total = rows.total",
    ),
)
