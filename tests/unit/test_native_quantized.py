"""Products with quantised weights in C++: every form beside exact ones, equal bits for a row, and
which products are made in panels.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.errors import UnsupportedError
from enginebay.weights import QuantizedArray
from enginebay_native import plugin
from enginebay_testing.quantized import input_scales, rounded_inputs

pytestmark = pytest.mark.xdist_group("native")

FORMS: dict[str, tuple[Any, int, int, bool]] = {
    "int8": (jnp.int8, -128, 127, False),
    "int8_group": (jnp.int8, -128, 127, True),
    "int4": (jnp.int4, -8, 7, False),
    "uint4": (jnp.uint4, 0, 15, True),
    "fp8": (jnp.float8_e4m3fn, -448, 448, False),
}
"""Method -> dtype of values, lowest and highest value, whether there are zero points."""

CASES: list[tuple[str, int, int, int, str]] = [
    ("int8", 192, 50, 1, "float32"),  # whole tiles of inputs, and outputs that fill no tile
    ("int8", 130, 7, 1, "float32"),
    ("int8_group", 96, 37, 3, "float16"),
    ("int8_group", 256, 9, 1, "float32"),
    ("int8_group", 96, 10, 6, "float32"),
    ("int4", 160, 21, 5, "float16"),
    ("int4", 512, 6, 4, "float32"),
    ("uint4", 192, 21, 3, "float32"),
    ("uint4", 144, 12, 9, "float16"),
    ("uint4", 98, 5, 1, "float16"),
    ("fp8", 75, 19, 1, "float32"),
]
"""Method, inputs, outputs, groups, dtype of scales."""

ROUNDED = [pytest.param(name, marks=pytest.mark.long) for name in ("int8", "int8_group")]
"""Roundings of inputs, in long tests: their C++ is compiled anew."""

IN_SHORT = "int8_group"
"""The form whose products are not in long tests: the C++ of each form is compiled anew."""
METHODS = [
    name if name == IN_SHORT else pytest.param(name, marks=pytest.mark.long) for name in FORMS
]

OTHERS: list[tuple[str, int, int, int, str]] = [
    ("int8_group", 96, 8, 2, "float32"),  # 48 inputs a group
    ("int4", 64, 8, 8, "float32"),  # 8 inputs a group
    ("int4", 33, 8, 1, "float32"),  # half a byte is left over
]
"""The same fields, for weights that only panels serve."""


@pytest.fixture(scope="module")
def linear() -> Any:
    try:
        return importlib.import_module("enginebay_native.linear").linear
    except UnsupportedError as error:
        pytest.skip(str(error))


def make_weight(
    method: str, num_in: int, outputs: int, groups: int, scale_dtype: str, activations: str
) -> QuantizedArray:
    rng = np.random.default_rng([num_in, outputs])
    dtype, low, high, has_points = FORMS[method]
    values = rng.integers(low, high + 1, (outputs, num_in)).astype(dtype)
    scales = rng.uniform(0.01, 0.1, (outputs, groups)).astype(scale_dtype)
    points = rng.uniform(low, high, scales.shape).astype(scale_dtype) if has_points else None
    return QuantizedArray(values, scales, points, method, activations)


def make_rows(rows: int, num_in: int) -> np.ndarray:
    return np.random.default_rng([rows, num_in]).normal(size=(rows, num_in)).astype(np.float32)


def exact(x: np.ndarray, weight: QuantizedArray) -> tuple[np.ndarray, np.ndarray]:
    """The product in f64, and that of absolute values."""
    rows = x.astype(np.float64)
    if weight.activations != "float":
        rows = rounded_inputs(x, weight.activations)
    shares = weight.values.astype(np.float64).reshape(*weight.scales.shape, -1)
    if weight.zero_points is not None:
        shares = shares - weight.zero_points.astype(np.float64)[..., None]
    full = (shares * weight.scales.astype(np.float64)[..., None]).reshape(weight.shape)
    return rows @ full.T, np.abs(rows) @ np.abs(full).T


def steps_of_midway_inputs(x: np.ndarray, weight: QuantizedArray) -> np.ndarray:
    """What a product may differ by where an input lies midway between two numbers: the last bit of
    a scale, which XLA multiplies by the inverse of 127, then decides.
    """
    scales = input_scales(x.astype(np.float64), weight.activations)
    numbers = np.abs(x) / np.where(scales > 0, scales, 1)
    is_midway = np.abs(numbers - np.floor(numbers) - 0.5) < 1e-4
    return exact(is_midway * scales, dataclasses.replace(weight, activations="float"))[1]


@pytest.mark.parametrize("activations", ["float", *ROUNDED])
@pytest.mark.parametrize("method", METHODS)
def test_every_form_is_the_exact_product_and_a_row_has_the_same_bits_in_every_batch(
    linear: Any, method: str, activations: str
) -> None:
    """In one program: six batches of the same rows, which use every tile of rows."""
    cases = [case for case in CASES if case[0] == method]
    weights = [make_weight(*case, activations) for case in cases]
    x = [make_rows(45, num_in) for _, num_in, *_ in cases]
    batches = [slice(0, 45), slice(0, 1), slice(3, 5), slice(9, 12), slice(20, 27), slice(4, 37)]

    @jax.jit
    def products(x: list[Any], weights: list[Any]) -> Any:
        return [[linear(a[rows], w) for rows in batches] for a, w in zip(x, weights, strict=True)]

    for case, a, weight, got in zip(cases, x, weights, products(x, weights), strict=True):
        wanted, sums = exact(a, weight)
        whole = np.asarray(got[0])
        assert (np.abs(whole - wanted) <= 1e-6 * sums).all(), case
        for rows, part in zip(batches, got, strict=True):
            assert np.asarray(part).tobytes() == whole[rows].tobytes(), (case, rows)


@pytest.mark.long
@pytest.mark.parametrize("activations", ["float", "int8", "int8_group"])
def test_panels_are_exact_products(linear: Any, activations: str) -> None:
    """The rows are those of a prompt; the last rows and outputs fill no tile."""
    long = [("int8_group", 2064, 50, 3, "float32"), ("int4", 1100, 97, 1, "float16")]
    cases = [*CASES, *long, *OTHERS]
    weights = [make_weight(*case, activations) for case in cases]
    weights.append(dataclasses.replace(make_weight(*CASES[7], activations), zero_points=None))
    x = [make_rows(135, weight.shape[1]) for weight in weights]
    panels = importlib.import_module("enginebay_native.quantized").in_panels
    got = jax.jit(lambda x, weights: [panels(*pair) for pair in zip(x, weights, strict=True)])
    for a, weight, product in zip(x, weights, got(x, weights), strict=True):
        wanted, sums = exact(a, weight)
        assert (np.abs(np.asarray(product) - wanted) <= 1e-6 * sums).all(), weight.method


GROUPED: list[tuple[str, int, int, int, str]] = [
    ("int8", 192, 34, 1, "float32"),
    ("int8_group", 96, 10, 3, "float16"),
    ("int4", 160, 21, 5, "float16"),
    ("uint4", 192, 7, 3, "float32"),
    ("fp8", 75, 19, 1, "float32"),
    ("int4", 33, 8, 1, "float32"),
]


@pytest.mark.long
@pytest.mark.parametrize("activations", ["float", "int8", "int8_group"])
def test_experts_are_exact_products(linear: Any, activations: str) -> None:
    """Experts have few rows and many; the last rows have no expert. A row alone has the same
    bits.
    """
    grouped_linear = importlib.import_module("enginebay_native.grouped_linear").grouped_linear
    sizes = [np.array(each, np.int32) for each in ([5, 0, 33], [260, 0, 130], [0, 0, 1])]
    weights = [make_experts(*case, activations) for case in GROUPED]

    @jax.jit
    def products(x: Any, weights: Any, sizes: Any) -> Any:
        return [
            [grouped_linear(a, w, each) for a, each in zip(rows, sizes, strict=True)]
            for rows, w in zip(x, weights, strict=True)
        ]

    x = []
    for _, num_in, *_ in GROUPED:
        few, many = make_rows(41, num_in), make_rows(400, num_in)
        x.append([few, many, few[37:38]])
    for weight, rows, got in zip(weights, x, products(x, weights, sizes), strict=True):
        for a, counts, product in zip(rows, sizes, got, strict=True):
            first = 0
            for i, count in enumerate(counts):
                own = slice(first, first + count)
                one = jax.tree.map(lambda array, i=i: array[i], weight)
                wanted, sums = exact(a[own], one)
                allowed = 1e-6 * sums
                if activations == "int8_group":
                    allowed += steps_of_midway_inputs(a[own], one)
                assert (np.abs(np.asarray(product[own]) - wanted) <= allowed).all()
                first += count
            assert not np.asarray(product[first:]).any()
        assert np.asarray(got[2][0]).tobytes() == np.asarray(got[0][37]).tobytes()


def make_experts(
    method: str, num_in: int, outputs: int, groups: int, scale_dtype: str, activations: str
) -> QuantizedArray:
    """A weight of three experts."""
    flat = make_weight(method, num_in, 3 * outputs, groups, scale_dtype, activations)
    experts: QuantizedArray = jax.tree.map(lambda a: a.reshape(3, outputs, -1), flat)
    return experts


def calls(linear: Any, rows: int, weight: QuantizedArray) -> list[str]:
    """The functions of the library that a product calls."""
    x = make_rows(rows, weight.shape[1])
    return re.findall(r"target_name=enginebay_(\w+)", str(jax.make_jaxpr(linear)(x, weight)))


def test_no_name_of_a_call_is_within_another() -> None:
    """A stored program is searched for the names of calls, and only those are registered."""
    names = [f"enginebay_{name}" for name in (*sum(plugin.FORMS.values(), ()), *plugin.QUANTIZED)]
    assert not [(a, b) for a in names for b in names if a != b and a in b]


@pytest.mark.long
def test_rounded_rows_are_multiplied_by_their_kernel_whatever_their_number(linear: Any) -> None:
    for case in CASES:
        plain, rounded = (make_weight(*case, kind) for kind in ("float", "int8"))
        form = {"uint4": "u4", "int4": "s4", "int8_group": "zeros_s8"}.get(case[0], "s8")
        own = {"int8": "linear_s8", "fp8": "linear_f8"}.get(case[0], f"quantized_linear_{form}")
        assert calls(linear, 128, plain) == [own]
        assert calls(linear, 129, plain) == ["panel_linear"]
        # Values of floating dtypes have no whole products.
        whole = "panel_linear" if case[0] == "fp8" else f"rounded_linear_{form}"
        assert calls(linear, 300, rounded) == [whole]


@pytest.mark.long
@pytest.mark.parametrize("activations", ["float", "int8", "int8_group"])
def test_other_groups_and_weights_are_multiplied_in_panels(linear: Any, activations: str) -> None:
    others = [make_weight(*case, activations) for case in OTHERS]
    others.append(
        dataclasses.replace(
            make_weight("uint4", 64, 8, 2, "float32", activations), zero_points=None
        )
    )
    for weight in others:
        assert calls(linear, 5, weight) == ["panel_linear"]


@pytest.mark.long
def test_a_row_that_is_not_finite_gives_nan_and_changes_no_other_row(linear: Any) -> None:
    weight = make_weight("int4", 64, 6, 2, "float32", "int8")
    x = make_rows(9, 64)
    odd = x.copy()
    odd[2, 63], odd[5, 0], odd[7] = np.inf, np.nan, 0.0
    product = jax.jit(linear)
    plain, got = (np.asarray(product(value, weight)) for value in (x, odd))
    kept = [0, 1, 3, 4, 6, 8]
    assert got[kept].tobytes() == plain[kept].tobytes()
    assert np.isnan(got[[2, 5]]).all()
    assert not got[7].any()


@pytest.mark.parametrize(
    ("method", "activations"),
    [(IN_SHORT, "float"), pytest.param("int8", "int8", marks=pytest.mark.long)],
)
def test_leading_dimensions_bias_and_result_dtype(
    linear: Any, method: str, activations: str
) -> None:
    weight = make_weight(method, 64, 12, 1, "float32", activations)
    heads = jax.tree.map(lambda a: a.reshape(3, 4, *((8, 8) if a.size > 12 else (1,))), weight)
    x = make_rows(2, 64)
    bias: np.ndarray = np.arange(12, dtype=np.float32).reshape(3, 4)
    product = jax.jit(functools.partial(linear, out_dtype="bfloat16"))
    got = product(x.reshape(2, 8, 8), heads, bias)
    wanted = np.asarray(jax.jit(linear)(x, weight)).reshape(2, 3, 4) + bias
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, wanted.astype(jnp.bfloat16))
    assert jax.jit(linear)(x[:0], weight).shape == (0, 12)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_processors_without_dot_products_of_bytes_give_the_same_whole_numbers(
    linear: Any, level: str, tmp_path: Path
) -> None:
    """The library for a level without VNNI is compared with the library for this processor."""
    compiling = importlib.import_module("enginebay_native.compiling")
    quantized = importlib.import_module("enginebay_native.quantized")
    if not compiling.LEVELS[level] <= set(compiling.processor_features().split()):
        pytest.skip(f"this processor is not {level}")
    for name in (each for each in plugin.QUANTIZED if each != "panel_linear"):
        library = compiling.build_library(name, level, tmp_path)
        function = getattr(ctypes.CDLL(str(library)), f"enginebay_{name}")
        target = f"enginebay_{name}_{level}"
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    for case in CASES[:-1]:
        for activations in ("float", "int8", "int8_group"):
            weight = make_weight(*case, activations)
            x = make_rows(21, case[1])
            own, other = (product_of(quantized, name, x, weight) for name in (None, level))
            if activations == "int8" and case[0] == "int8":
                assert other.tobytes() == own.tobytes(), case
            wanted, sums = exact(x, weight)
            allowed = 1e-6 * sums
            if activations == "int8_group":
                allowed += steps_of_midway_inputs(x, weight)
            assert (np.abs(other - wanted) <= allowed).all(), case


def product_of(
    quantized: Any, level: str | None, x: np.ndarray, weight: QuantizedArray
) -> np.ndarray:
    """The product by the library that is registered for a level; None: that of this processor."""

    def product(x: Any, weight: QuantizedArray) -> Any:
        return quantized.in_cpp(x, weight, block_bytes=4096, tasks_per_thread=2)

    with pytest.MonkeyPatch.context() as patch:
        if level is not None:
            patch.setattr(quantized, "register", lambda name: f"enginebay_{name}_{level}")
        return np.asarray(jax.jit(product)(x, weight))
