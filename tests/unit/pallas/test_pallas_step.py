"""The whole jitted decode step of an 8B-shaped model compiles for TPUs that are not there, with one
copy of the cache.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import pytest

from enginebay.config import EngineConfig
from enginebay.plugins.registry import load_registry
from enginebay_pallas.compiler import compiler
from enginebay_testing.cross_compile import DecodeShape, StepReport, compile_decode_step

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
)

NEWEST = ("v5e", "v6e", "7x")

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Llama-3.1-8B."""


def compiled(target: str, num_devices: int, num_layers: int, num_pages: int) -> StepReport:
    config = EngineConfig(mesh={"tensor": num_devices}) if num_devices > 1 else EngineConfig()
    return compile_decode_step(
        load_registry(),
        LLAMA_8B | {"num_hidden_layers": num_layers},
        compiler,
        target,
        num_devices=num_devices,
        shape=DecodeShape(num_pages=num_pages),
        config=config,
    )


def check(report: StepReport) -> None:
    """The cache that comes out lies where the one that went in lay, and working space is too small
    for another.

    A 7x holds weights in another tiling than they come in, so there working space has up to their
    size; the caches here are larger than that.
    """
    figures = report.compiled.figures
    assert report.kernels["layout"] == "tpu_rpa"
    assert report.kernels["attention.decode"] == "pallas"
    assert report.cache_bytes <= figures["alias_bytes"] < report.cache_bytes + (8 << 20)
    assert figures["argument_bytes"] >= report.cache_bytes + report.weight_bytes
    assert figures["temp_bytes"] < report.cache_bytes // 2


@needs_libtpu
@pytest.mark.matrix
@pytest.mark.parametrize("target", NEWEST)
@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_step_of_two_layers_has_one_copy_of_the_cache(target: str, num_devices: int) -> None:
    check(compiled(target, num_devices, 2, num_pages=8 * 2048 + 1))


WHOLE = {("v6e", 1): 1025, ("7x", 1): 4097, ("v5e", 8): 8193, ("v6e", 8): 8193, ("7x", 8): 8193}
"""Pages of the cache by target and devices: as large as fits, and on a 7x larger than the weights.
"""


@needs_libtpu
@pytest.mark.matrix
@pytest.mark.parametrize(("target", "num_devices"), WHOLE)
def test_the_step_of_an_8b_model_has_one_copy_of_the_cache(target: str, num_devices: int) -> None:
    check(compiled(target, num_devices, 32, num_pages=WHOLE[target, num_devices]))


@needs_libtpu
@pytest.mark.matrix
def test_one_v5e_has_no_room_for_an_8b_model() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory on HBM"):
        compiled("v5e", 1, 32, num_pages=65)
