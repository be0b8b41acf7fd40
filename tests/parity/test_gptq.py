"""Checkpoints that AutoGPTQ quantised and packed, against its own layers on torch."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
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

CASES: dict[str, tuple[int, int, bool, str]] = {
    "4_bits": (4, 32, True, "int4"),
    "4_bits_asymmetric": (4, 32, False, "uint4"),
    "8_bits": (8, -1, True, "int8"),
    "8_bits_asymmetric_groups": (8, 32, False, "int8_group"),
}
"""Bits, group size (-1: one group), symmetric, and the form of the weights that we load."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """AutoGPTQ's GPTQ, and its layer that packs. Its package itself imports models that newer
    versions of transformers do not have, so only these modules are imported.
    """
    found = importlib.util.find_spec("auto_gptq")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("AutoGPTQ is not installed (make parity)")
    package = types.ModuleType("auto_gptq")
    package.__path__ = list(found.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "auto_gptq", package)
    # It waits for a GPU to measure its own time.
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    quantization = importlib.import_module("auto_gptq.quantization.gptq")
    layers = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda_old")
    return quantization.GPTQ, layers.QuantLinear


def write_with_the_library(
    folder: Path, library: tuple[Any, Any], bits: int, group_size: int, *, is_symmetric: bool
) -> Any:
    """Write a random Llama whose linear layers the library has quantised on random inputs. Returns
    the model with the library's layers.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    gptq, quant_linear = library
    torch.manual_seed(4)
    fields = {key: value for key, value in (CONFIG | SIZES).items() if key != "architectures"}
    model = LlamaForCausalLM(LlamaConfig(**fields)).float().eval()
    for block in model.model.layers:
        for owner in (block.self_attn, block.mlp):
            for name, linear in list(owner.named_children()):
                if not isinstance(linear, torch.nn.Linear):
                    continue
                inputs = torch.randn(4, 96, linear.in_features)
                method = gptq(linear)
                method.quantizer.configure(bits, perchannel=True, sym=is_symmetric, mse=False)
                for one in inputs:
                    method.add_batch(one, linear(one))
                scales, zeros, indexes = method.fasterquant(group_size=group_size)
                layer = quant_linear(
                    bits, group_size, linear.in_features, linear.out_features, bias=False
                )
                layer.pack(linear, scales, zeros, indexes)
                setattr(owner, name, layer)
    tensors = {
        name: tensor.contiguous().clone()
        for name, tensor in model.state_dict().items()
        if tensor is not None
    }
    save_file(tensors, folder / "model.safetensors")
    quantization = {"bits": bits, "group_size": group_size, "sym": is_symmetric, "desc_act": False}
    config = CONFIG | SIZES | {"quantization_config": {"quant_method": "gptq"} | quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_library(
    name: str, library: tuple[Any, Any], tmp_path: Path
) -> None:
    bits, group_size, is_symmetric, method = CASES[name]
    model = write_with_the_library(tmp_path, library, bits, group_size, is_symmetric=is_symmetric)
    ids = np.random.default_rng(3).integers(0, 32, 24).tolist()
    theirs = reference.logits_of(model, ids)
    plan = make_plan(EngineConfig(model=str(tmp_path), dtype="float32", max_model_len=64))
    assert {one.method for one in plan.weight_format.quantized.values()} == {method}
    ours = ReferenceModel(plan).logits(ids)
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
