"""The cases of an op without a kit find a kernel that returns an earlier result."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from enginebay.ops.caps import Env
from enginebay.registry import load_registry
from enginebay_testing.op_kit import Extent, kit_of
from enginebay_testing.verdicts import judge
from enginebay_xla.collectives import all_reduce
from enginebay_xla.layout import HndLayout


def verdicts(kernel: Any) -> list[str]:
    kit = kit_of(load_registry(), "all_reduce")
    return [
        str(judge(case.run).verdict)
        for case in kit.cases(kernel, Env("cpu"), [HndLayout], Extent(triples=False))
    ]


def test_a_collective_that_returns_the_result_of_an_earlier_call_is_found() -> None:
    kept: list[np.ndarray] = []

    def on_host(x: Any) -> np.ndarray:
        kept.append(np.array(x))
        return kept[0]

    def first_result(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
        done = all_reduce(x, axes=axes)
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(done.shape, done.dtype), done)

    assert set(verdicts(all_reduce)) == {"PASS"}
    assert set(verdicts(first_result)) != {"PASS"}
