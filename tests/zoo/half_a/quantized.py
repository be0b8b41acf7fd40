"""Faults of products with quantised weights, in the plain JAX kernels."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind

SOURCE = "enginebay_xla.quantized_linear"


def _fault(op: str, name: str, kind: Kind, old: str, new: str, source: str = SOURCE) -> Fault:
    kernel = f"enginebay_xla.{'linear' if op == 'embedding' else op}:{op}"
    return Fault(f"quantized_{op}_{name}", op, kind, kernel, source, old, new)


FAULTS = (
    _fault(
        "linear",
        "rounds_with_one_scale_for_all_rows",
        "scale",
        "rounded, factors = rounded_rows(flat)",
        "rounded, factors = (one.reshape(-1, num_in) if one.size > 1 else one "
        "for one in rounded_rows(flat.reshape(1, -1)))",
    ),
    _fault(
        "linear",
        "forgets_zero_points_of_rounded_products",
        "feature",
        "    if weight.zero_points is not None:",
        "    if weight.zero_points is not None and weight.scales.shape[1] < 2:",
    ),
    _fault(
        "linear",
        "has_one_scale_for_all_outputs",
        "scale",
        "weight.scales[:, 0].astype(jnp.float32)",
        "weight.scales[:1, 0].astype(jnp.float32)",
    ),
    _fault(
        "linear",
        "leaves_the_last_block_out",
        "border",
        "-(-outputs // block)",
        "outputs // block",
    ),
    _fault(
        "grouped_linear",
        "sums_eight_bits",
        "accumulator",
        "preferred_element_type=jnp.int32",
        "preferred_element_type=jnp.int8",
    ),
    _fault(
        "embedding",
        "rounds_rows_to_sixteen_bits",
        "dtype",
        "return rows.dequantized() if isinstance(rows, QuantizedArray) else rows",
        "return rows.dequantized().astype(jnp.bfloat16).astype(jnp.float32) "
        "if isinstance(rows, QuantizedArray) else rows",
        "enginebay_xla.linear",
    ),
)
