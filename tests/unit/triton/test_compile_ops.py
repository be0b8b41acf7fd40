"""Flash prefill and the ops around attention, compiled for GPUs that are not there: no spills, and
they fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')
pytest.importorskip("jax_triton", reason='jax-triton is not installed: the extra "gpu" brings it')

from enginebay.contracts.cache import KVLayout
from enginebay.ops.batches import derive_batch
from enginebay.ops.caps import Env
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_triton.compiler import compiler
from enginebay_triton.flash import triton_flash
from enginebay_triton.layout import NhdLayout
from enginebay_triton.norm import add_rms_norm, rms_norm
from enginebay_triton.sample import sample
from enginebay_triton.targets import TARGETS
from enginebay_triton.write import kv_write, rope_kv_write
from enginebay_xla.layout import HndLayout

S = jax.ShapeDtypeStruct
INT = jnp.int32

absent = compiler.why_not("sm_90")
pytestmark = pytest.mark.skipif(absent is not None, reason=absent or "")

Program = tuple[Callable[..., Any], list[Any], tuple[int, ...]]
"""A function, its arguments, and the places of those that are donated."""


def norm(op: Any, num_arrays: int, width: int, dtype: str) -> Program:
    arrays = [S((32, width), dtype)] * num_arrays
    return functools.partial(op, eps=1e-5), [*arrays, S((width,), dtype)], ()


def write(kind: type[KVLayout], head_dim: int, dtype: str) -> Program:
    layout = kind(64, 64, 8, head_dim, dtype)
    new = S((32, 8, head_dim), dtype)
    return (
        functools.partial(kv_write, layout=layout),
        [layout.shapes(), S((32,), INT), new, new],
        (0,),
    )


def rope_write(kind: type[KVLayout], head_dim: int, dtype: str) -> Program:
    layout = kind(64, 64, 8, head_dim, dtype)
    q, new = S((32, 32, head_dim), dtype), S((32, 8, head_dim), dtype)
    op = functools.partial(rope_kv_write, spec=RopeSpec(10000.0, head_dim), layout=layout)
    return op, [q, new, new, layout.shapes(), S((32,), INT), S((32,), INT)], (3,)


def sample_program() -> Program:
    def step(z: Any, seeds: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        return sample(z, seeds, top_k=top_k, top_p=top_p, min_p=min_p)

    f32 = S((32,), jnp.float32)
    return step, [S((32, 151936), jnp.float32), S((32, 2), jnp.uint32), S((32,), INT), f32, f32], ()


def prefill(target: str, head_dim: int, dtype: str, **fields: Any) -> Program:
    spec = AttnSpec(32, 8, head_dim, q_dtype=dtype, kv_dtype=dtype, **fields)
    layout = NhdLayout(64, 64, 8, head_dim, dtype)
    bucket = Bucket(1024, 4, 8, 512, 512, "prefill")
    config = triton_flash.default_config(Env("cuda", target), spec, bucket, layout)

    def step(q: Any, k: Any, v: Any, cache: Any, lens: Any, table: Any) -> Any:
        batch = derive_batch(lens, lens, table, layout.page_size, bucket)
        return triton_flash(q, k, v, cache, batch, spec=spec, layout=layout, config=config)[:2]

    q, new = S((1024, 32, head_dim), dtype), S((1024, 8, head_dim), dtype)
    return step, [q, new, new, layout.shapes(), S((4,), INT), S((4, 8), INT)], (3,)


def compiles(program: Program, target: str) -> None:
    function, arguments, donated = program
    figures = compiler.compile(function, arguments, target=target, donated=donated).figures
    assert 0 < figures["registers"] <= 255
    assert figures["spill_bytes"] == 0
    assert figures["shared_bytes"] <= TARGETS[target].shared_bytes_per_block
    if donated and "alias_bytes" in figures:
        cache = sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arguments[donated[0]])
        )
        assert figures["alias_bytes"] == cache, "the cache is written in place"


SMALL = {
    "rms_norm": norm(rms_norm, 1, 4096, "bfloat16"),
    "add_rms_norm": norm(add_rms_norm, 2, 4096, "bfloat16"),
    "kv_write": write(HndLayout, 128, "bfloat16"),
    "rope_kv_write": rope_write(NhdLayout, 128, "bfloat16"),
}


@pytest.mark.parametrize("name", SMALL)
def test_ops_compile(name: str) -> None:
    compiles(SMALL[name], "sm_90")


def test_flash_prefill_compiles() -> None:
    compiles(prefill("sm_90", 128, "bfloat16"), "sm_90")


@pytest.mark.matrix
@pytest.mark.parametrize("target", TARGETS)
def test_sample_compiles_for_every_target(target: str) -> None:
    compiles(sample_program(), target)


@pytest.mark.matrix
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ops_compile_for_every_target_width_and_layout(target: str, dtype: str) -> None:
    for width in (128, 2880, 8192):
        compiles(norm(rms_norm, 1, width, dtype), target)
        compiles(norm(add_rms_norm, 2, width, dtype), target)
    for head_dim in (64, 128, 256):
        for kind in (NhdLayout, HndLayout):
            compiles(write(kind, head_dim, dtype), target)
            compiles(rope_write(kind, head_dim, dtype), target)


@pytest.mark.matrix
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("fields", [{}, {"window": 1024, "softcap": 50.0}], ids=["plain", "window"])
def test_flash_prefill_compiles_for_every_target(
    target: str, head_dim: int, dtype: str, fields: dict[str, Any]
) -> None:
    compiles(prefill(target, head_dim, dtype, **fields), target)
