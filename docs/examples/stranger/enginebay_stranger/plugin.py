"""What this plugin offers. Nothing is imported here but the hooks: targets are imported when they
are picked.
"""

from __future__ import annotations

from enginebay.hooks import Register, hookimpl


@hookimpl
def register_schedulers(register: Register) -> None:
    """Declare shortest_prompt_first. Its priority is below that of enginebay's own, so "auto" does
    not take it.
    """
    register(
        "shortest_prompt_first",
        "enginebay_stranger.shortest_prompt_first:ShortestPromptFirst",
        options="enginebay_stranger.shortest_prompt_first:ShortestPromptFirstOptions",
        summary="short prompts first; waiting makes up for length",
        capabilities={"priority": -10},
    )


@hookimpl
def register_kernels(register: Register) -> None:
    """Declare chunked_scan. The kernel itself says what it can do and how it ranks."""
    register(
        "chunked_scan",
        "enginebay_stranger.chunked_scan:chunked_scan",
        op="attention",
        platforms=("cpu",),
        summary="a scan over chunks of keys, softmax running along",
    )
