"""Declaration of this plugin's engine."""

from __future__ import annotations

from enginebay.plugins.hooks import Register, hookimpl


@hookimpl
def register_engines(register: Register) -> None:
    """Declare the engine. Its priority is low, so "auto" chooses another engine."""
    register(
        "ring",
        "enginebay_ring.engine:make_engine",
        options="enginebay_ring.engine:RingOptions",
        summary="a ring of blocks for each row, as long as the window of the layers",
        capabilities={
            "priority": -50,
            "logprobs": True,
            "full_vocab_logprobs": True,
            "verifies": True,
            "attention_problems": "enginebay_ring.engine:attention_problems",
        },
    )
