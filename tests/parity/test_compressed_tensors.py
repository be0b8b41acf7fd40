"""Checkpoints that the library compressed-tensors wrote, against its own model on transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginebay import EngineConfig
from enginebay.compose.composition import make_plan
from enginebay_testing.reference import ReferenceModel
from tests.parity import reference
from tests.unit.checkpoints import CONFIG
from tests.unit.packed_checkpoints import SIZES

pytestmark = pytest.mark.torch
GROUPS: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 32}
CHANNEL: dict[str, Any] = {"num_bits": 8, "strategy": "channel", "symmetric": True}
TOKEN: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "w4a16": (GROUPS | {"type": "int", "symmetric": True}, None, "int4"),
    "w4a16_asymmetric": (GROUPS | {"type": "int", "symmetric": False}, None, "uint4"),
    "w8a16": (CHANNEL | {"type": "int"}, None, "int8"),
    "w8a8": (CHANNEL | {"type": "int"}, TOKEN | {"type": "int"}, "int8"),
    "fp8": (CHANNEL | {"type": "float"}, TOKEN | {"type": "float"}, "fp8"),
}


def write_with_the_library(
    folder: Path, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> Any:
    """Write a random Llama whose linear layers the library has quantised and compressed. Returns
    the model, which the library decompresses when it is called.
    """
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    fields = {key: value for key, value in (CONFIG | SIZES).items() if key != "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**fields)).float().eval()
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or not hasattr(module, "weight_scale"):
            continue
        shares = module.weight.data.reshape(*module.weight_scale.shape, -1)
        scale, point = calculate_qparams(shares.amin(-1), shares.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(point.reshape(module.weight_scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return model


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    weights, inputs, method = SCHEMES[name]
    model = write_with_the_library(tmp_path, weights, inputs)
    ids = np.random.default_rng(3).integers(0, 32, 24).tolist()
    theirs = reference.logits_of(model, ids)
    plan = make_plan(EngineConfig(model=str(tmp_path), dtype="float32", max_model_len=64))
    assert {one.method for one in plan.weight_format.quantized.values()} == {method}
    ours = ReferenceModel(plan).logits(ids)
    # The library rounds inputs of int8 layers with other scales (range / 255), and those of fp8
    # layers too. Rounding itself changes logits by so much.
    tolerance = 1e-4 if inputs is None else 0.05 * np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, atol=tolerance)
