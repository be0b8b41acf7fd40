"""The ops that read quantised weights, in plain JAX, for every form of weights."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops.caps import Env
from enginebay.plugins.registry import load_registry
from enginebay.weights import QuantizedArray
from enginebay_testing.op_kit import CaseBudget, kit_of
from enginebay_testing.oracle import quantized_weight
from enginebay_testing.quantized import FORMS, random_weight, rounded_inputs
from enginebay_xla.grouped_linear import grouped_linear, grouped_linear_reference
from enginebay_xla.linear import embedding, linear
from enginebay_xla.quantized_linear import CPU_BLOCK_BYTES

ROUNDINGS = ("float", "int8", "int8_group")


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def inputs_of(x: np.ndarray, rounding: str) -> np.ndarray:
    """What the product multiplies: x, or its rounded rows."""
    return x if rounding == "float" else rounded_inputs(x, rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("method", FORMS)
def test_a_product_dequantises_no_weight_as_a_whole(method: str, rounding: str) -> None:
    """The program needs the memory of a block of outputs, whose last one overlaps another."""
    outputs, inputs = 1500, 576
    weight = random_weight(method, (outputs, inputs), 1, 18, activations=rounding)
    x, weight = random(3, inputs), jax.device_put(weight)
    program = jax.jit(linear).lower(x, weight).compile()
    wanted = inputs_of(x, rounding) @ quantized_weight(weight).T
    np.testing.assert_allclose(program(x, weight), wanted, rtol=1e-4, atol=1e-3)
    temporary = program.memory_analysis().temp_size_in_bytes
    # a copy with one byte for each number would not fit beside the block
    assert temporary < CPU_BLOCK_BYTES * 1.3 < outputs * inputs * 1.6


@pytest.mark.xdist_group("native")
@pytest.mark.parametrize(
    "rounding", ["float", *(pytest.param(name, marks=pytest.mark.long) for name in ROUNDINGS[1:])]
)
@pytest.mark.parametrize("kernels", ["xla", pytest.param("native", marks=pytest.mark.long)])
def test_no_program_of_a_prompt_holds_a_dequantised_weight(kernels: str, rounding: str) -> None:
    """256 rows in f32 and bf16, by every form of weights and of experts that the kernels serve."""
    outputs, inputs, registry = 1500, 576, load_registry()
    ops: dict[str, Any] = {}
    for op in ("linear", "grouped_linear"):
        declared = registry.find("kernel", kernels, op)
        capabilities = CaseBudget(triples=False).of(declared)
        if rounding == "float" or capabilities.activation_quantizations:
            ops[op] = registry.load(declared), capabilities.quantizations
    x, sizes = random(256, inputs), np.array([100, 156], np.int32)
    rows = [x, x.astype(jnp.bfloat16)]

    def shapes(methods: Sequence[str], *leading: int) -> list[Any]:
        shape = (*leading, outputs, inputs)
        weights = [random_weight(form, shape, 1, 18, activations=rounding) for form in methods]
        return [jax.eval_shape(lambda weight: weight, weight) for weight in weights]

    def products(rows: Any, sizes: Any, plain: Any, experts: Any) -> Any:
        one, many = (ops.get(op, (None, ()))[0] for op in ("linear", "grouped_linear"))
        return [
            [one(x, weight) for weight in plain] + [many(x, weight, sizes) for weight in experts]
            for x in rows
        ]

    plain = shapes(ops["linear"][1])
    experts = shapes(ops["grouped_linear"][1], 2) if "grouped_linear" in ops else []
    program = jax.jit(products).lower(rows, sizes, plain, experts).compile()
    found = re.findall(r"\b(?:f64|f32|f16|bf16|s32)\[([\d,]+)\]", program.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in found)
    assert 256 * outputs <= largest < outputs * inputs, largest


@pytest.mark.parametrize("method", FORMS)
def test_rows_of_a_table_are_dequantised_alone(method: str) -> None:
    table, ids = random_weight(method, (400, 64), 1, 4), np.array([7, 0, 399, 7], np.int32)
    rounded = dataclasses.replace(table, activations="int8")
    program = jax.jit(embedding).lower(rounded, ids).compile()
    rows = quantized_weight(table)[ids].astype(np.float32)
    np.testing.assert_allclose(program(jax.device_put(rounded), ids), rows, rtol=1e-6)
    assert program.memory_analysis().temp_size_in_bytes < 4 * 64 * 8


@pytest.mark.long
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("method", ["int4", "uint4", "fp8"])
def test_each_group_of_rows_is_multiplied_by_its_weight(method: str, rounding: str) -> None:
    """The program converts and copies the weight of one group at a time."""
    sizes = np.array([3, 0, 5, 1], np.int32)
    weight: QuantizedArray = random_weight(method, (4, 240, 64), 1, 2, activations=rounding)
    x, owners = random(9, 64), np.repeat(np.arange(4), sizes)
    wanted = np.einsum("ti,toi->to", inputs_of(x, rounding), quantized_weight(weight)[owners])
    arguments = x, jax.device_put(weight), jnp.asarray(sizes)
    program = jax.jit(grouped_linear).lower(*arguments).compile()
    for op in (program, grouped_linear_reference):
        got = op(*arguments)
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3)
    assert program.memory_analysis().temp_size_in_bytes < 1.7 * 240 * 64 * 4


def test_narrow_inputs_are_multiplied_in_their_dtype() -> None:
    weight = random_weight("int4", (40, 64), 1, 2)
    x = random(3, 64).astype(jnp.bfloat16)
    got = np.asarray(jax.jit(linear)(x, jax.device_put(weight)))
    wanted = x.astype(np.float32) @ quantized_weight(weight).T
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), wanted, rtol=0.02, atol=0.05)


def test_a_kernel_is_checked_in_every_form_that_it_declares() -> None:
    registry = load_registry()
    kit = kit_of(registry, "linear")
    declared = registry.find("kernel", "xla", "linear")
    none = registry.find("kernel", "xla", "rms_norm")
    extent = CaseBudget(triples=False).of(declared)
    assert extent.quantizations == tuple(FORMS)
    assert extent.activation_quantizations == ROUNDINGS[1:]
    names = [case.name for case in kit.cases(linear, Env("cpu"), (), extent)]
    quantized = [name for name in names if name.startswith("quantized_linear[")]
    for form in list(FORMS)[1:]:
        assert any(f"weights_{form}" in name for name in quantized)
    for rounding in ROUNDINGS[1:]:
        assert any(f"activations_{rounding}-" in name for name in quantized)
    plain = CaseBudget(triples=False).of(none)
    assert not any("quantized" in c.name for c in kit.cases(linear, Env("cpu"), (), plain))
