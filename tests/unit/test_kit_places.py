"""Failures of the ops without phases name the place once, in words."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from enginebay.ops.caps import Env
from enginebay.plugins.registry import load_registry
from enginebay_testing.op_kit import CaseBudget, kit_of
from enginebay_testing.verdicts import judge
from enginebay_xla.kit.places import hold_copies
from enginebay_xla.linear import linear
from enginebay_xla.norm import rms_norm
from enginebay_xla.rope import rope

pytestmark = pytest.mark.long

REGISTRY = load_registry()


def wrong_rope(x: jax.Array, positions: jax.Array, *, spec: Any) -> jax.Array:
    return rope(x, positions, spec=spec).at[1, 2, 3].add(1.0)


def wrong_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    return rms_norm(x, weight, eps=eps).at[1, 3].add(1.0)


def wrong_linear(x: jax.Array, weight: Any, bias: Any = None, *, out_dtype: Any = None) -> Any:
    return linear(x, weight, bias, out_dtype=out_dtype).at[1, 3].add(1.0)


@pytest.mark.parametrize(
    ("op", "kernel", "place"),
    [
        ("rope", wrong_rope, "token 1, head 2, feature 3"),
        ("rms_norm", wrong_norm, "row 1, feature 3"),
        ("linear", wrong_linear, "row 1, output 3"),
    ],
)
def test_a_failure_names_its_place_once(op: str, kernel: Any, place: str) -> None:
    cases = kit_of(REGISTRY, op).cases(kernel, Env("cpu"), [], CaseBudget(triples=False))
    outcome = judge(next(case for case in cases if case.name == f"{op}[float32]").run)
    assert outcome.verdict == "INCORRECT"
    assert f"{place} is off by 1, allowed" in outcome.detail
    assert "place (" not in outcome.detail


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_a_copied_row_may_flush_subnormal_numbers_and_nothing_else(dtype: Any) -> None:
    numbers = ml_dtypes.finfo(dtype)
    table = np.array([[1.0, numbers.smallest_subnormal], [2.0, numbers.smallest_normal]], dtype)
    ids = np.array([1, 0])
    flushed = table[ids]
    flushed[1, 1] = 0
    hold_copies(flushed, table, ids)
    flushed[0, 1] = 0  # a normal number
    with pytest.raises(AssertionError, match="row 0, feature 1"):
        hold_copies(flushed, table, ids)
