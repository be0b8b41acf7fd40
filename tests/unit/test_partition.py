"""Implementations that the compiler cannot split run on each device's part, by their op's rule."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from enginebay.compose.partition import partitioned
from enginebay.config import DEFAULT_AXIS_RULES
from enginebay.ops.op import Op
from enginebay.runner.sharding import make_placement
from enginebay_testing import oracle
from enginebay_xla import linear as xla
from enginebay_xla import norm
from enginebay_xla.ops import ADD_RMS_NORM, LINEAR, RMS_NORM

P = PartitionSpec
MESH = make_placement(jax.devices(), {"tensor": 2}, DEFAULT_AXIS_RULES).mesh


def placed(array: np.ndarray, *axes: str | None) -> jax.Array:
    return jax.device_put(array, NamedSharding(MESH, P(*axes)))


def run(op: Op[Any], impl: Any, *arrays: jax.Array, **keywords: Any) -> tuple[Any, set[str], Any]:
    """The result, the collectives of the program, and the shapes that the implementation saw."""
    seen: list[Any] = []

    def watched(*given: Any, **named: Any) -> Any:
        seen.append([array.shape for array in given])
        return impl(*given, **named)

    step = jax.jit(lambda *given: partitioned(op, watched)(*given, **keywords))
    program = step.lower(*arrays).compile()
    text = program.as_text()
    return program(*arrays), set(re.findall(r"(all-\w+)\(", text or "")), seen[-1]


RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 2, 8)).astype(np.float32)
WIDE = RNG.normal(size=(6, 2, 8)).astype(np.float32)
BIAS = RNG.normal(size=6).astype(np.float32)


@pytest.mark.parametrize(
    ("x_axes", "weight_axes", "collectives", "shapes"),
    [
        ((), ("tensor",), set(), [(3, 2, 8), (3, 2, 8)]),
        ((None, "tensor"), (None, "tensor"), {"all-reduce"}, [(3, 1, 8), (6, 1, 8)]),
    ],
    ids=["outputs", "inputs"],
)
def test_a_product_is_split_as_its_weight_is_and_a_split_sum_is_added_up(
    x_axes: Any, weight_axes: Any, collectives: set[str], shapes: Any
) -> None:
    """The bias is added once, and the result rounded once."""
    x, weight = placed(X, *x_axes), placed(WIDE, *weight_axes)
    bias = placed(BIAS, *weight_axes[:1])
    got, found, seen = run(LINEAR, xla.linear, x, weight, bias)
    assert (found, seen) == (collectives, shapes)
    np.testing.assert_allclose(got, oracle.linear(X, WIDE, BIAS), rtol=1e-5, atol=1e-5)
    assert got.dtype == X.dtype


def test_heads_are_normed_where_they_are_and_features_are_never_split() -> None:
    scale = RNG.normal(size=8).astype(np.float32)
    weight, expected = placed(scale), oracle.rms_norm(X, scale, eps=1e-5)
    got, found, seen = run(RMS_NORM, norm.rms_norm, placed(X, None, "tensor"), weight, eps=1e-5)
    assert (found, seen) == (set(), [(3, 1, 8), (8,)])
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    split = placed(X, None, None, "tensor")
    got, _, seen = run(RMS_NORM, norm.rms_norm, split, weight, eps=1e-5)
    assert seen == [(3, 2, 8), (8,)]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_rule_of_two_results() -> None:
    weight, x = placed(np.ones(8, np.float32)), placed(X, None, "tensor")
    got, _, seen = run(ADD_RMS_NORM, norm.add_rms_norm, x, x, weight, eps=1e-5)
    assert seen == [(3, 1, 8), (3, 1, 8), (8,)]
    np.testing.assert_array_equal(got[1], X + X)
    np.testing.assert_allclose(got[0], oracle.rms_norm(X + X, np.ones(8), eps=1e-5), rtol=1e-5)
