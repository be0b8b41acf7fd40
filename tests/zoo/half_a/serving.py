"""Faults of the plain ops that show only in the sizes and values of serving, and results of earlier
calls.
"""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind

KERNELS = {
    "linear": ("enginebay_xla.linear", "enginebay_xla.linear:linear"),
    "embedding": ("enginebay_xla.linear", "enginebay_xla.linear:embedding"),
    "rms_norm": ("enginebay_xla.norm", "enginebay_xla.norm:rms_norm"),
    "add_rms_norm": ("enginebay_xla.norm", "enginebay_xla.norm:add_rms_norm"),
    "grouped_linear": (
        "enginebay_xla.grouped_linear",
        "enginebay_xla.grouped_linear:grouped_linear",
    ),
    "lora": ("enginebay_lora.xla", "enginebay_lora.xla:lora"),
}
"""Op -> source, and right kernel."""


def _fault(op: str, name: str, kind: Kind, old: str, new: str) -> Fault:
    source, kernel = KERNELS[op]
    return Fault(f"{op}_{name}", op, kind, kernel, source, old, new)


def _quantized(op: str, name: str, kind: Kind, old: str, new: str) -> Fault:
    kernel = KERNELS[op][1]
    return Fault(
        f"quantized_{op}_{name}", op, kind, kernel, "enginebay_xla.quantized_linear", old, new
    )


def _last(result: str) -> str:
    """Return code for the first result of a program, whatever its inputs are."""
    return (
        "(lambda now: jax.pure_callback(lambda new, kept={}: kept.setdefault(0, new), "
        f"jax.ShapeDtypeStruct(now.shape, now.dtype), now))({result})"
    )


def _stale(result: str) -> str:
    """Return code for a result whose last eighth of rows is that of the first call."""
    return (
        "(lambda now: jax.pure_callback(lambda new, kept={}: __import__('numpy').concatenate("
        "[new[: len(new) * 7 // 8], kept.setdefault(0, new)[len(new) * 7 // 8 :]]), "
        f"jax.ShapeDtypeStruct(now.shape, now.dtype), now))({result})"
    )


LINEAR_END = "return out.astype(out_dtype or x.dtype)"
LINEAR_ROWS = "out = out[:rows].reshape(rows, *out_dims)"
LINEAR_FLAT = "flat = x.reshape(x.shape[0], num_in)"
LINEAR_DOT = "flat, matrix, numbers, precision=precision, preferred_element_type=jnp.float32"


def _linear_rows(value: str) -> str:
    return LINEAR_ROWS.replace("out[:rows]", value)


LINEAR = tuple(
    _fault("linear", name, kind, old, new)
    for name, kind, old, new in (
        ("returns_its_last_result", "write", LINEAR_END, f"return {_last(LINEAR_END[7:])}"),
        ("leaves_its_last_rows_stale", "write", LINEAR_END, f"return {_stale(LINEAR_END[7:])}"),
        (
            "drops_rows_past_256",
            "size",
            LINEAR_ROWS,
            _linear_rows("jnp.where(jnp.arange(rows)[:, None] < 256, out[:rows], 0)"),
        ),
        (
            "drops_rows_past_1024",
            "size",
            LINEAR_ROWS,
            _linear_rows("jnp.where(jnp.arange(rows)[:, None] < 1024, out[:rows], 0)"),
        ),
        (
            "drops_inputs_past_4096",
            "size",
            LINEAR_FLAT,
            f"{LINEAR_FLAT} * (jnp.arange(num_in) < 4096).astype(x.dtype)",
        ),
        (
            "drops_inputs_past_8192",
            "size",
            LINEAR_FLAT,
            f"{LINEAR_FLAT} * (jnp.arange(num_in) < 8192).astype(x.dtype)",
        ),
        (
            "drops_outputs_past_1024",
            "size",
            LINEAR_ROWS,
            _linear_rows("jnp.where(jnp.arange(out.shape[1]) < 1024, out[:rows], 0)"),
        ),
        (
            "divides_rows_of_zeros_by_zero",
            "scale",
            LINEAR_ROWS,
            _linear_rows(
                "jnp.where((flat[:rows] == 0).all(1, keepdims=True), jnp.nan, out[:rows])"
            ),
        ),
        (
            "clips_large_sums",
            "scale",
            LINEAR_ROWS,
            _linear_rows("jnp.clip(out[:rows], -1e5, 1e5)"),
        ),
        (
            "spreads_an_infinity",
            "race",
            LINEAR_FLAT,
            f"{LINEAR_FLAT}; flat = jnp.where(jnp.isinf(flat).any(), jnp.nan, flat)",
        ),
        (
            "rounds_sums_to_bfloat16",
            "accumulator",
            LINEAR_DOT,
            LINEAR_DOT.replace("jnp.float32", "jnp.bfloat16"),
        ),
    )
)

GROUPED_PLACE = "start + jnp.arange(block) < ends[group])"
GROUPED_END = "return jax.lax.fori_loop(0, last[-1], add, empty)[:rows]"
GROUPED_INDEX = "return jax.lax.dynamic_index_in_dim(array, group, keepdims=False)"

GROUPED_LINEAR = tuple(
    _fault("grouped_linear", name, kind, old, new)
    for name, kind, old, new in (
        ("returns_its_last_result", "write", GROUPED_END, f"return {_last(GROUPED_END[7:])}"),
        ("leaves_its_last_rows_stale", "write", GROUPED_END, f"return {_stale(GROUPED_END[7:])}"),
        (
            "drops_rows_past_256",
            "size",
            GROUPED_PLACE,
            GROUPED_PLACE.replace("ends[group]", "jnp.minimum(ends[group], 256)"),
        ),
        (
            "knows_32_groups",
            "size",
            GROUPED_INDEX,
            GROUPED_INDEX.replace("group,", "jnp.minimum(group, 31),"),
        ),
        (
            "knows_64_groups",
            "size",
            GROUPED_INDEX,
            GROUPED_INDEX.replace("group,", "jnp.minimum(group, 63),"),
        ),
    )
)

EMBEDDING_ROWS = (
    'rows = jax.tree.map(lambda array: jnp.take(array, ids, axis=0, mode="clip"), table)'
)
EMBEDDING_END = "return rows.dequantized() if isinstance(rows, QuantizedArray) else rows"

EMBEDDING = tuple(
    _fault("embedding", name, kind, old, new)
    for name, kind, old, new in (
        ("returns_its_last_result", "write", EMBEDDING_END, f"{EMBEDDING_END[:-4]}{_last('rows')}"),
        (
            "leaves_its_last_rows_stale",
            "write",
            EMBEDDING_END,
            f"{EMBEDDING_END[:-4]}{_stale('rows')}",
        ),
        (
            "repeats_tokens_past_512",
            "size",
            EMBEDDING_ROWS,
            EMBEDDING_ROWS.replace("array, ids", "array, ids[jnp.arange(ids.size) % 512]"),
        ),
        (
            "knows_131072_ids",
            "size",
            EMBEDDING_ROWS,
            EMBEDDING_ROWS.replace("array, ids", "array, jnp.minimum(ids, 131_071)"),
        ),
        (
            "loses_negative_zeros",
            "scale",
            EMBEDDING_END,
            f"{EMBEDDING_END[:-4]}jnp.where(rows == 0, 0, rows)",
        ),
        (
            "loses_subnormal_numbers",
            "scale",
            EMBEDDING_END,
            f"{EMBEDDING_END[:-4]}jnp.where(abs(rows) < jnp.finfo(rows.dtype).tiny, 0, rows)",
        ),
    )
)

NORM_LINE = "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)"
NORM_END = "return (normed * weight).astype(x.dtype)"
NORM_ROOT = "jax.lax.rsqrt(variance + eps)"

RMS_NORM = tuple(
    _fault("rms_norm", name, kind, old, new)
    for name, kind, old, new in (
        ("returns_its_last_result", "write", NORM_END, f"return {_last(NORM_END[7:])}"),
        ("leaves_its_last_rows_stale", "write", NORM_END, f"return {_stale(NORM_END[7:])}"),
        (
            "drops_rows_past_256",
            "size",
            NORM_END,
            "return (normed * weight).astype(x.dtype).at[256:].set(0)",
        ),
        (
            "drops_rows_past_2048",
            "size",
            NORM_END,
            "return (normed * weight).astype(x.dtype).at[2048:].set(0)",
        ),
        (
            "leaves_features_past_4096_out",
            "size",
            NORM_LINE,
            NORM_LINE.replace("square(wide)", "square(wide[..., :4096])"),
        ),
        (
            "leaves_eps_out_for_zeros",
            "scale",
            NORM_ROOT,
            "jax.lax.rsqrt(variance + jnp.where(variance > 0, eps, 0))",
        ),
        (
            "clips_large_squares",
            "scale",
            NORM_LINE,
            NORM_LINE.replace("jnp.square(wide)", "jnp.minimum(jnp.square(wide), 3e4)"),
        ),
    )
)
SUM = "total = _rounded(x + residual)"
ADD_RMS_NORM = (
    _fault(
        "add_rms_norm",
        "lets_the_compiler_keep_the_sum_in_float32",
        "dtype",
        SUM,
        "total = x + residual",
    ),
)

LORA_DOWN = "down = a[:, part].reshape(slots, rank, -1)"
LORA_COND = "jax.lax.cond((places > 0).any(), added, lambda: y)"
LORA_PIECE = "pieces.append(out.reshape(base.shape).astype(y.dtype))"


def _ranks(most: int) -> str:
    return f"{LORA_DOWN} * (jnp.arange(rank) < {most})[:, None].astype(a.dtype)"


LORA = tuple(
    _fault("lora", name, kind, old, new)
    for name, kind, old, new in (
        ("returns_its_last_result", "write", LORA_COND, _last(LORA_COND)),
        ("leaves_its_last_rows_stale", "write", LORA_COND, _stale(LORA_COND)),
        ("knows_8_ranks", "size", LORA_DOWN, _ranks(8)),
        ("knows_32_ranks", "size", LORA_DOWN, _ranks(32)),
        ("knows_64_ranks", "size", LORA_DOWN, _ranks(64)),
        (
            "drops_tokens_past_512",
            "size",
            "is_mine = places == slot + 1",
            "is_mine = (places == slot + 1) & (jnp.arange(places.size) < 512)",
        ),
        (
            "knows_32_slots",
            "size",
            "slot, precision = jnp.maximum(places - 1, 0), None",
            "slot, precision = jnp.clip(places - 1, 0, 31), None",
        ),
        (
            "rounds_wide_results",
            "dtype",
            LORA_PIECE,
            LORA_PIECE.replace("astype(y.dtype)", "astype(x.dtype).astype(y.dtype)"),
        ),
        (
            "drops_inputs_past_1024",
            "size",
            "rows = x.reshape(tokens, -1)",
            "rows = x.reshape(tokens, -1); rows = rows.at[:, 1024:].set(0)",
        ),
    )
)

ROUNDED = "rounded, factors = rounded_rows(flat)"
GROUP_SUM = "return (sums * weight.scales.T[:, None].astype(jnp.float32)).sum(axis=0) * factors"
NARROW_SUM = (
    "(lambda parts: jax.lax.scan(lambda total, one: "
    "(jax.lax.reduce_precision(total + one, 8, 7), None), 0 * parts[0], parts)[0])"
)
WIDE = "out = wide[: x.shape[0]].reshape(x.shape[0], *out_dims)"

QUANTIZED = tuple(
    _quantized(op, name, kind, old, new)
    for op, name, kind, old, new in (
        (
            "linear",
            "divides_rows_of_zeros_by_zero",
            "scale",
            ROUNDED,
            f"{ROUNDED}; factors = jnp.where(factors > 0, factors, jnp.nan)",
        ),
        (
            "linear",
            "drops_groups_past_64",
            "size",
            GROUP_SUM,
            GROUP_SUM.replace(".sum", "[:64].sum"),
        ),
        (
            "linear",
            "has_one_scale_for_all_groups",
            "scale",
            GROUP_SUM,
            GROUP_SUM.replace("T[:, None]", "T[:1, None]"),
        ),
        (
            "linear",
            "keeps_scales_in_float16",
            "dtype",
            GROUP_SUM,
            GROUP_SUM.replace("astype(jnp.float32)", "astype(jnp.float16).astype(jnp.float32)"),
        ),
        (
            "linear",
            "sums_groups_in_16_bits",
            "accumulator",
            GROUP_SUM,
            f"return {NARROW_SUM}(sums * weight.scales.T[:, None].astype(jnp.float32)) * factors",
        ),
        (
            "grouped_linear",
            "divides_rows_of_zeros_by_zero",
            "scale",
            ROUNDED,
            f"{ROUNDED}; factors = jnp.where(factors > 0, factors, jnp.nan)",
        ),
        (
            "linear",
            "rounds_zero_points",
            "scale",
            "totals.T[..., None] * weight.zero_points.T[:, None].astype(jnp.float32)",
            "totals.T[..., None] * jnp.rint(weight.zero_points.T[:, None].astype(jnp.float32))",
        ),
        (
            "linear",
            "drops_rows_past_512",
            "size",
            WIDE,
            WIDE.replace("wide[: x.shape[0]]", "wide[: x.shape[0]].at[512:].set(0)"),
        ),
    )
)

FAULTS: tuple[Fault, ...] = (
    *LINEAR,
    *GROUPED_LINEAR,
    *EMBEDDING,
    *RMS_NORM,
    *ADD_RMS_NORM,
    *LORA,
    *QUANTIZED,
)
