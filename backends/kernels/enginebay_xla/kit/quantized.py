"""Checks of the ops that read weights with quantised weights, for each form that a kernel declares.

A kernel may multiply the numbers of a weight in f32 or, for narrow inputs, in the dtype of the
inputs; and it may subtract zero points before the product or after it. Rounded inputs may differ by
one step where a number is half-way between two steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.caps import Env
from enginebay.weights import FLOAT, QuantizedArray
from enginebay_testing import oracle
from enginebay_testing.case_runs import other_inputs
from enginebay_testing.covering import OpAxes
from enginebay_testing.exact import hold
from enginebay_testing.op_kit import CaseBudget, LayoutTypes, OpCase, PlainCase, covering_cases
from enginebay_testing.quantized import (
    NUMBERS,
    ONE_SCALE,
    input_scales,
    random_weight,
    rounded_inputs,
)
from enginebay_testing.verdicts import expect
from enginebay_xla.kit.axes import EMBEDDING, GROUPED_LINEAR, LINEAR, never_both
from enginebay_xla.kit.grouped import (
    check_grouped_linear_case,
    group_sizes,
    other_group_inputs,
)
from enginebay_xla.kit.places import causes_of, hold_rows
from enginebay_xla.kit.plain import (
    EPS_F32,
    check_embedding_case,
    check_linear_case,
    embedding_ids,
    entries,
    same_type,
)

FORM: dict[str, tuple[str | int, ...]] = {
    "weights": (),
    "activations": (FLOAT,),
    "group_size": (32, 16, 64),
    "groups": (2, 1, 5, 65),
    "scale_dtype": ("float32", "float16"),
    "numbers": NUMBERS,
}
"""weights: the methods that the kernel declares. group_size, groups: inputs of a group, and groups
of an output. activations: the roundings of inputs that the kernel declares. numbers: as in
random_weight.
"""

NEVER = (
    ("weights", "fp8", "activations", "int8"),
    ("weights", "fp8", "activations", "int8_group"),
    *never_both("groups", (64, 65, 129), "outputs", (1024, 1025, 1700, 2049, 4097)),
    *never_both("groups", (64, 65, 129), "experts", (16, 60, 64, 128)),
    *never_both("rows", (512, 513, 1025), "outputs", (1024, 1025, 2049, 4097)),
    *never_both("rows", (2049,), "outputs", (1024, 1025, 1700, 2049, 4097)),
    *never_both("rows", (2049,), "groups", (64, 65, 129)),
)
"""Inputs are rounded to whole numbers for weights of whole numbers only; some sizes would take too
long together.
"""

QUANTIZED_LINEAR = OpAxes(
    "quantized_linear",
    {
        "dtype": LINEAR.values["dtype"],
        **FORM,
        "rows": (3, 1, 17, 513, 0),
        "outputs": (48, 1, 65, 1700),
        "in_dims": (1, 2),
        "out_dims": (1, 2),
        "bias": ("none", "plain"),
        "out_dtype": (None, "float32"),
        "data": ("plain", "one_sign", "rows_apart", "nan_row", "special_rows", "largest"),
    },
    never=NEVER,
    more={
        "group_size": (128,),
        "groups": (3, 4, 8, 16, 17, 33, 64, 129),
        "rows": (2, 8, 16, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257, 512, 1025, 2049),
        "outputs": (16, 33, 64, 127, 128, 129, 255, 256, 257, 512, 1025, 2049, 4097),
    },
    blocks=("rows", "outputs"),
    extremes=(
        {"groups": 257, "group_size": 16},
        {"rows": 4133, "out_dtype": "float32"},
        {"outputs": 65_609, "groups": 1},
        {
            "rows": 17,
            "group_size": 1024,
            "groups": 1,
            "activations": "int8",
            "data": "special_rows",
        },
    ),
    each=("weights", "activations"),
)
QUANTIZED_GROUPED_LINEAR = OpAxes(
    "quantized_grouped_linear",
    {
        "dtype": GROUPED_LINEAR.values["dtype"],
        **FORM,
        "experts": (4, 1, 9),
        "sizes": ("mixed", "one_has_all", "none"),
        "past": (2, 0),
        "outputs": (48, 1, 65),
        "out_dtype": (None, "float32"),
        "data": ("plain", "one_sign", "special_rows"),
    },
    never=NEVER,
    more={
        "group_size": (128,),
        "groups": (3, 8, 17, 33, 64),
        "experts": (8, 16, 60, 64, 128),
        "sizes": ("one_each", "empty_ends", "even"),
        "data": ("nan_row", "rows_apart"),
        "past": (300,),
        "outputs": (16, 31, 33, 64, 127, 128, 129, 256, 257, 513),
    },
    blocks=("outputs",),
    extremes=(
        {"groups": 257, "group_size": 16},
        {"experts": 300, "sizes": "one_each"},
        {"group_size": 1024, "groups": 1, "activations": "int8", "data": "special_rows"},
    ),
    each=("weights", "activations"),
)
QUANTIZED_EMBEDDING = OpAxes(
    "quantized_embedding",
    {
        **{axis: values for axis, values in FORM.items() if axis != "activations"},
        "vocab": (11, 1, 257, 65_537),
        "tokens": (4, 1, 17, 513, 0),
        "ids": EMBEDDING.values["ids"],
    },
    never=(
        *never_both("vocab", (65_537, 131_073), "groups", (4, 5, 16, 17, 64, 65)),
        *never_both("vocab", (131_073,), "group_size", (32, 64, 128)),
    ),
    more={
        "group_size": (128,),
        "groups": (4, 16, 17, 64),
        "vocab": (255, 256, 1025, 131_073),
        "tokens": (31, 32, 33, 128, 129, 256, 257, 512, 1025, 2049),
    },
    extremes=({"tokens": 4133}, {"groups": 257, "group_size": 16}),
    each=("weights",),
)

Cases = Callable[[Any, Env, LayoutTypes, CaseBudget], Iterator[OpCase]]


def with_quantized(plain: Cases, axes: OpAxes, check: Callable[[Any, PlainCase], None]) -> Cases:
    """Return the cases of `plain`, and those of `axes` for the forms that a kernel declares."""

    def cases(kernel: Any, env: Env, layouts: LayoutTypes, extent: CaseBudget) -> Iterator[OpCase]:
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
        numbers=str(case.row["numbers"]),
    )


def _inputs(case: PlainCase) -> tuple[int, ...]:
    """Return the dimensions of the inputs. A weight with one scale may have any number of them."""
    number = case.int("group_size") * case.int("groups")
    if case.row["weights"] in ONE_SCALE:
        number += number % 3
    return (number,) if case.row.get("in_dims", 1) == 1 else (number // 4, 4)


def _multiplied(x: np.ndarray, weight: QuantizedArray) -> np.ndarray:
    """Return what a weight multiplies: x, or its rounded rows."""
    return x if weight.activations == FLOAT else rounded_inputs(x, weight.activations)


def _magnitudes(weight: QuantizedArray) -> np.ndarray:
    """Return the magnitudes of the terms of each number of a weight, f64, in its shape."""
    scales = np.abs(np.asarray(weight.scales).astype(np.float64))
    of_a_group = math.prod(weight.shape[scales.ndim - 1 :]) // scales.shape[-1]
    values = np.asarray(weight.values).astype(np.float64)
    large = np.abs(values).reshape(*scales.shape, of_a_group)
    if weight.zero_points is not None:
        large = large + np.abs(np.asarray(weight.zero_points).astype(np.float64))[..., None]
    return np.asarray((large * scales[..., None]).reshape(weight.shape))


def _sum_errors(x: np.ndarray, weight: QuantizedArray) -> np.ndarray:
    """Return bounds f64 [T, *outputs] on the errors of the sums of x [T, *inputs] and a weight.

    A kernel may round each number of a weight to the dtype of x. Within a group such errors may
    have one sign; those of the groups of an output are independent.
    """
    wide, num_in = np.abs(x.astype(np.float64)), math.prod(x.shape[1:])
    large = _magnitudes(weight)
    outputs, groups = weight.scales.shape[:-1], weight.scales.shape[-1]
    rows = wide.reshape(len(x), groups, num_in // groups).transpose(1, 0, 2)
    columns = large.reshape(math.prod(outputs), groups, num_in // groups).transpose(1, 2, 0)
    parts = rows @ columns  # [groups, T, outputs]
    is_rounded = weight.activations != FLOAT
    share = oracle.f32_sum_error(num_in)
    errors = parts.sum(axis=0) * (max(8.0 * EPS_F32, share) if is_rounded else share)
    if not is_rounded and x.dtype != np.float32:
        errors = errors + oracle.EPS[str(x.dtype)] * np.sqrt((parts**2).sum(axis=0))
    return np.asarray(errors.reshape(len(x), *outputs))


NEAR_HALF = 1e-4
"""How far from half-way between two steps a number may be rounded either way. Of 127 steps, a few
roundings in f32 are less.
"""


def _flips(x: np.ndarray, weight: QuantizedArray) -> np.ndarray:
    """Return the steps f64 [T, *inputs] of those inputs that may be rounded up or down; 0 for other
    inputs, and where inputs are not rounded.
    """
    if weight.activations == FLOAT:
        return np.zeros(x.shape)
    flat = np.abs(x.astype(np.float64)).reshape(len(x), math.prod(x.shape[1:]))
    steps = input_scales(flat, weight.activations)
    numbers = flat / np.where(steps > 0, steps, 1)
    is_near = np.abs(numbers - np.floor(numbers) - 0.5) < NEAR_HALF
    return np.asarray((is_near * steps).reshape(x.shape))


def check_quantized_linear_case(kernel: Any, case: PlainCase) -> None:
    """Check a product with the numbers of a quantised weight, then a bias, then one rounding."""
    rng, number, in_dims = case.rng(), case.int("outputs"), _inputs(case)
    out_dims = (number,) if case.int("out_dims") == 1 else (max(1, number // 4), 4)
    # Zero points may be subtracted after the product, whose terms must not overflow.
    x = entries(case, (case.int("rows"), *in_dims), 1 / 512)
    weight = _weight(case, out_dims, in_dims)
    bias = None if case.row["bias"] == "none" else rng.normal(size=out_dims).astype(case.dtype)
    out_dtype = case.row["out_dtype"]
    call = functools.partial(kernel, out_dtype=out_dtype)
    before = other_inputs((x, weight, bias), with_integers=True)
    got = case.run(call, x, jax.device_put(weight), bias, others=before)
    finite = np.isfinite(x.astype(np.float64)).all(axis=tuple(range(1, x.ndim)))
    x, rows = x[finite], np.flatnonzero(finite)
    exact = oracle.quantized_weight(weight)
    wanted = str(out_dtype or case.row["dtype"])
    same_type(got, (case.int("rows"), *out_dims), wanted)
    sums, flips = _sum_errors(x, weight), oracle.linear(_flips(x, weight), np.abs(exact))
    product = functools.partial(oracle.linear, _multiplied(x, weight), bias=bias)
    others: dict[str, Callable[[], np.ndarray]] = {
        name: functools.partial(product, one) for name, one in mistaken(weight).items()
    }
    if bias is not None:
        others["the bias is missing"] = functools.partial(product, exact, bias=None)
    _hold(got[finite], product(exact), (sums, flips), "quantized linear", rows, others)


def mistaken(weight: QuantizedArray) -> dict[str, np.ndarray]:
    """Return what a weight is for kernels that make likely mistakes, f64."""
    found, scales = {}, np.asarray(weight.scales)
    if weight.zero_points is not None:
        plain = dataclasses.replace(weight, zero_points=None)
        found["the zero points are missing"] = oracle.quantized_weight(plain)
    if scales.shape[-1] > 1:
        one = dataclasses.replace(weight, scales=np.broadcast_to(scales[..., :1], scales.shape))
        found["all groups have the scale of the first"] = oracle.quantized_weight(one)
    return found


def check_quantized_grouped_linear_case(kernel: Any, case: PlainCase) -> None:
    """Check each row against the product with its group's quantised weight; other rows are 0."""
    in_dims = _inputs(case)
    sizes = group_sizes(str(case.row["sizes"]), case.int("experts"), case.seed)
    count = int(sizes.sum())
    shape = (count + case.int("past"), *in_dims)
    x = entries(case, shape)
    weight = _weight(case, (len(sizes), case.int("outputs")), in_dims)
    out_dtype = case.row["out_dtype"]
    call = functools.partial(kernel, out_dtype=out_dtype)
    before = other_group_inputs(x, weight, sizes)
    got = case.run(call, x, jax.device_put(weight), sizes, others=before)
    wanted = str(out_dtype or case.row["dtype"])
    same_type(got, (shape[0], case.int("outputs")), wanted)
    expect(not got[count:].astype(np.float64).any(), "rows after the last group are not 0")
    finite = np.isfinite(x[:count].astype(np.float64)).all(axis=1)
    x = np.where(finite[:, None], x[:count], 0)
    exact = oracle.quantized_weight(weight)
    product = functools.partial(oracle.grouped_linear, group_sizes=sizes)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    sums = np.zeros((count, case.int("outputs")))
    for group in np.unique(groups):
        one = jax.tree.map(lambda array, group=group: array[group], weight)
        sums[groups == group] = _sum_errors(x[groups == group], one)
    flips = product(_flips(x, weight), np.abs(exact))
    wide = _multiplied(x, weight)
    others = {
        name: (lambda one=one: product(wide, one)[finite]) for name, one in mistaken(weight).items()
    }
    expected = product(wide, exact)[finite]
    what, rows = "quantized grouped_linear", np.flatnonzero(finite)
    _hold(got[:count][finite], expected, (sums[finite], flips[finite]), what, rows, others)


def _hold(
    got: np.ndarray,
    expected: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
    what: str,
    rows: np.ndarray,
    others: Mapping[str, Callable[[], np.ndarray]],
) -> None:
    """Hold the finite rows `rows`. `bounds` are on the errors of sums, and on those of inputs that
    may be rounded either way, which all outputs of a row share. `others` are the results of likely
    mistakes by their words.
    """
    dtype = str(got.dtype)
    sums = bounds[0] + bounds[1]
    allowed = oracle.EPS[dtype] * np.abs(expected) + sums + SMALLEST[dtype]
    wide = got.astype(np.float64)
    # Beyond the largest number of the dtype, infinity is the right result.
    largest = float(jnp.finfo(dtype).max)
    beyond = np.isinf(wide) & (np.sign(wide) == np.sign(expected))
    wide = np.where(beyond & (np.abs(expected) + sums > largest), expected, wide)
    cause = ""
    if not (np.abs(wide - expected) <= allowed).all():
        bound = allowed + oracle.EPS[dtype] * np.abs(wide)
        likely = (name for name, make in others.items() if (abs(wide - make()) <= bound).all())
        name = next(likely, None)
        cause = f" ({name})" if name else causes_of(wide, expected, allowed, None)
    hold_rows(np.abs(wide - expected), allowed, what, rows, causes=cause)
    alone = ~bounds[1].any(axis=tuple(range(1, bounds[1].ndim)))
    hold_rows(np.abs(wide - expected)[alone], allowed[alone], what, rows[alone], rms=0.36)


SMALLEST = {
    "float32": float(jnp.finfo("float32").smallest_normal),
    "bfloat16": float(jnp.finfo("bfloat16").smallest_normal),
    "float16": float(jnp.finfo("float16").smallest_subnormal),
}
"""Smaller numbers may be 0: a CPU or a GPU may take subnormal numbers of 8 exponent bits for 0."""


def check_quantized_embedding_case(kernel: Any, case: PlainCase) -> None:
    """Check that each row has the numbers of the table's row in f32, within two roundings."""
    vocab = case.int("vocab")
    table = _weight(case, (vocab,), _inputs(case))
    ids = embedding_ids(case, vocab)
    others = other_inputs((table, ids), with_integers=True)
    got = case.run(kernel, jax.device_put(table), ids, others=others)
    rows = jax.tree.map(lambda array: array[ids], table)
    same_type(got, rows.shape, "float32")
    error = np.abs(got.astype(np.float64) - oracle.quantized_weight(rows))
    hold(error, 2 * EPS_F32 * _magnitudes(rows), "quantized embedding", axes=("row", "feature"))


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
