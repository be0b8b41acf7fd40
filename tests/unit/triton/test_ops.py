"""The Triton kernels of the ops around attention, interpreted, by the suites that any plugin's ops
go through.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import KVLayout
from enginebay.errors import UnsupportedError
from enginebay_pallas.layout import TpuRpaLayout
from enginebay_testing import fused, kernels
from enginebay_triton.layout import NhdLayout
from enginebay_triton.norm import add_rms_norm, rms_norm
from enginebay_triton.sample import SampleConfig, sample
from enginebay_triton.write import kv_write, rope_kv_write
from enginebay_xla.kit.sample import VOCABS, check_sample, sample_checks, vocabulary_cases
from enginebay_xla.layout import HndLayout
from enginebay_xla.norm import rms_norm as xla_rms_norm

LAYOUTS = (NhdLayout, HndLayout)
DTYPES = ("float32", "float16")

FEW_NEAR = SampleConfig(block=64, capacity=16, num_warps=4)
"""So little room that most borders lie outside of it."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: str) -> None:
    kernels.check_rms_norm(rms_norm.interpreted(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: str) -> None:
    fused.check_add_rms_norm(add_rms_norm.interpreted(), dtype)


def test_a_norm_of_rows_of_any_width_and_number_rounds_where_the_reference_does() -> None:
    rng = np.random.default_rng(0)
    for shape in ((1, 96), (7, 3, 8), (2, 600)):
        x, weight = (jnp.asarray(rng.normal(size=s), jnp.float16) for s in (shape, shape[-1:]))
        got, wanted = (op(x, weight, eps=1e-6) for op in (rms_norm.interpreted(), xla_rms_norm))
        # A statistic's last bit may turn a rounding: by one step, and twice.
        np.testing.assert_allclose(got, wanted, rtol=2.0**-9)
        assert (np.asarray(got) == wanted).mean() > 0.98


@pytest.mark.parametrize("kind", LAYOUTS)
def test_kv_write(kind: type[KVLayout]) -> None:
    """New tokens lie where the layout's own write puts them, dropped ones nowhere."""
    layout, kernel = kind(3, 8, 2, 16, "float32"), kv_write.interpreted()
    rng = np.random.default_rng(0)
    steps = [
        (np.asarray(slots, np.int32), *rng.normal(size=(2, len(slots), 2, 16)).astype(np.float32))
        for slots in ([5], [-1], [17, -1, 3, 8], [23, 0])
    ]

    # One program for all, which donates the caches of the kernel.
    def both(caches: Any, steps: Any) -> Any:
        pairs = zip(caches, steps, strict=True)
        got = [kernel(cache, *step, layout=layout) for cache, step in pairs]
        return got, [layout.write(layout.init(), *step) for step in steps]

    empty = [{n: np.zeros(s.shape, s.dtype) for n, s in layout.shapes().items()} for _ in steps]
    results = jax.jit(both, donate_argnums=0)(empty, steps)
    for (slots, *_), got, wanted in zip(steps, *results, strict=True):
        for name, array in wanted.items():
            assert np.array_equal(got[name], array), (slots.tolist(), name)


@pytest.mark.parametrize(
    ("layout", "name", "dtype"),
    [(NhdLayout, "default", "float32"), (HndLayout, "partial", "float16")],
)
def test_rope_kv_write(layout: type[KVLayout], name: str, dtype: str) -> None:
    fused.check_rope_kv_write(rope_kv_write.interpreted(), layout, kernels.ROPE_SPECS[name], dtype)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "check",
    list(fused.rope_kv_write_checks(rope_kv_write.interpreted(), LAYOUTS, DTYPES)),
    ids=lambda check: check[0],
)
def test_rope_kv_write_in_full(check: tuple[str, object]) -> None:
    check[1]()  # type: ignore[operator]


def test_a_layout_that_the_kernels_do_not_know_is_refused() -> None:
    layout = TpuRpaLayout(2, 8, 2, 16, "float32")
    new = jnp.zeros((1, 2, 16))
    with pytest.raises(UnsupportedError, match="layout tpu_rpa"):
        kv_write(layout.init(), jnp.zeros(1, jnp.int32), new, new, layout=layout)


@pytest.mark.parametrize(
    ("config", "case"),
    [(SampleConfig(), 3), (FEW_NEAR, 4), (SampleConfig(), 0)],
    ids=["together", "far_equals", "everything"],
)
def test_sample(config: SampleConfig, case: int) -> None:
    whole = vocabulary_cases(VOCABS[0])[case]
    rows = [0, 5, 10, 12]  # of each kind of parameters
    few = dataclasses.replace(
        whole, z=whole.z[rows], params=tuple(whole.params[row] for row in rows)
    )
    check_sample(dataclasses.replace(sample, config=config).interpreted(), few, case)


@pytest.mark.matrix
@pytest.mark.parametrize("config", [SampleConfig(), FEW_NEAR], ids=["near", "far"])
@pytest.mark.parametrize("number", range(len(VOCABS) * 5 + 1))
def test_sample_in_full(config: SampleConfig, number: int) -> None:
    _, check = sample_checks(dataclasses.replace(sample, config=config).interpreted())[number]
    check()
