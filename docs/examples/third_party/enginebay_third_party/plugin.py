"""Declarations of this plugin's parts. This module imports only the hooks; enginebay imports a part
when the part is chosen.
"""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register) -> None:
    """Declare shortest_prompt_first. Its priority is lower than that of the built-in schedulers,
    so "auto" does not choose it.
    """
    register(
        "shortest_prompt_first",
        "enginebay_third_party.shortest_prompt_first:ShortestPromptFirst",
        options="enginebay_third_party.shortest_prompt_first:ShortestPromptFirstOptions",
        summary="short prompts first, unless a longer one has waited",
        capabilities={"priority": -10},
    )


@hookimpl
def register_kernels(register: Register) -> None:
    """Declare chunked_scan. The kernel object has its capabilities and its priority."""
    register(
        "chunked_scan",
        "enginebay_third_party.chunked_scan:chunked_scan",
        op="attention",
        platforms=("cpu",),
        summary="a scan over chunks of keys with a running softmax",
    )
