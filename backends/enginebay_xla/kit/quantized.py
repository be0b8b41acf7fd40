"""Checks of the ops that read weights with quantised weights, for each form that a kernel declares.

A kernel may multiply the numbers of a weight in f32 or, for narrow inputs, in the dtype of the
inputs; and it may subtract zero points before the product or after it. Rounded inputs may differ by
one step where a number is half-way between two steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.caps import Env
from enginebay.weights import FLOAT, QuantizedArray
from enginebay_testing import oracle
from enginebay_testing.covering import OpAxes
from enginebay_testing.exact import hold
from enginebay_testing.op_kit import Extent, LayoutTypes, OpCase, PlainCase, covering_cases
from enginebay_testing.quantized import ONE_SCALE, random_weight, rounded_inputs
from enginebay_testing.verdicts import expect
from enginebay_xla.kit.axes import EMBEDDING, GROUPED_LINEAR, LINEAR
from enginebay_xla.kit.grouped import check_grouped_linear_case, group_sizes
from enginebay_xla.kit.plain import (
    EPS_F32,
    check_embedding_case,
    check_linear_case,
    same_type,
    spread_entries,
)

FORM: dict[str, tuple[str | int, ...]] = {
    "weights": (),
    "activations": (FLOAT,),
    "group_size": (32, 16, 64),
    "groups": (2, 1, 5),
    "scale_dtype": ("float32", "float16"),
}
"""weights: the methods that the kernel declares. group_size, groups: inputs of a group, and groups
of an output. activations: the roundings of inputs that the kernel declares.
"""

NEVER = (("weights", "fp8", "activations", "int8"),)
"""Inputs are rounded to whole numbers for weights of whole numbers only."""

QUANTIZED_LINEAR = OpAxes(
    "quantized_linear",
    {
        "dtype": LINEAR.values["dtype"],
        **FORM,
        "rows": (3, 1, 17, 129),
        "outputs": (48, 1, 65, 1700),
        "in_dims": (1, 2),
        "out_dims": (1, 2),
        "bias": ("none", "plain"),
        "out_dtype": (None, "float32"),
        "data": ("plain", "outlier", "rows_apart", "nan_row"),
    },
    never=NEVER,
)
QUANTIZED_GROUPED_LINEAR = OpAxes(
    "quantized_grouped_linear",
    {
        "dtype": GROUPED_LINEAR.values["dtype"],
        **FORM,
        "experts": (4, 1, 9),
        "sizes": GROUPED_LINEAR.values["sizes"],
        "past": (2, 0),
        "outputs": (48, 1, 65),
        "out_dtype": (None, "float32"),
        "data": ("plain", "rows_apart"),
    },
    never=NEVER,
)
QUANTIZED_EMBEDDING = OpAxes(
    "quantized_embedding",
    {
        **{axis: values for axis, values in FORM.items() if axis != "activations"},
        "vocab": (11, 1, 257),
        "tokens": (4, 1, 17),
        "ids": EMBEDDING.values["ids"],
    },
)

Cases = Callable[[Any, Env, LayoutTypes, Extent], Iterator[OpCase]]


def with_quantized(plain: Cases, axes: OpAxes, check: Callable[[Any, PlainCase], None]) -> Cases:
    """Return the cases of `plain`, and those of `axes` for the forms that a kernel declares."""

    def cases(kernel: Any, env: Env, layouts: LayoutTypes, extent: Extent) -> Iterator[OpCase]:
        yield from plain(kernel, env, layouts, extent)
        if extent.quantizations:
            own = axes.having(weights=extent.quantizations)
            if "activations" in axes.values:
                own = own.having(activations=(FLOAT, *extent.activation_quantizations))
            yield from covering_cases(own, check)(kernel, env, layouts, extent)

    return cases


def _weight(case: PlainCase, outputs: tuple[int, ...], inputs: tuple[int, ...]) -> QuantizedArray:
    return random_weight(
        str(case.row["weights"]),
        (*outputs, *inputs),
        len(inputs),
        case.int("groups"),
        activations=str(case.row.get("activations", FLOAT)),
        scale_dtype=str(case.row["scale_dtype"]),
        seed=case.seed,
    )


def _inputs(case: PlainCase) -> tuple[int, ...]:
    """Return the dimensions of the inputs. A weight with one scale may have any number of them."""
    number = case.int("group_size") * case.int("groups")
    if case.row["weights"] in ONE_SCALE:
        number += number % 3
    return (number,) if case.row.get("in_dims", 1) == 1 else (number // 4, 4)


def _multiplied(x: np.ndarray, weight: QuantizedArray) -> np.ndarray:
    """Return what a weight multiplies: x, or its rounded rows."""
    return x if weight.activations == FLOAT else rounded_inputs(x)


def _magnitudes(weight: QuantizedArray) -> np.ndarray:
    """Return the magnitudes of the terms of each number of a weight, f64, in its shape."""
    scales = np.abs(np.asarray(weight.scales).astype(np.float64))
    large = np.abs(np.asarray(weight.values).astype(np.float64)).reshape(*scales.shape, -1)
    if weight.zero_points is not None:
        large = large + np.abs(np.asarray(weight.zero_points).astype(np.float64))[..., None]
    return np.asarray((large * scales[..., None]).reshape(weight.shape))


def _rounding(x: np.ndarray, weight: QuantizedArray) -> np.ndarray:
    """Return numbers like x whose product with the magnitudes bounds the error of a sum."""
    wide, num_in = np.abs(x.astype(np.float64)), math.prod(x.shape[1:])
    if weight.activations != FLOAT:
        return wide * 8 * EPS_F32
    narrow = 0.0 if x.dtype == np.float32 else oracle.EPS[str(x.dtype)]
    return wide * (max(4.0, math.sqrt(num_in)) * EPS_F32 + narrow)


def _flips(x: np.ndarray, weight: QuantizedArray) -> np.ndarray:
    """Return the error [T, 1] of two inputs of each row that are rounded to the next step, for a
    weight of 1; 0 where inputs are not rounded.
    """
    if weight.activations == FLOAT:
        return np.zeros((len(x), 1))
    flat = np.abs(x.astype(np.float64)).reshape(len(x), math.prod(x.shape[1:]))
    return np.asarray(flat.max(axis=1, initial=0)[:, None] * 2 / 127)


def check_quantized_linear_case(kernel: Any, case: PlainCase) -> None:
    """Check a product with the numbers of a quantised weight, then a bias, then one rounding."""
    rng, number, in_dims = case.rng(), case.int("outputs"), _inputs(case)
    out_dims = (number,) if case.int("out_dims") == 1 else (max(1, number // 4), 4)
    x = spread_entries(rng, (case.int("rows"), *in_dims), str(case.row["data"])).astype(case.dtype)
    weight = _weight(case, out_dims, in_dims)
    bias = None if case.row["bias"] == "none" else rng.normal(size=out_dims).astype(case.dtype)
    out_dtype = case.row["out_dtype"]
    call = functools.partial(kernel, out_dtype=out_dtype)
    got = case.run(call, x, jax.device_put(weight), bias)
    finite = np.isfinite(x.astype(np.float64)).all(axis=tuple(range(1, x.ndim)))
    x = x[finite]
    expected = oracle.linear(_multiplied(x, weight), oracle.quantized_weight(weight), bias)
    wanted = str(out_dtype or case.row["dtype"])
    same_type(got, (case.int("rows"), *out_dims), wanted)
    sums = oracle.linear(_rounding(x, weight), _magnitudes(weight))
    outputs = np.abs(oracle.quantized_weight(weight)).reshape(*out_dims, -1).max(axis=-1)
    sums = sums + _flips(x, weight).reshape(-1, *(1,) * len(out_dims)) * outputs
    _hold(got[finite], expected, sums, wanted, "quantized linear")


def check_quantized_grouped_linear_case(kernel: Any, case: PlainCase) -> None:
    """Check each row against the product with its group's quantised weight; other rows are 0."""
    rng, in_dims = case.rng(), _inputs(case)
    sizes = group_sizes(str(case.row["sizes"]), case.int("experts"), case.seed)
    count = int(sizes.sum())
    shape = (count + case.int("past"), *in_dims)
    x = spread_entries(rng, shape, str(case.row["data"])).astype(case.dtype)
    weight = _weight(case, (len(sizes), case.int("outputs")), in_dims)
    out_dtype = case.row["out_dtype"]
    call = functools.partial(kernel, out_dtype=out_dtype)
    got = case.run(call, x, jax.device_put(weight), sizes)
    wanted = str(out_dtype or case.row["dtype"])
    same_type(got, (shape[0], case.int("outputs")), wanted)
    expect(not got[count:].astype(np.float64).any(), "rows after the last group are not 0")
    x = x[:count]
    exact = oracle.quantized_weight(weight)
    expected = oracle.grouped_linear(_multiplied(x, weight), exact, sizes)
    sums = oracle.grouped_linear(_rounding(x, weight), _magnitudes(weight), sizes)
    outputs = np.abs(exact).max(axis=-1)[np.repeat(np.arange(len(sizes)), sizes)]
    sums = sums + _flips(x, weight) * outputs
    _hold(got[:count], expected, sums, wanted, "quantized grouped_linear")


def _hold(got: np.ndarray, expected: np.ndarray, sums: np.ndarray, dtype: str, what: str) -> None:
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    allowed = oracle.EPS[dtype] * np.abs(expected) + sums + smallest
    hold(np.abs(got.astype(np.float64) - expected), allowed, what)


def check_quantized_embedding_case(kernel: Any, case: PlainCase) -> None:
    """Check that each row has the numbers of the table's row in f32, within two roundings."""
    vocab, tokens, rng = case.int("vocab"), case.int("tokens"), case.rng()
    table = _weight(case, (vocab,), _inputs(case))
    kinds = {
        "mixed": rng.integers(0, vocab, tokens),
        "last": np.full(tokens, vocab - 1),
        "equal": np.full(tokens, vocab // 2),
        "all": np.arange(tokens) % vocab,
    }
    ids = kinds[str(case.row["ids"])].astype(np.int32)
    got = case.run(kernel, jax.device_put(table), ids)
    rows = jax.tree.map(lambda array: array[ids], table)
    same_type(got, rows.shape, "float32")
    error = np.abs(got.astype(np.float64) - oracle.quantized_weight(rows))
    hold(error, 2 * EPS_F32 * _magnitudes(rows), "quantized embedding")


linear_cases = with_quantized(
    covering_cases(LINEAR, check_linear_case), QUANTIZED_LINEAR, check_quantized_linear_case
)
grouped_linear_cases = with_quantized(
    covering_cases(GROUPED_LINEAR, check_grouped_linear_case),
    QUANTIZED_GROUPED_LINEAR,
    check_quantized_grouped_linear_case,
)
embedding_cases = with_quantized(
    covering_cases(EMBEDDING, check_embedding_case),
    QUANTIZED_EMBEDDING,
    check_quantized_embedding_case,
)
