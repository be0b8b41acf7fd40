"""Checkpoints that are quantised already: GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from enginebay import EngineConfig
from enginebay.compose.composition import make_plan
from enginebay.compose.plan import Plan
from enginebay.errors import CheckpointError, UnsupportedError
from enginebay.weights import QuantizedArray
from enginebay_models.source import read_stored
from enginebay_testing.oracle import quantized_weight
from enginebay_testing.reference import ReferenceModel
from tests.unit import packed_checkpoints as packing
from tests.unit.packed_checkpoints import Layer, layer_of, write_quantized

UP = "layers.0.mlp.up"
UP_TENSOR = "model.layers.0.mlp.up_proj"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def compressed(whole: str, *, inputs: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": whole,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


DYNAMIC = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}


def fp8_layer(layer: Layer) -> dict[str, np.ndarray]:
    return {
        "weight": (layer.numbers - 128).astype(jnp.float8_e4m3fn),
        "weight_scale": layer.scales,
    }


def layers(
    bits: int, size: int | None, *, is_symmetric: bool = True, dtype: str = "float16"
) -> Callable[[tuple[int, int], int], Layer]:
    """Layers with groups of `size` inputs; None: one group."""

    def make(shape: tuple[int, int], seed: int) -> Layer:
        groups = 1 if size is None else shape[1] // size
        return layer_of(shape, bits, groups, is_symmetric=is_symmetric, dtype=dtype, seed=seed)

    return make


Case = tuple[
    dict[str, Any],
    Callable[[Layer], Any],
    Callable[[tuple[int, int], int], Layer],
    str,
]
CASES: dict[str, Case] = {
    "gptq": (GPTQ, functools.partial(packing.gptq, bits=4), layers(4, 32), "int4"),
    "gptq_v2_asymmetric": (
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        functools.partial(packing.gptq, bits=4, is_v1=False),
        layers(4, 32, is_symmetric=False), "uint4"),
    "gptq_v1_asymmetric": (
        GPTQ | {"sym": False},
        functools.partial(packing.gptq, bits=4), layers(4, 32, is_symmetric=False), "uint4"),
    "gptq_8_bits": (
        GPTQ | {"bits": 8, "group_size": -1},
        functools.partial(packing.gptq, bits=8), layers(8, None), "int8"),
    "gptq_8_bits_groups": (
        GPTQ | {"bits": 8, "sym": False},
        functools.partial(packing.gptq, bits=8), layers(8, 32, is_symmetric=False), "int8_group"),
    "awq": (AWQ, packing.awq, layers(4, 32, is_symmetric=False), "uint4"),
    "w4a16": (
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=True),
        functools.partial(packing.packed, bits=4, is_symmetric=True),
        layers(4, 32, dtype="bfloat16"), "int4"),
    "w4a16_asymmetric": (
        compressed("pack-quantized", num_bits=4, strategy="group", symmetric=False),
        functools.partial(packing.packed, bits=4, is_symmetric=False),
        layers(4, 32, is_symmetric=False), "uint4"),
    "w8a16": (
        compressed("int-quantized", num_bits=8, strategy="channel"),
        packing.int_quantized, layers(8, None, dtype="float32"), "int8"),
    "w8a8": (
        compressed("int-quantized", num_bits=8, strategy="channel", inputs=DYNAMIC),
        packing.int_quantized, layers(8, None, dtype="float32"), "int8"),
    "fp8": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        fp8_layer, layers(8, None, dtype="float32"), "fp8"),
}  # fmt: skip


def plan_of(folder: Path, **choices: Any) -> Plan:
    config = {"model": str(folder), "dtype": "float32", "max_model_len": 32, "engine": "vinference"}
    return make_plan(EngineConfig(**(config | choices)))


QUICK = ("gptq_v1_asymmetric", "awq", "w8a8", "fp8")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_weights_have_the_stored_numbers(name: str, tmp_path: Path) -> None:
    """They keep the bits of the file, and dequantised they equal the plain checkpoint's."""
    fields, make, numbers, method = CASES[name]
    folder, plain = write_quantized(tmp_path, fields, make, numbers)
    plan = plan_of(folder)
    assert plan.weight_format.name == fields["quant_method"]
    loaded, wanted = plan.load_weights(), plan_of(plain).load_weights()
    quantized = {path: w for path, w in loaded.items() if isinstance(w, QuantizedArray)}
    assert len(quantized) == 2 * 5
    assert {(w.method, w.activations) for w in quantized.values()} == {
        (method, "int8" if name == "w8a8" else "float")
    }
    for path, weight in loaded.items():
        got = quantized_weight(weight) if isinstance(weight, QuantizedArray) else weight
        if name == "fp8" and path in quantized:  # float8 rounds the numbers
            np.testing.assert_allclose(got, wanted[path], rtol=0.07, atol=1e-3)
        else:
            np.testing.assert_allclose(got, wanted[path], rtol=1e-6, atol=1e-7)
    plain_again = plan_of(folder, quantization="none").load_weights()
    np.testing.assert_allclose(plain_again[UP], quantized_weight(quantized[UP]), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "devices"),
    [pytest.param("gptq", 2, marks=pytest.mark.long),
     *(pytest.param(name, 1, marks=pytest.mark.slow) for name in CASES),
     *(pytest.param(name, 2, marks=pytest.mark.slow) for name in CASES if name != "gptq")],
)  # fmt: skip
def test_logits_are_those_of_the_dequantised_weights(
    name: str, devices: int, tmp_path: Path
) -> None:
    fields, make, numbers, _ = CASES[name]
    folder, _ = write_quantized(tmp_path, fields, make, numbers)
    mesh = {"tensor": devices} if devices > 1 else {}
    ids = np.random.default_rng(3).integers(0, 32, 20).tolist()
    exact = ReferenceModel(plan_of(folder, quantization="none")).logits(ids)
    kept = {"activation_quantization": "none"} if name == "w8a8" else {}
    got = ReferenceModel(plan_of(folder, mesh=mesh, **kept)).logits(ids)
    assert np.abs(exact).max() > 0.1
    np.testing.assert_allclose(got, exact, atol=1e-4)
    if name == "w8a8":
        rounded = ReferenceModel(plan_of(folder, mesh=mesh)).logits(ids)
        difference = np.abs(rounded - exact).max() / np.abs(exact).max()
        assert 1e-5 < difference < 0.1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method = 'bitsandbytes'.*gptq, awq, compressed"),
        ({"bits": 4}, "quant_method"),
        ([4], r"quant_method = \[4\]"),
        (GPTQ | {"bits": 3}, r"quantization_config.bits = 3.*4, 8"),
        (GPTQ | {"bits": True}, r"quantization_config.bits = True"),
        (GPTQ | {"group_size": "all"}, "quantization_config.group_size = 'all'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'.*gptq_v2"),
        (GPTQ | {"dynamic": {"+:x": {"bits": 8}}}, "quantization_config.dynamic"),
        (GPTQ | {"sym": "yes"}, "sym = 'yes'"),
        (AWQ | {"version": "gemv"}, "quantization_config.version = 'gemv'.*gemm"),
        (compressed("marlin-24", strategy="channel"), "format = 'marlin-24'.*pack-quantized"),
        (compressed("pack-quantized", strategy="block"), "weights.strategy = 'block'"),
        (compressed("int-quantized", strategy="channel", inputs={"num_bits": 4}),
         "input_activations"),
        (compressed("int-quantized", strategy="channel", inputs=DYNAMIC | {"dynamic": False}),
         "input_activations.*dynamic int8"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "config_groups"),
    ],
)  # fmt: skip
def test_a_quantisation_that_is_not_served_is_refused_by_name(fields: Any, named: str) -> None:
    config = {"quantization_config": fields}
    with pytest.raises(CheckpointError, match=named):
        read_stored(config, {})


def reordered(tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{UP_TENSOR}.g_idx"] = tensors[f"{UP_TENSOR}.g_idx"][::-1].copy()


def without(part: str, tensors: dict[str, np.ndarray]) -> None:
    del tensors[f"{UP_TENSOR}.{part}"]


def as_type(part: str, dtype: str, tensors: dict[str, np.ndarray]) -> None:
    name = f"{UP_TENSOR}.{part}"
    tensors[name] = tensors[name].astype(dtype)


def shorter(part: str, tensors: dict[str, np.ndarray]) -> None:
    name = f"{UP_TENSOR}.{part}"
    tensors[name] = tensors[name][:-1].copy()


def infinite(part: str, tensors: dict[str, np.ndarray]) -> None:
    tensors[f"{UP_TENSOR}.{part}"][0, 0] = np.inf


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("gptq", reordered, rf"{UP_TENSOR}.g_idx' \(I32\).*desc_act"),
        ("gptq", functools.partial(without, "scales"), f"lacks tensor '{UP_TENSOR}.scales'"),
        ("gptq", functools.partial(as_type, "qweight", "int64"),
         rf"{UP_TENSOR}.qweight' \(I64\).*I32"),
        ("gptq", functools.partial(shorter, "qweight"), UP_TENSOR),
        ("gptq", functools.partial(infinite, "scales"), f"{UP_TENSOR}.weight.*NaN or infinity"),
        ("awq", functools.partial(shorter, "qzeros"), rf"{UP_TENSOR}.qzeros' \(I32\).*shape"),
        ("awq", functools.partial(without, "qzeros"), f"lacks tensor '{UP_TENSOR}.qzeros'"),
        ("w4a16", functools.partial(without, "weight_scale"), f"'{UP_TENSOR}.weight_scale'"),
        ("w4a16", functools.partial(shorter, "weight_packed"), r"weight_packed' \(I32\).*shape"),
        ("w8a16", functools.partial(shorter, "weight_scale"), r"weight_scale' \(F32\).*shape"),
    ],
)  # fmt: skip
def test_a_damaged_layer_is_refused_with_tensor_and_type(
    name: str, damage: Callable[[dict[str, np.ndarray]], None], named: str, tmp_path: Path
) -> None:
    fields, make, numbers, _ = CASES[name]
    folder, _ = write_quantized(tmp_path, fields, make, numbers)
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        plan_of(folder).load_weights()


def test_a_truncated_file_is_refused_with_tensor_and_type(tmp_path: Path) -> None:
    fields, make, numbers, _ = CASES["awq"]
    folder, _ = write_quantized(tmp_path, fields, make, numbers)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"is truncated: tensor '[\w.]+' of type 'F?I?\d+'"):
        plan_of(folder)


def test_a_symmetric_checkpoint_with_other_zero_points_is_mislabelled(tmp_path: Path) -> None:
    fields, make, _, _ = CASES["gptq_v1_asymmetric"]
    numbers = layers(4, 32, is_symmetric=False)
    folder, _ = write_quantized(tmp_path, fields | {"sym": True}, make, numbers)
    with pytest.raises(CheckpointError, match=r"qzeros' \(I32\).*zero point.*sym is true"):
        plan_of(folder)


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    fields, make, numbers, _ = CASES["awq"]
    folder, _ = write_quantized(tmp_path, fields, make, numbers)
    assert plan_of(folder, quantization="awq").weight_format.name == "awq"
    with pytest.raises(UnsupportedError, match=r"quantization = 'int8'.*stored as awq"):
        plan_of(folder, quantization="int8")


def test_memory_after_loading_is_what_the_plan_says(tmp_path: Path) -> None:
    from enginebay.contracts.executor import weight_bytes

    fields, make, numbers, _ = CASES["gptq"]
    folder, _ = write_quantized(tmp_path, fields, make, numbers)
    plan = plan_of(folder)
    held = sum(a.on_device_size_in_bytes() for a in jax.tree.leaves(plan.load_weights()))
    assert weight_bytes(plan.model, plan.placement, plan.weight_format) == held
    reason = next(r for r in plan.reasons if r.setting == "quantization")
    assert reason.chosen == "gptq"
    assert "10 weights (10 as int4) take 0.0 MiB in place of 0.3 in float32" in reason.why
