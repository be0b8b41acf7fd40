"""The ops linear and grouped_linear in Triton: exact products with quantised weights, and no copy
of a weight in a compiled program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')

from enginebay_triton.compiler import compiler
from enginebay_triton.grouped_linear import grouped_linear
from enginebay_triton.linear import linear
from enginebay_triton.targets import TARGETS
from tests.unit.quantized_products import (
    FORMS,
    QUICK,
    Form,
    assert_no_copy,
    check_grouped_linear,
    check_linear,
)

S = jax.ShapeDtypeStruct
absent = compiler.why_not("sm_90")
needs_compiler = pytest.mark.skipif(absent is not None, reason=absent or "")


@pytest.mark.parametrize("form", QUICK, ids=str)
def test_linear(form: Form) -> None:
    check_linear(linear.interpreted(), form, "float16", 3, 70, 256)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_linear_everywhere(form: Form, dtype: str) -> None:
    """Also many inputs, which several programs share, and several blocks of rows."""
    check_linear(linear.interpreted(), form, dtype, 1, 5, 8, 256)
    check_linear(linear.interpreted(), form, dtype, 20, 30, 2048)
    check_linear(linear.interpreted(), form, dtype, 150, 65, 128)


def test_a_share_of_an_odd_number_of_inputs_is_multiplied_too() -> None:
    check_linear(linear.interpreted(), Form("int4", 7), "float32", 2, 5, 21)
    check_linear(linear.interpreted(), Form("uint4", 20, has_points=True), "float32", 2, 5, 40)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[6]], ids=str)
def test_experts(form: Form) -> None:
    check_grouped_linear(grouped_linear.interpreted(), form, "float32", 70, 128)


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_experts_everywhere(form: Form) -> None:
    check_grouped_linear(grouped_linear.interpreted(), form, "float16", 130, 256)


def compiles(form: Form, target: str, dtype: str, rows: int, outputs: int, inputs: int) -> None:
    weight = form.shapes(outputs, inputs)
    report = compiler.compile(linear, [S((rows, inputs), dtype), weight], target=target)
    figures = report.figures
    assert figures["spill_bytes"] == 0
    assert figures["shared_bytes"] <= TARGETS[target].shared_bytes_per_block
    if report.text:
        assert_no_copy(report.text, outputs, inputs)


@needs_compiler
@pytest.mark.parametrize("form", QUICK, ids=str)
def test_a_decode_compiles_without_a_copy_of_the_weight(form: Form) -> None:
    compiles(form, "sm_90", "bfloat16", 32, 4096, 14336)


@pytest.mark.matrix
@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_compile_for_every_target(form: Form, dtype: str, target: str) -> None:
    for rows in (1, 32, 512):
        compiles(form, target, dtype, rows, 14336, 4096)
    x, sizes = S((256, 2048), jnp.dtype(dtype)), S((128,), jnp.int32)
    experts: list[Any] = [x, form.shapes(128, 768, 2048), sizes]
    report = compiler.compile(grouped_linear, experts, target=target)
    assert report.figures["spill_bytes"] == 0
    if report.text:
        assert_no_copy(report.text, 128, 768, 2048)
