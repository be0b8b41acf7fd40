"""Faults of kernels in Pallas, interpreted: few, as interpreting takes long."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _pallas(op: str, name: str, kind: Kind, module: str, old: str, new: str) -> Fault:
    kernel = f"enginebay_pallas.{'attention' if op == 'attention' else module}:{op}"
    return Fault(f"pallas_{op}_{name}", op, kind, kernel, f"enginebay_pallas.{module}", old, new)


FAULTS = (
    _pallas(
        "attention",
        "no_wait_for_reads",
        "race",
        "attention_kernel",
        "reads(span, step, slot, lambda copy: copy.wait())",
        "reads(span, step, slot, lambda copy: None)",
    ),
    _pallas(
        "attention",
        "computes_in_the_other_buffer",
        "race",
        "attention_kernel",
        "attend_block(plan, q, scratch, slot, base, limit, span)",
        "attend_block(plan, q, scratch, 1 - slot, base, limit, span)",
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
