"""Steps of a model with recurrent states compile for devices that are not there, with one copy of
the cache and of the states.
"""

from __future__ import annotations

from typing import Any

import pytest

from enginebay.plugins.registry import load_registry
from enginebay_pallas.compiler import compiler as tpu
from enginebay_testing.cross_compile import DecodeShape, compile_decode_step
from enginebay_testing.toolchains import KernelCompiler
from enginebay_triton.compiler import compiler as gpu

LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 2048,
    "block_ff_dim": 12288,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "conv_L_cache": 3,
}
"""Four layers of LFM2 1.2B."""


@pytest.mark.matrix
@pytest.mark.parametrize("num_tokens", [0, 512])
@pytest.mark.parametrize(("compiler", "target"), [(tpu, "v5e"), (tpu, "v6e"), (gpu, "sm_90")])
def test_a_step_with_states_has_one_copy_of_them(
    compiler: KernelCompiler, target: str, num_tokens: int
) -> None:
    """A decode, and a prefill beside which rows decode."""
    if (reason := compiler.why_not(target)) is not None:
        pytest.skip(reason)
    shape = DecodeShape(num_pages=2049, prefill_tokens=num_tokens)
    report = compile_decode_step(load_registry(), LFM2, compiler, target, shape=shape)
    figures, places = report.compiled.figures, 1 + 5 * shape.rows
    heads, states = 2 * 2049 * 64 * 8 * 64 * 2, 3 * places * 2 * 2048 * 2
    assert report.cache_bytes >= heads + states
    assert report.cache_bytes <= figures["alias_bytes"] < report.cache_bytes + (8 << 20)
    assert figures["temp_bytes"] < report.cache_bytes // 2
