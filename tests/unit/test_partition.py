"""Calls run on each device's part, by their op's rule."""

from __future__ import annotations

import importlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from enginebay.compose.partition import partitioned
from enginebay.compose.quick_cases import CheckSetting
from enginebay.compose.quick_check import quick_check
from enginebay.config import DEFAULT_AXIS_RULES
from enginebay.contracts.placement import make_placement
from enginebay.errors import IncorrectError
from enginebay.ops.caps import Env
from enginebay.ops.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from enginebay.ops.grouped_linear import GROUPED_LINEAR
from enginebay.ops.linear import EMBEDDING, LINEAR
from enginebay.ops.norm import ADD_RMS_NORM, RMS_NORM
from enginebay.ops.op import Op
from enginebay.ops.partition_rules import NamedWeight
from enginebay.ops.sample import SAMPLE
from enginebay.weights import QuantizedArray
from enginebay_lora.ops import LORA, lora_oracle
from enginebay_testing import oracle
from enginebay_xla import collectives, grouped_linear, norm, sample
from enginebay_xla import linear as xla
from enginebay_xla.layout import HndLayout
from tests.unit.quantizing import quantized
from tests.unit.test_native_compiling import need_compiler

P = PartitionSpec
PLACEMENT = make_placement(jax.devices(), {"tensor": 2}, DEFAULT_AXIS_RULES)
MESH = PLACEMENT.mesh
COLLECTIVES = {
    name: getattr(collectives, name) for name in ("all_reduce", "all_gather", "all_to_all")
}


def placed(array: np.ndarray, *axes: str | None) -> jax.Array:
    return jax.device_put(array, NamedSharding(MESH, P(*axes)))


def run(op: Op[Any], impl: Any, *arrays: Any, **keywords: Any) -> tuple[Any, set[str], Any]:
    """The result, the collectives of the program, and the shapes that the implementation saw."""
    seen: list[Any] = []

    def watched(*given: Any, **named: Any) -> Any:
        seen.append([array.shape for array in given])
        return impl(*given, **named)

    split = partitioned(op, watched, COLLECTIVES, PLACEMENT)
    step = jax.jit(lambda *given: split(*given, **keywords))
    program = step.lower(*arrays).compile()
    text = program.as_text()
    return program(*arrays), set(re.findall(r" (all-[a-z-]+)\(", text or "")), seen[-1]


RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 2, 8)).astype(np.float32)
WIDE = RNG.normal(size=(6, 2, 8)).astype(np.float32)
BIAS = RNG.normal(size=6).astype(np.float32)


@pytest.mark.parametrize("kind", ["plain", pytest.param("native_int8", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("axes", "collectives", "shapes"),
    [
        (("mlp", None, None), set(), [(3, 2, 8), (3, 2, 8), (3,)]),
        ((None, "kv_heads", None), {"all-reduce"}, [(3, 1, 8), (6, 1, 8)]),
    ],
    ids=["outputs", "inputs"],
)
def test_a_product_is_split_as_its_weight_is_and_a_split_sum_is_added_up(
    axes: tuple[str | None, ...], collectives: set[str], shapes: Any, kind: str
) -> None:
    """The bias is added once, and the result rounded once; so it is of a kernel in C++, which the
    compiler cannot split.
    """
    weight: Any = WIDE
    impl: Any = xla.linear
    if kind == "native_int8":
        need_compiler()
        weight = quantized(WIDE, 2)
        impl = importlib.import_module("enginebay_native.linear").linear
    expected = weight.dequantized() if kind == "native_int8" else WIDE
    mesh_axes = PLACEMENT.spec(axes)
    arrays = jax.tree.map(
        lambda a: placed(a, *mesh_axes[: 1 if a.shape[-1] == 1 else None]), weight
    )
    x, bias = placed(X, None, mesh_axes[1]), placed(BIAS, mesh_axes[0])
    got, found, seen = run(LINEAR, impl, x, NamedWeight(arrays, axes), bias)
    assert (found, seen) == (collectives, shapes)
    np.testing.assert_allclose(got, oracle.linear(X, expected, BIAS), rtol=1e-5, atol=1e-5)
    assert got.dtype == X.dtype


def test_groups_of_inputs_are_split_with_their_inputs() -> None:
    """Groups that the devices do not divide are left to the compiler."""
    x = RNG.normal(size=(3, 12)).astype(np.float32)
    values = RNG.integers(-7, 8, size=(2, 12)).astype(np.int8)
    axes, expected, halves = (None, "mlp"), [], []
    weights = []
    for groups in (2, 3):
        scales = RNG.uniform(1, 2, size=(2, groups)).astype(np.float32)
        points = RNG.integers(0, 3, size=(2, groups)).astype(np.int8)
        weight = QuantizedArray(values, scales, points, "mine")
        weights.append(NamedWeight(weight, axes))
        expected.append(x @ np.asarray(weight.dequantized()).T)

    def linear(x: jax.Array, weight: QuantizedArray, **keywords: Any) -> jax.Array:
        halves.append(weight.scales.shape)
        return xla.linear(x, weight, **keywords)

    split = partitioned(LINEAR, linear, COLLECTIVES, PLACEMENT)
    got = jax.jit(lambda x, weights: [split(x, weight) for weight in weights])(x, weights)
    assert halves == [(2, 1), (2, 3)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got, expected)


def test_heads_are_normed_where_they_are_and_features_are_never_split() -> None:
    scale = RNG.normal(size=8).astype(np.float32)
    weight, expected = placed(scale), oracle.rms_norm(X, scale, eps=1e-5)
    for axes in ((None, "tensor"), (None, None, "tensor")):
        got, found, seen = run(RMS_NORM, norm.rms_norm, placed(X, *axes), weight, eps=1e-5)
        assert seen == [(3, 1, 8), (8,)]
        assert bool(found) == (len(axes) == 3), "only split features are exchanged"
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_rule_of_two_results() -> None:
    weight, x = placed(np.ones(8, np.float32)), placed(X, None, "tensor")
    got, _, seen = run(ADD_RMS_NORM, norm.add_rms_norm, x, x, weight, eps=1e-5)
    assert seen == [(3, 1, 8), (3, 1, 8), (8,)]
    np.testing.assert_array_equal(got[1], X + X)
    np.testing.assert_allclose(got[0], oracle.rms_norm(X + X, np.ones(8), eps=1e-5), rtol=1e-5)


def test_each_device_looks_up_its_share_of_a_vocabulary() -> None:
    table, ids = RNG.normal(size=(10, 4)).astype(np.float32), np.array([0, 9, 5, 4], np.int32)
    got, found, seen = run(EMBEDDING, xla.embedding, placed(table, "tensor"), placed(ids))
    assert (found, seen) == ({"all-reduce"}, [(5, 4), (4,)])
    np.testing.assert_array_equal(got, table[ids])


@pytest.mark.parametrize("kernel", ["xla", "native"])
@pytest.mark.parametrize("split", ["outputs", "inputs"])
def test_an_adapter_is_split_as_the_weight_that_it_is_added_to(split: str, kernel: str) -> None:
    """Heads of q, k and v, of which each device has all three parts."""
    if kernel == "native":
        need_compiler()
    package = "enginebay_lora.xla" if kernel == "xla" else "enginebay_native.lora"
    impl = importlib.import_module(package).lora
    y, x = (RNG.normal(size=(5, *dims)).astype(np.float32) for dims in ((4, 3, 2), (6,)))
    a, b = (RNG.normal(size=dims).astype(np.float32) for dims in ((2, 3, 4, 6), (2, 4, 4, 3, 2)))
    places, how = np.array([2, 0, 1, 1, 2], np.int32), {"axis": 1, "ends": (1, 2, 3)}
    axis = "tensor"
    named = (
        NamedWeight(placed(a), (None,) * 4),
        NamedWeight(placed(b, None, None, axis), (None, None, "kv_heads", None, None)),
    )
    shapes = [(5, 2, 3, 2), (5, 6), (2, 3, 4, 6), (2, 4, 2, 3, 2), (5,)]
    if split == "inputs":
        named = (
            NamedWeight(placed(a, None, None, None, axis), (None, None, None, "mlp")),
            NamedWeight(placed(b), (None,) * 5),
        )
        shapes = [(5, 4, 3, 2), (5, 3), (2, 3, 4, 3), (2, 4, 4, 3, 2), (5,)]
    got, found, seen = run(LORA, impl, placed(y), placed(x), *named, placed(places), **how)
    assert found == ({"all-reduce"} if split == "inputs" else set())
    assert seen == shapes
    np.testing.assert_allclose(got, lora_oracle(y, x, a, b, places, **how), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "int8", "odd_rows"])
def test_each_device_multiplies_the_rows_of_its_own_groups(kind: str) -> None:
    """Rows past the last group are 0, and no more devices are needed than rows divide by."""
    sizes = np.array([2, 0, 3, 1], np.int32)
    x = RNG.normal(size=(7 if kind == "odd_rows" else 8, 6)).astype(np.float32)
    plain = RNG.normal(size=(4, 5, 6)).astype(np.float32)
    weight = quantized(plain) if kind == "int8" else plain
    weights = jax.tree.map(lambda array: placed(array, "tensor"), weight)
    impl = grouped_linear.grouped_linear
    got, found, seen = run(GROUPED_LINEAR, impl, placed(x), weights, placed(sizes))
    assert "all-to-all" in found
    assert "all-reduce" not in found
    assert seen == [(8, 6), (2, 5, 6), (2,)]
    whole = np.asarray(jax.jit(impl)(x, weight, sizes))
    np.testing.assert_allclose(got, whole, rtol=1e-6, atol=1e-6)
    assert not np.asarray(got)[6:].any()


def test_scores_of_a_split_vocabulary_come_together_once() -> None:
    z = RNG.normal(size=(3, 40)).astype(np.float32)
    z -= z.max(axis=1, keepdims=True)
    seeds = np.arange(6, dtype=np.uint32).reshape(3, 2)
    filters = {
        "top_k": np.array([40, 3, 1], np.int32),
        "top_p": np.array([0.9, 1.0, 1.0], np.float32),
        "min_p": np.zeros(3, np.float32),
    }
    split = placed(z, None, "tensor")
    got, found, seen = run(SAMPLE, sample.sample, split, placed(seeds), **filters)
    assert (found, seen) == ({"all-gather"}, [(3, 40), (3, 2)])
    np.testing.assert_array_equal(got, sample.sample(z, seeds, **filters))


def test_what_does_not_divide_is_left_whole() -> None:
    table, ids = RNG.normal(size=(9, 4)).astype(np.float32), np.array([0, 8], np.int32)
    got, _, seen = run(EMBEDDING, xla.embedding, placed(table), placed(ids))
    assert seen == [(9, 4), (2,)]
    np.testing.assert_array_equal(got, table[ids])


@pytest.mark.parametrize("op", [ALL_REDUCE, ALL_GATHER, ALL_TO_ALL], ids=lambda op: op.name)
def test_a_collective_is_checked_as_other_ops_are(op: Op[Any]) -> None:
    setting = CheckSetting(Env("cpu"), [], HndLayout, "float32")
    right = COLLECTIVES[op.name]
    assert quick_check(op, right, setting, op.name, "no check") == 1
    with pytest.raises(IncorrectError, match=op.name):
        quick_check(op, lambda *x, **k: 2 * right(*x, **k), setting, op.name, "no check")
