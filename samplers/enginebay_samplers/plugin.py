"""What this package offers: the samplers "greedy" and "standard"."""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_samplers(register: Register) -> None:
    """greedy and standard."""
    register(
        "greedy",
        "enginebay_samplers.greedy:sample",
        summary="always the best token",
        capabilities={"priority": 0, "greedy_only": True, "exact_greedy": True},
    )
    register(
        "standard",
        "enginebay_samplers.standard:sample",
        summary="penalties, temperature, top_k, top_p, min_p, seeds; greedy at temperature 0",
        capabilities={"priority": 10, "draws": True, "exact_greedy": True},
    )
