"""Ragged paged attention by the TPU interpreter: the suite of any attention, shards, and its block
sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from enginebay.errors import UnsupportedError
from enginebay.ops.batches import derive_batch
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_pallas import attention_config
from enginebay_pallas.attention import attention, check_table
from enginebay_pallas.attention_kernel import load_head
from enginebay_pallas.attention_plan import AttentionPlan
from enginebay_pallas.attention_units import chunk_units
from enginebay_pallas.generations import GENERATIONS, generation
from enginebay_pallas.layout import TpuRpaLayout
from enginebay_testing import kernels
from enginebay_testing.attention_cases import attention_cases
from enginebay_testing.attention_inputs import make_problem
from enginebay_testing.kernels import AttentionCase
from enginebay_xla.layout import HndLayout

CASES = {case.name: case for case in attention_cases()}
OFTEN = ("decode_rows_are_pages_bfloat16", "prefill_window", "mixed_all")
"""Each mode, both dtypes, features, as long tests: compiling an interpreted kernel costs seconds.
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in OFTEN else pytest.mark.matrix)
        for name in CASES
    ],
)
def test_conforms(name: str) -> None:
    interpreted = attention.interpreted()
    reason = kernels.why_not_case(interpreted, CASES[name], TpuRpaLayout, Env("cpu"))
    if reason is not None:
        pytest.skip(reason)
    kernels.check_attention(interpreted, CASES[name], TpuRpaLayout)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["decode_paged_bfloat16", "mixed_paged_float32"])
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    kernels.check_rows_are_independent(attention.interpreted(), CASES[name], TpuRpaLayout)


@pytest.mark.matrix
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_heads_and_large_pages(page_size: int, dtype: str) -> None:
    spec = AttnSpec(2, 1, 256, q_dtype=dtype, kv_dtype=dtype)
    case = AttentionCase(
        "full_vocab",
        "mixed",
        (1, 5, 20),
        (270, 5, 290),
        spec,
        page_size=page_size,
        capacity=512,
        padding_rows=0,
    )
    kernels.check_attention(attention.interpreted(), case, TpuRpaLayout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_device_takes_keys_and_values_apart(dtype: str) -> None:
    """It reads words with a stride, as nothing that is interpreted otherwise does: here by Pallas'
    plain interpreter.
    """
    heads, size, first, valid = 3, 16, 16, 13
    plan = types.SimpleNamespace(chunk_kv=size, storage=None, is_interpreted=False)
    entries = TpuRpaLayout(1, 32, heads, 128, dtype).shapes()["kv"].shape[2:]
    buffers = np.random.default_rng(0).normal(size=(2, 32, *entries)).astype(jnp.dtype(dtype))

    def kernel(source: Any, keys: Any, values: Any) -> None:
        is_valid = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < valid
        for head in range(heads):
            keys[head], values[head] = load_head(
                cast("AttentionPlan", plan), source, 1, first, head, is_valid
            )

    made = jax.ShapeDtypeStruct((heads, size, 128), jnp.dtype(dtype))
    keys, values = pl.pallas_call(kernel, out_shape=(made, made), interpret=True)(buffers)
    expected = buffers[1, first : first + size].reshape(size, -1, 128)[:, : 2 * heads].copy()
    expected[valid:] = 0
    assert np.array_equal(np.asarray(keys), expected[:, 0::2].transpose(1, 0, 2))
    assert np.array_equal(np.asarray(values), expected[:, 1::2].transpose(1, 0, 2))


@pytest.mark.long
@pytest.mark.parametrize(("mode", "q_lens"), [("decode", (1, 1)), ("mixed", (1, 5))])
def test_pages_before_the_window_are_not_read(mode: Any, q_lens: tuple[int, int]) -> None:
    """Their numbers are out of the cache, which the interpreter would tell of; the window begins
    within a block of pages.
    """
    window, page = 20, 16
    spec = AttnSpec(2, 1, 128, window=window)
    case = AttentionCase(
        "before_window", mode, q_lens, (132, 72), spec, page_size=page, capacity=144
    )
    assert (
        attention_config.default_config(
            Env("cpu"), spec, case.bucket, case.layout(TpuRpaLayout)
        ).block_kv
        == 32
    )
    problem = make_problem(case, TpuRpaLayout)
    table = np.array(problem.batch.page_table)
    firsts = [
        (kv_len - new - window + 1) // page
        for kv_len, new in zip(case.kv_lens, q_lens, strict=True)
    ]
    assert any(first % 2 for first in firsts)
    for row, first in enumerate(firsts):
        table[row, :first] = 1 << 20
    moved = dataclasses.replace(problem, batch=dataclasses.replace(problem.batch, page_table=table))
    out, cache, lse = kernels.run_attention(attention.interpreted(), moved)
    kernels.check_result(problem, out, cache, lse)


@pytest.mark.parametrize("seqs", [4, 64])
def test_a_step_has_no_more_units_than_rows_can_have(seqs: int) -> None:
    lens = np.zeros(seqs, np.int32)
    lens[:3] = 17, 16, 1
    bucket = Bucket(34, seqs, 4, 34, 64, "prefill")
    table = np.zeros((seqs, 4), np.int32)
    find_units = jax.jit(
        lambda lens, table: chunk_units(derive_batch(lens, lens, table, 16, bucket), 16)
    )
    units = jax.tree.map(np.asarray, find_units(lens, table))
    assert units.tokens.shape[0] == min(seqs, 34) + 2
    assert int(units.num_real) == 4
    assert units.rows.tolist()[:4] == [0, 0, 1, 2]
    assert set(units.rows.tolist()[4:]) == {-1}


def test_a_page_table_that_scalar_memory_does_not_hold_is_refused() -> None:
    check_table(Bucket(64, 64, 2048, 1, 131072, "decode"), 64)  # all that there is
    with pytest.raises(UnsupportedError, match=r"2048 KiB.*512 KiB.*pages of 64 tokens"):
        check_table(Bucket(256, 256, 2048, 1, 32768, "decode"), 16)


@pytest.mark.matrix
def test_runs_under_shard_map() -> None:
    problem = make_problem(CASES["decode_paged_float32"], TpuRpaLayout)
    spec, layout = problem.case.spec, dataclasses.replace(problem.layout, num_kv_heads=1)
    kernel = attention.interpreted()
    config = kernel.default_config(Env("cpu"), spec.per_shard(2), problem.case.bucket, layout)
    op = functools.partial(kernel, spec=spec.per_shard(2), layout=layout, config=config)
    heads, whole = PartitionSpec(None, "kv_heads"), PartitionSpec()
    pages = {
        name: PartitionSpec(*[None] * axis, "kv_heads") for name, axis in layout.head_axis().items()
    }
    sharded = jax.shard_map(
        lambda *args: op(*args)[:2],
        mesh=Mesh(np.array(jax.devices()[:2]), ("kv_heads",)),
        in_specs=(heads, heads, heads, pages, whole),
        out_specs=(heads, pages),
        check_vma=False,
    )
    out, cache = jax.jit(sharded)(
        problem.q, problem.k, problem.v, dict(problem.cache), problem.batch
    )
    kernels.check_result(problem, np.asarray(out), dict(cache), None)


def test_it_says_what_it_cannot_serve() -> None:
    case = CASES["decode_paged_float16"]
    reason = str(kernels.why_not_case(attention, case, HndLayout, Env("cpu")))
    for part in ("needs platform tpu", "layout hnd", "float16"):
        assert part in reason, f"{part!r} is missing in {reason!r}"
    assert (
        kernels.why_not_case(attention, CASES["mixed_all"], TpuRpaLayout, Env("tpu", "v6e")) is None
    )


def problem_sizes(
    mode: str, dtype: str, page_size: int, head_dim: int
) -> tuple[AttnSpec, Bucket, TpuRpaLayout]:
    spec = AttnSpec(32, 8, head_dim, q_dtype=dtype, kv_dtype=dtype)
    tokens = 32 if mode == "decode" else 2048
    bucket = Bucket(tokens, 32, 8192 // page_size, 1 if mode == "decode" else 2048, 8192, mode)  # type: ignore[arg-type]
    return spec, bucket, TpuRpaLayout(64, page_size, 8, head_dim, dtype)


@pytest.mark.parametrize("mode", ["decode", "mixed"])
@pytest.mark.parametrize(
    ("arch", "dtype", "page_size", "head_dim"),
    [
        *((each.name, "bfloat16", 16, 64) for each in GENERATIONS),
        *((each.name, "float32", 256, 256) for each in GENERATIONS if each.name != "v4"),
        ("v6e", "bfloat16", 48, 64),
        ("v6e", "bfloat16", 160, 64),  # half of three pages is no whole number of pages
    ],
)
def test_block_sizes_fit_the_generation(
    arch: str, mode: str, dtype: str, page_size: int, head_dim: int
) -> None:
    spec, bucket, layout = problem_sizes(mode, dtype, page_size, head_dim)
    env = Env("tpu", arch)
    found = attention.candidates(env, spec, bucket, layout)
    assert found[0] == attention.default_config(env, spec, bucket, layout)
    assert len(set(found)) == len(found)
    for config in found:
        assert attention_config.vmem_bytes(config, spec, layout) <= config.vmem_limit_bytes
        assert config.vmem_limit_bytes < generation(arch).vmem_bytes
        assert config.chunk_kv % page_size == config.block_kv % config.chunk_kv == 0
        assert config.decode_block_kv % config.chunk_kv == 0
        assert config.block_q.bit_count() == 1


def test_larger_memories_get_larger_blocks() -> None:
    sizes = [
        attention.default_config(
            Env("tpu", arch), *problem_sizes("decode", "bfloat16", 64, 128)
        ).decode_block_kv
        for arch in ("v4", "v6e")
    ]
    assert sizes[0] < sizes[1]


def test_unknown_generations_have_no_block_sizes() -> None:
    with pytest.raises(UnsupportedError, match="7x"):
        attention.default_config(Env("tpu", "v99"), *problem_sizes("decode", "bfloat16", 64, 128))
