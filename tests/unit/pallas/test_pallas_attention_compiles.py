"""Attention compiled for TPUs at the shapes of an 8B model: it fits the memory, and the cache is
never copied.
"""

from __future__ import annotations

import importlib.util
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, Mode
from enginebay_pallas.attention import attention
from enginebay_pallas.compiler import compiler
from enginebay_pallas.layout import TpuRpaLayout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
)

TARGETS = ("v5e", "v6e", "7x")
SEQS, TOKENS, CONTEXT = 8, 256, 4096


def bucket_of(mode: Mode, page_size: int) -> Bucket:
    decode = mode == "decode"
    return Bucket(
        SEQS if decode else TOKENS,
        SEQS,
        CONTEXT // page_size,
        1 if decode else TOKENS,
        CONTEXT,
        mode,
    )


def batch_of(bucket: Bucket) -> AttnBatch:
    tokens, seqs = bucket.tokens, bucket.seqs
    shapes = (
        (tokens,),
        (seqs + 1,),
        (seqs,),
        (seqs, bucket.pages_per_seq),
        (tokens,),
        (tokens,),
        (3,),
    )
    return AttnBatch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes), bucket)


def shapes_of(spec: AttnSpec, bucket: Bucket) -> tuple[jax.ShapeDtypeStruct, ...]:
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    return tuple(
        jax.ShapeDtypeStruct((bucket.tokens, n, spec.head_dim), spec.q_dtype) for n in heads
    )


def check(target: str, mode: Mode, spec: AttnSpec, page_size: int = 64) -> None:
    bucket = bucket_of(mode, page_size)
    layout = TpuRpaLayout(
        SEQS * bucket.pages_per_seq, page_size, spec.num_kv_heads, spec.head_dim, spec.kv_dtype
    )
    config = attention.default_config(Env("tpu", target), spec, bucket, layout)

    def step(q: Any, k: Any, v: Any, cache: Any, batch: Any) -> Any:
        return attention(q, k, v, cache, batch, spec=spec, layout=layout, config=config)[:2]

    arguments = (*shapes_of(spec, bucket), layout.shapes(), batch_of(bucket))
    figures = compiler.compile(step, arguments, target=target, donated=(3,)).figures
    assert figures["alias_bytes"] == layout.num_bytes(), "the cache is not updated in place"
    assert figures["temp_bytes"] < layout.num_bytes() / 2, (
        "there is room for a second copy of the cache"
    )
    assert 0 < figures["vmem_bytes"] <= config.vmem_limit_bytes


@pytest.mark.parametrize(
    ("target", "mode"),
    [
        pytest.param(
            target, mode, marks=() if mode == "decode" or target == "v6e" else pytest.mark.matrix
        )
        for target in TARGETS
        for mode in get_args(Mode)
    ],
)
def test_8b_shapes(target: str, mode: Mode) -> None:
    check(target, mode, AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16"))


@pytest.mark.matrix
@pytest.mark.parametrize("target", [*TARGETS, "v5p", "v4"])
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "dtype", "page_size"),
    [
        (8, 4, 64, "bfloat16", 16),
        (8, 2, 256, "bfloat16", 256),
        (4, 7, 128, "float32", 32),
        (1, 16, 128, "bfloat16", 128),
        (3, 1, 64, "float32", 128),
    ],
)
def test_other_shapes(
    target: str, heads: int, group: int, head_dim: int, dtype: str, page_size: int
) -> None:
    check(
        target,
        "mixed",
        AttnSpec(heads * group, heads, head_dim, q_dtype=dtype, kv_dtype=dtype),
        page_size,
    )


@pytest.mark.matrix
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", ["decode", "mixed"])
def test_features(target: str, mode: Mode) -> None:
    features: dict[str, Any] = {"window": 1024, "softcap": 30.0, "return_lse": True}
    check(target, mode, AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16", **features))


@pytest.mark.parametrize("target", TARGETS)
def test_split_over_eight_devices(target: str) -> None:
    spec = AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16")
    bucket = bucket_of("decode", 64)
    layout = TpuRpaLayout(SEQS * bucket.pages_per_seq, 64, 8, 128, "bfloat16")
    local_spec, local = spec.per_shard(8), TpuRpaLayout(layout.num_pages, 64, 1, 128, "bfloat16")
    config = attention.default_config(Env("tpu", target), local_spec, bucket, local)
    mesh = Mesh(np.array(compiler.devices(target, 8)), ("heads",))
    heads, pages = PartitionSpec(None, "heads"), {"kv": PartitionSpec(None, None, "heads")}

    def step(q: Any, k: Any, v: Any, cache: Any, batch: Any) -> Any:
        return attention(q, k, v, cache, batch, spec=local_spec, layout=local, config=config)[:2]

    def placed(shape: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    arguments = (
        *(placed(shape, heads) for shape in shapes_of(spec, bucket)),
        {"kv": placed(layout.shapes()["kv"], pages["kv"])},
        batch_of(bucket),
    )
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(heads, heads, heads, pages, PartitionSpec()),
        out_specs=(heads, pages),
        check_vma=False,
    )
    figures = compiler.compile(
        sharded, arguments, target=target, donated=(3,), num_devices=8
    ).figures
    assert figures["alias_bytes"] == layout.num_bytes() // 8
    assert figures["temp_bytes"] < layout.num_bytes() // 16
