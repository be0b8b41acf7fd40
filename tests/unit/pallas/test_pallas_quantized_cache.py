"""Quantised caches in Pallas: attention reads the codes, kv_write stores the bytes of the layout,
and compiled programs have one copy of the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from enginebay.ops.caps import Env
from enginebay.ops.kv_storage import FP8
from enginebay.ops.spec import AttnSpec, Mode
from enginebay_pallas.attention import attention
from enginebay_pallas.attention_codes import load_codes
from enginebay_pallas.compiler import TOPOLOGIES, compiler
from enginebay_pallas.kv_write import kv_write
from enginebay_pallas.layout import TpuRpaLayout
from enginebay_testing.attention_cases import AttentionCase, attention_cases
from enginebay_testing.kernels import CPU, check_attention, why_not_case
from tests.unit.pallas.test_pallas_attention_compiles import SEQS, batch_of, bucket_of, shapes_of
from tests.unit.quantized_products import check_step, quantized_step

pytestmark = pytest.mark.long

CASES = {case.name: case for case in attention_cases()}
STORAGES = ("int8", "uint4", "fp8")
interpreted = attention.interpreted()
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
)


def stored(name: str, storage: str) -> AttentionCase:
    case = CASES[name]
    return dataclasses.replace(case, spec=case.spec.stored_as(storage))


def test_attention() -> None:
    case = stored("decode_one_row", "uint4")
    assert why_not_case(interpreted, case, TpuRpaLayout, CPU) is None
    check_attention(interpreted, case, TpuRpaLayout)


@pytest.mark.matrix
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", CASES)
def test_every_case(name: str, storage: str) -> None:
    case = stored(name, storage)
    reason = why_not_case(interpreted, case, TpuRpaLayout, CPU)
    if reason is not None:
        pytest.skip(reason)
    check_attention(interpreted, case, TpuRpaLayout)


@pytest.mark.parametrize("storage", ["uint4", "fp8"])
def test_kv_write_stores_the_bytes_of_the_layout(storage: str) -> None:
    """Also of several tokens of a page that do not follow one another."""
    layout = TpuRpaLayout(3, 8, 4, 16, "float32", storage=storage)
    rng = np.random.default_rng(0)
    slots = np.array([5, -1, 17, 3, 23, 0, 4], np.int32)
    k, v = rng.normal(size=(2, len(slots), 4, 16)).astype(np.float32)
    before = {n: rng.integers(0, 99, s.shape).astype(s.dtype) for n, s in layout.shapes().items()}
    kernel = functools.partial(kv_write.interpreted(), layout=layout)
    got = jax.jit(kernel)(before, slots, k, v)
    for name, array in jax.jit(layout.write)(before, slots, k, v).items():
        assert np.asarray(got[name]).tobytes() == np.asarray(array).tobytes(), name


@pytest.mark.parametrize("storage", STORAGES)
def test_the_device_takes_codes_out_of_words(storage: str) -> None:
    """It reads words with a stride, as nothing that is interpreted otherwise does: here by Pallas'
    plain interpreter.
    """
    heads, size, first, valid = 6, 16, 16, 13
    kv = TpuRpaLayout(1, 32, heads, 128, "float32", storage=storage).shapes()["kv"]
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (2, 32, *kv.shape[2:])).astype(np.uint8).view(kv.dtype)
    number = FP8 if storage == "fp8" else kv.dtype
    finite = np.isfinite(stored.view(number).astype(np.float32))
    stored = np.where(finite, stored, np.zeros_like(stored))

    def kernel(source: Any, keys: Any, values: Any) -> None:
        is_valid = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < valid
        place = (1, pl.ds(first, size))
        for head in range(heads):
            keys[head], values[head] = load_codes(
                source, place, jnp.int32(head), is_valid, storage, is_interpreted=False
            )

    made = jax.ShapeDtypeStruct((heads, size, 128), jnp.float32)
    keys, values = pl.pallas_call(kernel, out_shape=(made, made), interpret=True)(stored)
    rows = stored[1, first : first + size].reshape(size, -1, 128).copy()
    rows[valid:] = 0
    if storage == "uint4":
        expected = rows[:, :heads] & 15, rows[:, :heads] >> 4
    else:
        expected = rows[:, 0 : 2 * heads : 2], rows[:, 1 : 2 * heads : 2]
    for got, wanted in zip((keys, values), expected, strict=True):
        exact = np.ascontiguousarray(wanted).view(number).astype(np.float32)
        assert np.array_equal(got, exact.transpose(1, 0, 2))


def compiles(target: str, mode: Mode, spec: AttnSpec, page_size: int) -> None:
    bucket = bucket_of(mode, page_size)
    layout = spec.make_layout(TpuRpaLayout, SEQS * bucket.pages_per_seq, page_size)
    config = attention.default_config(Env("tpu", target), spec, bucket, layout)

    def step(q: Any, k: Any, v: Any, cache: Any, batch: Any) -> Any:
        return attention(q, k, v, cache, batch, spec=spec, layout=layout, config=config)[:2]

    arguments = (*shapes_of(spec, bucket), layout.shapes(), batch_of(bucket))
    figures = compiler.compile(step, arguments, target=target, donated=(3,)).figures
    assert figures["alias_bytes"] == layout.num_bytes(), "the cache is not updated in place"
    assert figures["temp_bytes"] < layout.num_bytes() / 2, "there is room for a copy of the cache"
    assert 0 < figures["vmem_bytes"] <= config.vmem_limit_bytes


@needs_libtpu
def test_a_decode_compiles_with_one_copy_of_the_cache() -> None:
    spec = AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16", kv_storage="int8")
    compiles("v5e", "decode", spec, 128)


@pytest.mark.matrix
@needs_libtpu
@pytest.mark.parametrize("target", TOPOLOGIES)
@pytest.mark.parametrize("mode", ["decode", "mixed"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_steps_compile_for_every_target(
    target: str, mode: Mode, storage: str, page_size: int
) -> None:
    spec = AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16", kv_storage=storage)
    compiles(target, mode, spec, page_size)


@pytest.mark.matrix
@needs_libtpu
@pytest.mark.parametrize("target", ["v5e", "v6e"])
@pytest.mark.parametrize("page_size", [64, 128])
def test_a_step_with_quantised_weights_and_cache_holds_no_wide_copy(
    target: str, page_size: int
) -> None:
    check_step(quantized_step(compiler, target, page_size), "pallas")
