"""The ops rms_norm, sample and kv_write and flash attention in Pallas: right when interpreted,
compiled for real sizes.
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

from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_pallas.compiler import compiler
from enginebay_pallas.flash import flash_attention
from enginebay_pallas.generations import generation
from enginebay_pallas.kv_write import IN_FLIGHT, RUN, kv_write
from enginebay_pallas.layout import TpuRpaLayout
from enginebay_pallas.rms_norm import rms_norm
from enginebay_pallas.sample import sample
from enginebay_testing import kernels
from enginebay_xla.kit import sample as sample_op
from enginebay_xla.layout import HndLayout

pytestmark = pytest.mark.long

NEWEST = ("v5e", "v6e", "7x")

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu)"
)

SAMPLE_CHECKS = dict(sample_op.sample_checks(sample.interpreted()))
QUICK = "together-40"
"""Every border in one call."""


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.matrix),
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.matrix),
    ],
)
def test_rms_norm(dtype: str) -> None:
    kernels.check_rms_norm(rms_norm.interpreted(), dtype)


def test_sample() -> None:
    SAMPLE_CHECKS[f"sample[{QUICK}]"]()


@pytest.mark.matrix
@pytest.mark.parametrize("name", [n for n in SAMPLE_CHECKS if n[7:-1] != QUICK])
def test_sample_everywhere(name: str) -> None:
    SAMPLE_CHECKS[name]()


def written(slots: list[int], layout: TpuRpaLayout, seed: int = 0) -> None:
    """The kernel's cache is that of the layout's own write, to the bit, from a cache in which
    nothing is 0.
    """
    rng = np.random.default_rng(seed)
    shape = (len(slots), layout.num_kv_heads, layout.head_dim)
    k, v = (rng.normal(size=shape).astype(jnp.dtype(layout.dtype)) for _ in range(2))
    before = {n: rng.normal(size=s.shape).astype(s.dtype) for n, s in layout.shapes().items()}
    where = np.asarray(slots, np.int32)
    wanted = jax.jit(layout.write)(before, where, k, v)["kv"]
    got = jax.jit(functools.partial(kv_write.interpreted(), layout=layout))(before, where, k, v)[
        "kv"
    ]
    assert got.dtype == wanted.dtype
    assert np.array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32)), (
        f"slots {slots}"
    )


GAPS = [0, 1, 2, 4, 9, 10, 11, 20]
MIXED = [-1, 40, 33, 3, 5, 6, 7, 8, *range(24, 24 + RUN), *range(12, 20), *GAPS, -1, 41, 42, -1]


def test_kv_write_puts_runs_and_single_tokens_at_their_slots_and_leaves_the_rest() -> None:
    """Among them a run that crosses a page's end, and one of which the first token is dropped."""
    written(MIXED, TpuRpaLayout(6, 8, 2, 16, "bfloat16"))


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_write_of_more_tokens_than_are_under_way(dtype: str) -> None:
    num_slots = RUN * (2 * IN_FLIGHT + 2)
    slots = np.random.default_rng(0).permutation(num_slots)[: 2 * IN_FLIGHT].tolist()
    written(slots, TpuRpaLayout(num_slots // 8, 8, 1, 128, dtype))
    runs = np.random.default_rng(1).permutation(num_slots // RUN)[: IN_FLIGHT + 2] * RUN
    written(
        (runs[:, None] + np.arange(RUN)).ravel().tolist(),
        TpuRpaLayout(num_slots // 8, 8, 1, 128, dtype),
    )


def test_other_layouts_are_refused() -> None:
    layout = HndLayout(2, 8, 2, 16, "float32")
    new = jnp.zeros((1, 2, 16))
    with pytest.raises(UnsupportedError, match="layout hnd"):
        kv_write(layout.init(), jnp.zeros(1, jnp.int32), new, new, layout)


CASES = {c.name: c for c in kernels.attention_cases() if c.mode == "prefill"}
FLASH = flash_attention.interpreted()
SERVED = [
    n for n, c in CASES.items() if kernels.why_not_case(FLASH, c, TpuRpaLayout, kernels.CPU) is None
]
FIRST = "prefill_window"


def test_flash_attention_says_what_it_lacks() -> None:
    assert len(SERVED) >= 12
    lacking = {
        n: kernels.why_not_case(FLASH, c, TpuRpaLayout, kernels.CPU) for n, c in CASES.items()
    }
    assert "sinks" in str(lacking["prefill_sinks"])
    assert "needs platform tpu" in str(
        kernels.why_not_case(flash_attention, CASES[FIRST], TpuRpaLayout, kernels.CPU)
    )


def test_flash_attention() -> None:
    kernels.check_attention(FLASH, CASES[FIRST], TpuRpaLayout)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [n for n in SERVED if n != FIRST])
def test_flash_attention_everywhere(name: str) -> None:
    kernels.check_attention(FLASH, CASES[name], TpuRpaLayout)


@pytest.mark.matrix
def test_flash_attention_of_several_blocks() -> None:
    """Rows that end inside of blocks of both kinds, and a window that leaves whole blocks out."""
    case = dataclasses.replace(
        CASES["prefill_window"],
        q_lens=(150, 90, 40),
        kv_lens=(150, 90, 40),
        capacity=160,
        name="blocks",
    )
    small = dataclasses.replace(
        FLASH.default_config(kernels.CPU, case.spec, case.bucket, case.layout(TpuRpaLayout)),
        block_q=32,
        block_kv=128,
    )
    problem = kernels.make_problem(case, TpuRpaLayout)
    out, cache, _ = jax.jit(
        functools.partial(FLASH, spec=case.spec, layout=problem.layout, config=small)
    )(problem.q, problem.k, problem.v, problem.cache, problem.batch)
    kernels.check_result(problem, np.asarray(out), dict(cache), None)


@pytest.mark.parametrize("target", NEWEST)
def test_blocks_of_flash_attention_fit_or_are_refused(target: str) -> None:
    spec = AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16")
    layout = TpuRpaLayout(2, 64, 8, 128, "bfloat16")
    env = Env("tpu", target)

    def of(tokens: int) -> Any:
        bucket = Bucket(tokens, 8, 1, tokens, tokens, "prefill")
        return flash_attention.default_config(env, spec, bucket, layout)

    assert of(16).block_q <= 128
    assert of(2048).block_q * spec.group <= 512
    assert of(2048).vmem_limit_bytes == generation(target).vmem_limit_bytes
    with pytest.raises(UnsupportedError, match="max_num_batched_tokens"):
        of(1 << 20)


def shapes(*given: tuple[tuple[int, ...], str]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in given]


@needs_libtpu
@pytest.mark.parametrize("target", NEWEST)
def test_rms_norm_compiles(target: str) -> None:
    for rows, dtype in ((32, "bfloat16"), (2048, "bfloat16"), (7, "float32"), (32, "float16")):
        arguments = shapes(((rows, 4096), dtype), ((4096,), dtype))
        report = compiler.compile(functools.partial(rms_norm, eps=1e-5), arguments, target=target)
        assert report.figures["vmem_bytes"] < 16 << 20


@needs_libtpu
@pytest.mark.parametrize("target", NEWEST)
def test_sample_compiles(target: str) -> None:
    def call(z: Any, seeds: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        return sample(z, seeds, top_k=top_k, top_p=top_p, min_p=min_p)

    rows = (((32,), "int32"), ((32,), "float32"), ((32,), "float32"))
    arguments = shapes(((32, 151936), "float32"), ((32, 2), "uint32"), *rows)
    figures = compiler.compile(call, arguments, target=target).figures
    assert figures["vmem_bytes"] < generation(target).vmem_limit_bytes
    assert figures["temp_bytes"] < 2 * 32 * 151936 * 4


LAYOUT = TpuRpaLayout(256, 64, 8, 128, "bfloat16")
CACHE_BYTES = 256 * 64 * 2 * 8 * 128 * 2


@needs_libtpu
@pytest.mark.parametrize("target", NEWEST)
def test_kv_write_compiles_and_works_in_place(target: str) -> None:
    for tokens in (32, 2048):
        new = ((tokens, 8, 128), "bfloat16")
        arguments = [LAYOUT.shapes(), *shapes(((tokens,), "int32"), new, new)]
        report = compiler.compile(
            functools.partial(kv_write, layout=LAYOUT), arguments, target=target, donated=(0,)
        )
        assert report.figures["alias_bytes"] == CACHE_BYTES
        assert report.figures["temp_bytes"] < CACHE_BYTES // 4


@needs_libtpu
@pytest.mark.parametrize("target", NEWEST)
def test_flash_attention_compiles_and_works_in_place(target: str) -> None:
    spec = AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16")
    tokens, rows = 2048, 8
    bucket = Bucket(tokens, rows, 32, tokens, 2048, "prefill")
    one, each = ((tokens,), "int32"), ((rows,), "int32")
    numbers = shapes(
        one, ((rows + 1,), "int32"), each, ((rows, 32), "int32"), one, one, ((3,), "int32")
    )
    config = flash_attention.default_config(Env("tpu", target), spec, bucket, LAYOUT)
    new = ((tokens, 8, 128), "bfloat16")
    arguments = [
        *shapes(((tokens, 32, 128), "bfloat16"), new, new),
        LAYOUT.shapes(),
        AttnBatch(*numbers, bucket),
    ]
    call = functools.partial(flash_attention, spec=spec, layout=LAYOUT, config=config)
    figures = compiler.compile(call, arguments, target=target, donated=(3,)).figures
    assert figures["alias_bytes"] == CACHE_BYTES
    assert figures["vmem_bytes"] < generation(target).vmem_limit_bytes
