"""The ops linear and grouped_linear in Pallas: exact products with quantised weights, and no copy
of a weight in a compiled program.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from enginebay_pallas.compiler import TOPOLOGIES, compiler
from enginebay_pallas.generations import generation
from enginebay_pallas.grouped_linear import grouped_linear
from enginebay_pallas.linear import linear
from tests.unit.quantized_products import (
    FORMS,
    QUICK,
    Form,
    assert_no_copy,
    check_grouped_linear,
    check_linear,
)

pytestmark = pytest.mark.long

S = jax.ShapeDtypeStruct
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
)


@pytest.mark.parametrize("form", QUICK, ids=str)
def test_linear(form: Form) -> None:
    check_linear(linear.interpreted(), form, "bfloat16", 3, 70, 256)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_linear_everywhere(form: Form, dtype: str) -> None:
    check_linear(linear.interpreted(), form, dtype, 1, 5, 8, 256)
    check_linear(linear.interpreted(), form, dtype, 150, 384, 128)


def test_a_share_of_any_number_of_inputs_is_multiplied_too() -> None:
    check_linear(linear.interpreted(), Form("uint4", 20, has_points=True), "float32", 2, 5, 40)


@pytest.mark.matrix
@pytest.mark.parametrize("share", [7, 96])
def test_shares_that_are_no_part_of_a_tile(share: int) -> None:
    check_linear(linear.interpreted(), Form("int4", share), "float32", 2, 5, 12 * share)


@pytest.mark.parametrize("form", [FORMS[1]], ids=str)
def test_experts(form: Form) -> None:
    check_grouped_linear(grouped_linear.interpreted(), form, "float32", 130, 128)


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts_everywhere(form: Form) -> None:
    check_grouped_linear(grouped_linear.interpreted(), form, "bfloat16", 130, 256)


def compiles(form: Form, target: str, dtype: str, rows: int, outputs: int, inputs: int) -> None:
    weight = form.shapes(outputs, inputs)
    report = compiler.compile(linear, [S((rows, inputs), dtype), weight], target=target)
    assert report.figures["vmem_bytes"] < generation(target).vmem_limit_bytes
    assert_no_copy(report.text, outputs, inputs)


@needs_libtpu
@pytest.mark.parametrize("form", QUICK, ids=str)
def test_a_decode_compiles_without_a_copy_of_the_weight(form: Form) -> None:
    compiles(form, "v5e", "bfloat16", 32, 4096, 14336)


@pytest.mark.matrix
@needs_libtpu
@pytest.mark.parametrize("target", TOPOLOGIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_compile_for_every_target(form: Form, dtype: str, target: str) -> None:
    for rows in (1, 32, 512):
        compiles(form, target, dtype, rows, 14336, 4096)
    x, sizes = S((256, 2048), jnp.dtype(dtype)), S((128,), jnp.int32)
    report = compiler.compile(
        grouped_linear, [x, form.shapes(128, 768, 2048), sizes], target=target
    )
    assert_no_copy(report.text, 128, 768, 2048)
