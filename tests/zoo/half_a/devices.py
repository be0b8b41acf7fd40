"""Faults of kernels in Pallas and Triton, interpreted: few, as interpreting takes long."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _pallas(op: str, name: str, kind: Kind, module: str, old: str, new: str) -> Fault:
    kernel = f"enginebay_pallas.{'attention' if op == 'attention' else module}:{op}"
    return Fault(f"pallas_{op}_{name}", op, kind, kernel, f"enginebay_pallas.{module}", old, new)


def _linear(package: str, name: str, kind: Kind, module: str, old: str, new: str) -> Fault:
    full = f"enginebay_{package}"
    name, kernel = f"{package}_linear_{name}", f"{full}.linear:linear"
    return Fault(name, "linear", kind, kernel, f"{full}.{module}", old, new)


QUANTIZED = (
    _pallas(
        "attention",
        "values_have_scales_of_keys",
        "scale",
        "attention_kernel",
        "value = pl.ds(2 * head + 1, 1)",
        "value = pl.ds(2 * head, 1)",
    ),
    _pallas(
        "attention",
        "zero_points_times_half_of_the_query",
        "scale",
        "attention_kernel",
        "products = products - sums * scratch.zero_rows[key, :]",
        "products = products - 0.5 * sums * scratch.zero_rows[key, :]",
    ),
    _pallas(
        "attention",
        "codes_of_the_next_head",
        "heads",
        "attention_codes",
        "lax.rem(head, jnp.int32(heads))",
        "lax.rem(head + 1, jnp.int32(heads))",
    ),
    _linear(
        "pallas",
        "scales_of_the_first_group",
        "scale",
        "products",
        "part = part * factors[0][0, share, :]",
        "part = part * factors[0][0, 0:1, :]",
    ),
    _linear(
        "pallas",
        "zero_points_are_added",
        "scale",
        "products",
        "part = part - of_rows[mine]",
        "part = part + of_rows[mine]",
    ),
    _linear(
        "triton",
        "values_of_a_byte_change_places",
        "dtype",
        "linear_kernels",
        "low, high = (weight & 15).to(tl.int8), (weight >> 4).to(tl.int8)",
        "high, low = (weight & 15).to(tl.int8), (weight >> 4).to(tl.int8)",
    ),
    _linear(
        "triton",
        "zero_points_of_even_inputs_alone",
        "scale",
        "linear_kernels",
        "sums += tl.sum(odd.to(tl.float32), 0)",
        "sums += 0.0 * tl.sum(odd.to(tl.float32), 0)",
    ),
    Fault(
        "triton_attention_values_have_scales_of_keys",
        "attention",
        "scale",
        "enginebay_triton.attention:attention",
        "enginebay_triton.attention_kernels",
        "at_scales += V_SCALE",
        "at_scales += 0",
    ),
)
"""Faults of quantised weights and caches."""

FAULTS = (
    *QUANTIZED,
    _pallas(
        "attention",
        "no_wait_for_reads",
        "race",
        "attention_kernel",
        "reads(span=span, step=step, slot=slot, act=lambda copy: copy.wait())",
        "reads(span=span, step=step, slot=slot, act=lambda copy: None)",
    ),
    _pallas(
        "attention",
        "computes_in_the_other_buffer",
        "race",
        "attention_kernel",
        "plan=plan, q=q, scratch=scratch, slot=slot, base=base, limit=limit, span=span",
        "plan=plan, q=q, scratch=scratch, slot=1 - slot, base=base, limit=limit, span=span",
    ),
    _pallas(
        "attention",
        "window_one_too_long",
        "mask",
        "attention_kernel",
        "visible &= keys > seen_to - spec.window",
        "visible &= keys >= seen_to - spec.window",
    ),
    _pallas(
        "attention",
        "sums_are_not_rescaled",
        "accumulator",
        "attention_kernel",
        "scratch.sums[head] = scratch.sums[head] * kept[:, :1] + added",
        "scratch.sums[head] = scratch.sums[head] + added",
    ),
    _pallas(
        "attention",
        "maximum_of_the_unit_before",
        "accumulator",
        "attention_kernel",
        "scratch.highest[...] = jnp.full_like(scratch.highest, MASKED)",
        "pl.when(unit == 0)(lambda: scratch.highest.__setitem__(..., jnp.full_like("
        "scratch.highest, MASKED)))",
    ),
    _pallas(
        "attention",
        "units_begin_at_the_rows_start",
        "border",
        "attention_units",
        "jnp.where(real, first, 0),",
        "jnp.zeros_like(first),",
    ),
    _pallas(
        "kv_write",
        "runs_may_have_a_gap",
        "write",
        "kv_write",
        "follows = follows & (slots[first + token] == start_slot + token)",
        "follows = follows & (slots[first + token] >= start_slot)",
    ),
    _pallas(
        "kv_write",
        "does_not_wait_for_runs",
        "race",
        "kv_write",
        "_repeat(runs, lambda: wait(RUN))",
        "_repeat(runs, lambda: None)",
    ),
    _pallas(
        "rms_norm",
        "pads_the_mean",
        "size",
        "rms_norm",
        "variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)",
        "variance = jnp.sum(jnp.square(wide), axis=-1, keepdims=True) / round_up(wide.shape[-1], "
        "64)",
    ),
    _pallas(
        "sample",
        "top_k_one_more",
        "border",
        "sample",
        "enough = rows.top_k.astype(jnp.float32)",
        "enough = rows.top_k.astype(jnp.float32) + 1.0",
    ),
    _pallas(
        "sample",
        "padding_may_be_drawn",
        "border",
        "sample",
        "z = jnp.pad(z, (more, (0, width - vocab)), constant_values=-jnp.inf)",
        "z = jnp.pad(z, (more, (0, width - vocab)), constant_values=0.0)",
    ),
)
