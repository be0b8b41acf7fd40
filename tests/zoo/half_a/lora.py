"""Faults of the op lora in plain JAX."""

from __future__ import annotations

from tests.zoo.faults import Fault, Kind


def _fault(name: str, kind: Kind, old: str, new: str) -> Fault:
    source = "enginebay_lora.xla"
    return Fault(f"lora_{name}", "lora", kind, f"{source}:lora", source, old, new)


FAULTS = (
    _fault(
        "owner_of_a_rank_is_one_slot_too_low",
        "border",
        "dtype=jnp.int32) // rank + 1",
        "dtype=jnp.int32) // rank",
    ),
    _fault(
        "many_tokens_use_the_next_slot",
        "border",
        "is_mine = places == slot + 1",
        "is_mine = places == slot",
    ),
    _fault(
        "many_tokens_all_get_each_adapter",
        "mask",
        "jnp.where(is_mine[:, None], _product(x, down[slot], 1), 0)",
        "_product(x, down[slot], 1)",
    ),
    _fault(
        "few_tokens_without_an_adapter_get_the_first",
        "mask",
        "jnp.where((places > 0)[:, None], shrunk, 0).astype(x.dtype)",
        "shrunk.astype(x.dtype)",
    ),
    _fault(
        "base_in_the_dtype_of_the_result_is_lost",
        "accumulator",
        "return base + _product(shrunk, up.reshape(slots * rank, -1), 0)",
        "return _product(shrunk, up.reshape(slots * rank, -1), 0)",
    ),
    _fault(
        "parts_all_use_the_first",
        "border",
        "down = a[:, part].reshape",
        "down = a[:, 0].reshape",
    ),
    _fault(
        "skipped_unless_the_first_token_has_an_adapter",
        "feature",
        "(places > 0).any()",
        "places[0] > 0",
    ),
)
