"""Weights quantised to int8: what is stored and counted, what the ops compute with them, and what
cannot use them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM, EngineConfig, SamplingParams
from enginebay.compose.composition import make_engine, make_plan
from enginebay.compose.plan import Plan
from enginebay.contracts.executor import weight_bytes
from enginebay.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    UnknownNameError,
    UnsupportedError,
)
from enginebay.plugins.registry import Registry, load_registry
from enginebay.weights import QuantizedArray, WeightFormat, WeightSpec, merge_weights, stored_bytes
from enginebay_testing.oracle import quantized_weight
from enginebay_testing.reference import ReferenceModel
from enginebay_xla.linear import embedding, linear
from tests.brief import BRIEF, LEAST
from tests.unit.quantizing import quantized

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["Once upon a time", "The little dog"]
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
}


def plan_of(model: str = LEAST, **choices: Any) -> Plan:
    return make_plan(EngineConfig(**({"model": model, "quantization": "int8"} | SIZES | choices)))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_hand(weight: QuantizedArray) -> np.ndarray:
    """What a weight of one scale an output stands for, in NumPy."""
    flat = weight.values.reshape(*weight.scales.shape[:-1], -1).astype(np.float32)
    return (flat * weight.scales).reshape(weight.shape)


@pytest.mark.parametrize(
    ("shape", "num_inputs", "dtype"),
    [
        ((40, 48), 1, "float32"),
        ((5, 8, 48), 1, "bfloat16"),
        ((40, 6, 8), 2, "float32"),
    ],
)
def test_a_product_is_that_of_the_dequantised_weight(
    shape: tuple[int, ...], num_inputs: int, dtype: str
) -> None:
    weight, inputs = quantized(random(*shape), num_inputs), shape[-num_inputs:]
    x = random(3, *inputs, seed=1).astype(jnp.dtype(dtype))
    bias = random(*shape[:-num_inputs], seed=2)
    wanted = np.tensordot(
        x.astype(np.float32), by_hand(weight), (range(1, x.ndim), range(-num_inputs, 0))
    )
    got = jax.jit(functools.partial(linear, out_dtype="float32"))(x, weight, bias)
    np.testing.assert_allclose(got, wanted + bias, rtol=1e-5, atol=1e-4)


def test_groups_of_inputs_have_scales_and_zero_points_of_their_own() -> None:
    values, points = np.arange(24).reshape(2, 12) % 7, np.array([[1, 2, 3], [0, 5, 6]])
    scales = np.array([[1.0, 2.0, 4.0], [0.5, 0.25, 8.0]], np.float32)
    weight = QuantizedArray(values.astype(np.int8), scales, points.astype(np.int8), "mine")
    wanted = (values - np.repeat(points, 4, axis=1)) * np.repeat(scales, 4, axis=1)
    x, ids = random(3, 12), np.array([1, 0, 1])

    @jax.jit
    def both(x: jax.Array, weight: QuantizedArray, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return linear(x, weight), embedding(weight, ids)

    product, rows = both(x, weight, ids)
    np.testing.assert_allclose(product, x @ wanted.T, rtol=1e-5)
    np.testing.assert_array_equal(rows, wanted[ids])


def test_a_value_errs_by_half_a_scale_at_most_and_zeros_stay() -> None:
    rows = random(7, 3, 20) * np.logspace(-6, 6, 7, dtype=np.float32)[:, None, None]
    rows[2] = 0
    made = quantized(rows)
    error = np.abs(by_hand(made) - rows)
    assert (error <= made.scales / 2 * (1 + 1e-5)).all()
    assert np.abs(made.values).max() == 127
    assert not made.values[2].any()


def test_stored_bytes_count_two_int4_in_a_byte() -> None:
    array = jax.device_put(np.zeros((5, 3), jnp.int4))
    assert array.nbytes == 15
    assert stored_bytes((5, 3), jnp.int4) == array.on_device_size_in_bytes() == 8
    assert stored_bytes((5, 3), "bfloat16") == 30
    assert stored_bytes((5, 3), "int8") == 15


def test_the_memory_plan_counts_the_bytes_of_the_loaded_arrays() -> None:
    plan = plan_of()
    held = sum(array.on_device_size_in_bytes() for array in jax.tree.leaves(plan.load_weights()))
    plain = weight_bytes(plan.model, plan.placement, WeightFormat("float32"))
    assert weight_bytes(plan.model, plan.placement, plan.weight_format) == held
    assert plain / 4 < held < plain / 3.8  # a byte for four, and the scales
    memory = [make_engine(each).memory for each in (plan, plan_of(quantization="none"))]
    assert memory[0].workspace_bytes == memory[1].workspace_bytes  # no weight is dequantised


def test_only_the_weights_of_linear_and_embedding_are_quantised_whatever_their_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of()
    whole = plan.load_weights()
    assert {path for path, w in whole.items() if not isinstance(w, QuantizedArray)} == {
        "layers.0.attention_norm.scale",
        "layers.0.mlp_norm.scale",
        "norm.scale",
    }
    monkeypatch.setattr("enginebay_models.load._PIECE_BYTES", 1 << 10)
    jax.tree.map(np.testing.assert_array_equal, whole, plan.load_weights())


@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_a_weight_with_nan_is_refused_by_name(tensor: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(Path(LEAST) / "model.safetensors")
    changed = tensors[tensor].copy()
    changed[1, 2] = np.nan
    save_file(tensors | {tensor: changed}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((Path(LEAST) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=tensor):
        plan_of(str(tmp_path)).load_weights()


def test_a_kernel_that_cannot_read_the_weights_is_refused_by_name() -> None:
    chosen = {r.setting: r for r in plan_of().reasons}
    assert chosen["quantization"].chosen == "int8"
    assert chosen["kernels.embedding"].chosen == "xla"
    why = "does not support int8 weights"
    with pytest.raises(UnsupportedError, match=why):
        plan_of(kernels={"linear": "enginebay_xla.linear:linear"})
    with pytest.raises(UnsupportedError, match=why):
        plan_of(shadow={"linear": "enginebay_xla.linear:linear"})
    assert (
        plan_of(quantization="none", kernels={"linear": "native"}).weight_format.quantization
        is None
    )


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"int9.*int8"):
        plan_of(quantization="int9")


def test_a_model_that_says_no_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from enginebay_models.decoder import NnxModel

    def without_inputs(self: NnxModel) -> Mapping[str, WeightSpec]:
        return {p: dataclasses.replace(s, num_inputs=None) for p, s in self._specs.items()}

    monkeypatch.setattr(NnxModel, "weight_specs", without_inputs)
    with pytest.raises(UnsupportedError, match=r"quantization = 'int8'.*num_inputs"):
        plan_of()


def test_other_weights_must_be_quantised_alike() -> None:
    base = plan_of().load_weights()
    path = "layers.0.mlp.up"
    doubled = dataclasses.replace(base[path], scales=np.asarray(base[path].scales) * 2)
    np.testing.assert_array_equal(merge_weights(base, {path: doubled})[path].scales, doubled.scales)
    with pytest.raises(InputError, match=r"float32\[.*QuantizedArray by int8"):
        merge_weights(base, {path: np.zeros(base[path].shape, np.float32)})
    with pytest.raises(InputError, match=r"layers.0.mlp.up.scales.*float32\["):
        merge_weights(base, {path: dataclasses.replace(doubled, scales=np.zeros((3, 1)))})


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(plan_of(BRIEF))


def test_logits_of_int8_weights_are_near_those_of_f32(reference: ReferenceModel) -> None:
    plain = ReferenceModel(plan_of(BRIEF, quantization="none"))
    ids = np.random.default_rng(3).integers(4, 2048, 40).tolist()
    exact, rounded = plain.logits(ids), reference.logits(ids)
    rms = np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < rms < 0.03


@pytest.mark.parametrize(
    ("engine", "choices"),
    [
        pytest.param("vinference", {}, marks=pytest.mark.long),
        pytest.param("oengine", {}, marks=pytest.mark.slow),
        pytest.param("esurge", {}, marks=pytest.mark.slow),
        pytest.param("oengine", {"mesh": {"tensor": 2}}, marks=pytest.mark.long),
    ],
    ids=["vinference", "oengine", "esurge", "two_devices"],
)
@pytest.mark.usefixtures("few_sizes_module")
def test_greedy_tokens_are_those_of_the_reference(
    engine: str, choices: dict[str, Any], reference: ReferenceModel
) -> None:
    given: dict[str, Any] = SIZES | choices | {"engine": engine, "quantization": "int8"}
    with LLM(BRIEF, **given) as llm:
        assert str(llm.plan.weight_format) == "int8 float32"
        for out in llm.generate(PROMPTS, GREEDY):
            tokens = out.outputs[0].token_ids
            assert len(tokens) == GREEDY.max_tokens
            assert reference.first_wrong_token(out.prompt_token_ids, tokens, 1e-4) is None


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("activations", ["none", "int8", "int8_group"])
@pytest.mark.parametrize("quantization", ["int4", "fp8"])
@pytest.mark.usefixtures("few_sizes_module")
def test_greedy_tokens_of_every_form_on_several_devices(
    quantization: str, activations: str, devices: int
) -> None:
    given: dict[str, Any] = SIZES | {"quantization": quantization, "mesh": {"tensor": devices}}
    if devices == 4:  # the model has two KV heads
        given["axis_rules"] = {"kv_heads": None}
    if quantization == "fp8" and activations != "none":
        with pytest.raises(ConfigError, match=rf"activation_quantization = '{activations}'.*fp8"):
            plan_of(BRIEF, **given, activation_quantization=activations)
        return
    given |= {"activation_quantization": activations, "engine": "oengine"}
    reference = ReferenceModel(plan_of(BRIEF, **(given | {"mesh": {}, "axis_rules": {}})))
    with LLM(BRIEF, **given) as llm:
        for out in llm.generate(PROMPTS, GREEDY):
            tokens = out.outputs[0].token_ids
            assert reference.first_wrong_token(out.prompt_token_ids, tokens, 1e-2) is None


@pytest.mark.parametrize("rounding", ["int8", "int8_group"])
def test_rounded_activations_need_weights_of_whole_numbers(rounding: str) -> None:
    rounded = plan_of(activation_quantization=rounding).weight_format
    assert {one.activations for one in rounded.quantized.values()} == {rounding}
    for quantization in ("none", "fp8"):
        match = rf"activation_quantization = '{rounding}' with weights"
        with pytest.raises(ConfigError, match=match):
            plan_of(quantization=quantization, activation_quantization=rounding)


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["xla", "native"])
def test_inputs_that_are_rounded_in_groups_give_the_tokens_of_the_reference(kernel: str) -> None:
    given: dict[str, Any] = SIZES | {
        "quantization": "int4",
        "activation_quantization": "int8_group",
        "engine": "oengine",
    }
    reference = ReferenceModel(plan_of(BRIEF, **given, kernels={"linear": "xla"}))
    with LLM(BRIEF, **given, kernels={"linear": kernel}) as llm:
        for out in llm.generate(PROMPTS, GREEDY):
            tokens = out.outputs[0].token_ids
            assert reference.first_wrong_token(out.prompt_token_ids, tokens, 1e-3) is None


def test_a_kernel_that_rounds_no_inputs_is_refused_by_name() -> None:
    registry = load_registry()
    entry = registry.find("kernel", "xla", "grouped_linear")
    assert entry.declaration is not None
    capabilities = {**entry.declaration.capabilities, "activation_quantizations": ()}
    declaration = dataclasses.replace(entry.declaration, capabilities=capabilities)
    others = [one for one in registry.entries if one is not entry]
    config = EngineConfig(
        model=LEAST,
        quantization="int8",
        activation_quantization="int8",
        kernels={"grouped_linear": "xla"},
        **SIZES,
    )
    with pytest.raises(UnsupportedError, match="does not support int8 activations"):
        make_plan(config, Registry([*others, dataclasses.replace(entry, declaration=declaration)]))


def test_int4_keeps_the_embedding_at_8_bits_and_has_a_group_size() -> None:
    for size, groups in ((32, 6), (64, 3), (128, 3)):
        plan = plan_of(quantization={"name": "int4", "group_size": size})
        found = plan.weight_format.quantized
        assert {path: one.method for path, one in found.items() if one.method != "int4"} == {
            "embed": "int8"
        }
        assert found["layers.0.mlp.up"].scales.spec.shape[-1] == groups
    path, plain = "layers.0.attention.out", plan_of(quantization={"name": "int4", "group_size": 64})
    split = plan_of(quantization={"name": "int4", "group_size": 64}, mesh={"tensor": 2})
    sizes = [p.weight_format.quantized[path].scales.spec.shape[-1] for p in (plain, split)]
    assert sizes == [3, 6], "three groups cannot be split over two devices, and their halves can"
    with pytest.raises(ConfigError, match="group_size"):
        plan_of(quantization={"name": "int4", "group_size": 48})


@pytest.mark.parametrize(
    ("method", "share"), [("int4", 1 / 14), ("fp8", 1 / 15), ("int8", 1 / 253)]
)
def test_rounding_is_near_the_numbers(method: str, share: float) -> None:
    """The error is at most a share of the largest number of the group, or nearly so: int4 may cut
    the largest one to lose less in the others.
    """
    from enginebay.plugins.registry import load_registry
    from enginebay_models.int4 import Int4, Int4Options

    registry = load_registry()
    loaded = registry.load(registry.find("quantization", method))
    by = Int4(Int4Options()) if loaded is Int4 else loaded()
    rows = random(6, 128) * np.logspace(-3, 2, 6, dtype=np.float32)[:, None]
    rows[2] = 0
    made = quantized(rows, by=by)
    shares = rows.reshape(*made.scales.shape, -1)
    error = np.abs(quantized_weight(made) - rows).reshape(shares.shape)
    largest = np.abs(shares).max(axis=-1, keepdims=True)
    assert (np.sqrt(np.mean(error**2, axis=-1, keepdims=True)) <= largest * share * 0.8).all()
    assert (error <= largest * (0.31 if method == "int4" else share * 1.01)).all()
    assert not np.asarray(made.values[2]).astype(np.float32).any()


def test_the_scales_of_int4_fit_its_values() -> None:
    """The squared error is well below that of scales which keep the largest number."""
    from enginebay_models.int4 import Int4, Int4Options

    rows = random(64, 128)
    made = quantized(rows, by=Int4(Int4Options()))
    shares = rows.reshape(-1, 32)
    values = np.asarray(made.values).astype(np.float32).reshape(shares.shape)
    error = values * np.asarray(made.scales).astype(np.float32).reshape(-1, 1) - shares
    largest = np.abs(shares).argmax(axis=1)[:, None]
    scales = np.take_along_axis(shares, largest, axis=1) / -8
    usual = np.clip(np.rint(shares / scales), -8, 7) * scales - shares
    assert np.square(error).sum() < 0.935 * np.square(usual).sum()
