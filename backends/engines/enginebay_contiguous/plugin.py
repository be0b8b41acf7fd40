"""Plugin that registers the engine "vinference"."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_engines(register: Register) -> None:
    """Register the contiguous engine."""
    register(
        "vinference",
        "enginebay_contiguous.engine:make_engine",
        options="enginebay_contiguous.engine:VInferenceOptions",
        summary="contiguous cache: one slot per row, doubled in size as it fills",
        capabilities={
            "priority": -10,
            "logprobs": True,
            "full_vocab_logprobs": True,
            "hidden_states": True,
            "prompt_embeds": True,
            "mixed_steps": True,
            "verifies": True,
            "attention_problems": "enginebay_contiguous.engine:attention_problems",
        },
    )
