"""The kit of the collectives finds wrong orders, wrong devices and results of earlier calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops.caps import Env
from enginebay.plugins.registry import load_registry
from enginebay_testing.op_kit import CaseBudget, kit_of
from enginebay_testing.verdicts import judge
from enginebay_xla.collectives import all_gather, all_reduce
from enginebay_xla.layout import HndLayout

pytestmark = pytest.mark.long

Axes = tuple[str, ...]


def wrong_cases(op: str, kernel: Any, *, only: str = "") -> list[str]:
    """Return the names of the default cases with `only` in their names that do not pass."""
    cases = kit_of(load_registry(), op).cases(
        kernel, Env("cpu"), [HndLayout], CaseBudget(triples=False, num_seeds=1)
    )
    return [c.name for c in cases if only in c.name and judge(c.run).verdict != "PASS"]


def by_last_axis_first(x: jax.Array, *, axes: Axes, dim: int) -> jax.Array:
    """Gather in the order of the mesh's last axis."""
    return all_gather(x, axes=axes[::-1], dim=dim)


def its_own_after_a_while(x: jax.Array, *, axes: Axes) -> jax.Array:
    """Leave the numbers after the first 65,536 unreduced."""
    flat = all_reduce(x, axes=axes).reshape(-1)
    mine = jnp.arange(x.size) >= 1 << 16
    return jnp.where(mine, x.reshape(-1), flat).reshape(x.shape)


def in_float16(x: jax.Array, *, axes: Axes) -> jax.Array:
    """Sum in 16 bits."""
    return all_reduce(x.astype(jnp.float16), axes=axes).astype(x.dtype)


@pytest.mark.parametrize(
    ("op", "kernel", "only"),
    [
        ("all_gather", by_last_axis_first, "two_by_two-rows_4133"),
        pytest.param(*("all_reduce", its_own_after_a_while, "rows_4133"), marks=pytest.mark.long),
        ("all_reduce", in_float16, "features_129"),
    ],
)
def test_a_wrong_collective_is_found(op: str, kernel: Any, only: str) -> None:
    assert wrong_cases(op, kernel, only=only)


@pytest.mark.parametrize(
    ("op", "kernel"),
    [pytest.param("all_gather", all_gather, marks=pytest.mark.long), ("all_reduce", all_reduce)],
)
def test_a_right_collective_passes(op: str, kernel: Any) -> None:
    assert not wrong_cases(op, kernel, only="4133")


def test_a_collective_that_returns_the_result_of_an_earlier_call_is_found() -> None:
    kept: dict[tuple[int, ...], np.ndarray] = {}

    def on_host(x: Any) -> np.ndarray:
        return kept.setdefault(np.shape(x), np.array(x))

    def first_result(x: jax.Array, *, axes: Axes) -> jax.Array:
        done = all_reduce(x, axes=axes)
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(done.shape, done.dtype), done)

    assert wrong_cases("all_reduce", first_result, only="features_129")
