"""Faults of ssd_scan, in the plain JAX kernel."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _fault(name: str, kind: Kind, old: str, new: str) -> Fault:
    module = "enginebay_xla.ssd_scan"
    return Fault(f"ssd_scan_{name}", "ssd_scan", kind, f"{module}:ssd_scan", module, old, new)


FAULTS = (
    _fault(
        "row_that_begins_keeps_the_old_state",
        "border",
        "return jnp.where(begins[:, None, None, None], 0, held)",
        "return held",
    ),
    _fault(
        "every_chunk_begins_at_zero",
        "border",
        "state, new = _chunk([part(array) for array in tokens], state)",
        "state, new = _chunk([part(array) for array in tokens], jnp.zeros_like(state))",
    ),
    _fault(
        "padding_writes_the_first_place",
        "write",
        "places = jnp.where(batch.kv_lens > 0, batch.page_table[:, 0], scan.shape[0])",
        "places = batch.page_table[:, 0]",
    ),
    _fault(
        "token_does_not_see_its_own_input",
        "mask",
        "jnp.exp(jnp.where(upto > 0, faded, -jnp.inf))",
        "jnp.exp(jnp.where(before_it, faded, -jnp.inf))",
    ),
    _fault(
        "inputs_of_sixteen_bits",
        "dtype",
        "inputs = (dt[..., None] * x.astype(jnp.float32))",
        "inputs = (dt[..., None] * x.astype(jnp.float32)).astype(jnp.bfloat16)",
    ),
    _fault(
        "decay_as_differences_of_one_sum",
        "accumulator",
        'faded = jnp.einsum("ik,kjh->hij", upto, later, precision=_EXACT)',
        "faded = (lambda s: s[:, :, None] - s[:, None])(jnp.cumsum(lasts, axis=0).T)",
    ),
    _fault(
        "heads_take_groups_in_turn",
        "mask",
        "return jnp.repeat(of_groups.astype(jnp.float32), heads // of_groups.shape[-2], axis=-2)",
        "return jnp.concatenate([of_groups.astype(jnp.float32)] * (heads // of_groups.shape[-2]), "
        "axis=-2)",
    ),
    _fault(
        "state_after_a_chunk_of_sixteen_bits",
        "dtype",
        "after = since[-1][..., None, None] * before + added",
        "after = (since[-1][..., None, None] * before + added).astype(jnp.bfloat16)"
        ".astype(jnp.float32)",
    ),
)
