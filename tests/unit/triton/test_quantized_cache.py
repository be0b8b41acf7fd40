"""Quantised caches in Triton: attention reads the codes, kv_write stores the bytes of the layout,
and compiled programs have one copy of the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')
pytest.importorskip("jax_triton", reason='jax-triton is not installed: the extra "gpu" brings it')

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_testing.attention_cases import AttentionCase, attention_cases
from enginebay_testing.kernels import check_attention, why_not_case
from enginebay_triton.attention import attention
from enginebay_triton.compiler import compiler
from enginebay_triton.layout import NhdLayout
from enginebay_triton.targets import TARGETS
from enginebay_triton.write import kv_write, rope_kv_write
from enginebay_xla.layout import HndLayout
from enginebay_xla.rope_kv_write import rope_kv_write as xla_rope_kv_write
from tests.unit.quantized_products import check_step, quantized_step

S = jax.ShapeDtypeStruct
CASES = {case.name: case for case in attention_cases()}
LAYOUTS = (NhdLayout, HndLayout)
STORAGES = ("int8", "uint4", "fp8")
QUICK = (
    ("decode_paged_float16", NhdLayout, "uint4"),
    ("mixed_all", HndLayout, "fp8"),
    ("decode_mla", NhdLayout, "int8"),
)
interpreted = attention.interpreted()
absent = compiler.why_not("sm_90")
needs_compiler = pytest.mark.skipif(absent is not None, reason=absent or "")


def stored(name: str, storage: str) -> AttentionCase:
    case = CASES[name]
    return dataclasses.replace(case, spec=case.spec.stored_as(storage))


@pytest.mark.parametrize(("name", "layout", "storage"), QUICK)
def test_attention(name: str, layout: type[KVLayout], storage: str) -> None:
    case = stored(name, storage)
    assert why_not_case(interpreted, case, layout, Env("cpu")) is None
    check_attention(interpreted, case, layout)


@pytest.mark.matrix
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_every_case(name: str, layout: type[KVLayout], storage: str) -> None:
    case = stored(name, storage)
    reason = why_not_case(interpreted, case, layout, Env("cpu"))
    if reason is not None:
        pytest.skip(reason)
    check_attention(interpreted, case, layout)


@pytest.mark.parametrize(
    ("kind", "storage", "prefix"), [(NhdLayout, "uint4", None), (HndLayout, "fp8", 12)]
)
def test_kv_write_stores_the_bytes_of_the_layout(
    kind: type[KVLayout], storage: str, prefix: int | None
) -> None:
    heads = 1 if prefix else 2
    layout = kind(3, 8, heads, 16, "float32", v_prefix_dim=prefix, storage=storage)
    rng = np.random.default_rng(0)
    slots = np.array([5, -1, 17, 3, 23, 0], np.int32)
    k, v = rng.normal(size=(2, len(slots), heads, 16)).astype(np.float32)
    before = {n: rng.integers(0, 99, s.shape).astype(s.dtype) for n, s in layout.shapes().items()}

    def both(cache: Any) -> Any:
        return kv_write.interpreted()(cache, slots, k, v, layout=layout), layout.write(
            cache, slots, k, v
        )

    got, wanted = jax.jit(both)(before)
    for name, array in wanted.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(array).tobytes(), name


def test_rope_kv_write_rotates_before_it_quantises() -> None:
    layout = NhdLayout(3, 8, 2, 16, "float32", storage="int8")
    rng = np.random.default_rng(0)
    slots = np.array([5, -1, 17, 3], np.int32)
    q, k, v = rng.normal(size=(3, 4, 2, 16)).astype(np.float32)
    positions = np.array([0, 7, 100, 4095], np.int32)
    ops = (rope_kv_write.interpreted(), xla_rope_kv_write)

    def both(cache: Any) -> Any:
        spec = RopeSpec(10000.0, 8)
        return [op(q, k, v, cache, positions, slots, spec=spec, layout=layout) for op in ops]

    (turned, got), (wanted_q, wanted) = jax.jit(both)(layout.init())
    np.testing.assert_allclose(turned, wanted_q, atol=1e-5)
    for i in range(2):
        mine, theirs = (layout.read_tokens(each, slots[[0, 2, 3]])[i] for each in (got, wanted))
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


BUCKETS = {
    "decode": Bucket(32, 32, 64, 1, 4096, "decode"),
    "mixed": Bucket(512, 32, 64, 512, 4096, "mixed"),
}


def compiles(target: str, mode: str, layout: KVLayout, spec: AttnSpec) -> None:
    """A step of kv_write and attention works in place, and its program is smaller than a copy."""
    bucket = BUCKETS[mode]
    config = attention.default_config(Env("cuda", target), spec, bucket, layout)
    tokens, seqs = bucket.tokens, bucket.seqs
    each, table = (tokens,), (seqs, bucket.pages_per_seq)
    shapes = (each, (seqs + 1,), (seqs,), table, each, each, (3,))
    batch = AttnBatch(*(S(shape, jnp.int32) for shape in shapes), bucket)
    new = S((tokens, spec.num_kv_heads, spec.head_dim), spec.q_dtype)
    q = S((tokens, spec.num_q_heads, spec.head_dim), spec.q_dtype)

    def step(q: Any, k: Any, v: Any, cache: Any, batch: Any) -> Any:
        cache = kv_write(cache, batch.slots, k, v, layout=layout)
        call = functools.partial(attention, spec=spec, layout=layout, config=config)
        return call(q, None, None, cache, batch)[:2]

    arguments = [q, new, new, layout.shapes(), batch]
    figures = compiler.compile(step, arguments, target=target, donated=(3,)).figures
    assert figures["spill_bytes"] == 0
    assert figures["copies_in_flight"] >= 2
    assert figures["shared_bytes"] <= TARGETS[target].shared_bytes_per_block
    if "alias_bytes" in figures:
        assert figures["alias_bytes"] == layout.num_bytes()
        assert figures["temp_bytes"] < layout.num_bytes() / 10


@needs_compiler
def test_a_decode_compiles_with_one_copy_of_the_cache() -> None:
    spec = AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16", kv_storage="uint4")
    compiles("sm_90", "decode", spec.make_layout(NhdLayout, 1024, 64), spec)


@pytest.mark.matrix
@needs_compiler
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("mode", BUCKETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_steps_compile_for_every_target(
    target: str, layout: type[KVLayout], storage: str, mode: str, dtype: str, head_dim: int
) -> None:
    spec = AttnSpec(32, 8, head_dim, q_dtype=dtype, kv_dtype=dtype, kv_storage=storage)
    compiles(target, mode, spec.make_layout(layout, 1024, 64), spec)


@pytest.mark.matrix
@needs_compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_a_step_with_quantised_weights_and_cache_holds_no_wide_copy(target: str) -> None:
    check_step(quantized_step(compiler, target, page_size=64), "triton")
