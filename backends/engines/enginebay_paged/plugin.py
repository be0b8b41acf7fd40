"""Plugin that registers the engine "oengine"."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_engines(register: Register) -> None:
    """Register the paged engine."""
    register(
        "oengine",
        "enginebay_paged.engine:make_engine",
        options="enginebay_paged.options:PagedOptions",
        summary="paged cache: rows hold pages of one pool, and share the pages of equal prefixes",
        capabilities={
            "priority": 0,
            "logprobs": True,
            "full_vocab_logprobs": True,
            "hidden_states": True,
            "prompt_embeds": True,
            "mixed_steps": True,
            "verifies": True,
            "attention_problems": "enginebay_paged.engine:attention_problems",
        },
    )
