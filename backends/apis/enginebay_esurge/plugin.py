"""Plugin that registers the engine "esurge"."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_engines(register: Register) -> None:
    """Register the paged engine with eSurge's options."""
    register(
        "esurge",
        "enginebay_esurge.engine:make_engine",
        options="enginebay_esurge.engine_options:ESurgeOptions",
        summary="the paged engine with eSurge's options and defaults",
        capabilities={
            "priority": -20,
            "logprobs": True,
            "full_vocab_logprobs": True,
            "hidden_states": True,
            "prompt_embeds": True,
            "mixed_steps": True,
            "verifies": True,
            "attention_problems": "enginebay_esurge.engine:attention_problems",
        },
    )
