"""XLA attention by the suite that any attention goes through, and what the suite cannot ask:
donation, loops, shards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.batches import derive_batch
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket, Mode
from enginebay_pallas.layout import TpuRpaLayout
from enginebay_testing import kernels
from enginebay_testing.attention_inputs import make_problem
from enginebay_testing.kernels import AttentionCase, attention_cases
from enginebay_triton.layout import NhdLayout
from enginebay_xla import attention_decode
from enginebay_xla.attention import XlaAttention, xla_attention
from enginebay_xla.layout import HndLayout

CASES = list(attention_cases())


def named(name: str) -> AttentionCase:
    return next(c for c in CASES if c.name == name)


def check(case: AttentionCase, layout_type: type[KVLayout]) -> None:
    reason = kernels.why_not_case(xla_attention, case, layout_type, Env("cpu"))
    if reason is not None:
        pytest.skip(reason)
    kernels.check_attention(xla_attention, case, layout_type)


@pytest.mark.parametrize(
    "name", ["decode_paged_float32", "decode_rows_are_pages_bfloat16", "decode_all"]
)
def test_what_accelerators_compile_gives_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_decode, "is_cpu", lambda: False)
    check(named(name), HndLayout)


@pytest.mark.parametrize(
    "name", ["mixed_paged_float32", "decode_rows_are_pages_bfloat16", "prefill_long_ragged"]
)
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    case = named(name)
    if case.mode == "decode":  # a row of one key would show nothing: the longest one comes first
        case = dataclasses.replace(case, kv_lens=case.kv_lens[::-1])
    assert case.kv_lens[0] > 1
    kernels.check_rows_are_independent(xla_attention, case, HndLayout)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    prefixes=st.lists(st.integers(1, 63), max_size=2),
    fresh=st.lists(st.integers(1, 40), max_size=2),
    chunks=st.lists(st.tuples(st.integers(2, 30), st.integers(1, 34)), max_size=2),
)
def test_ragged_mixes(prefixes: list[int], fresh: list[int], chunks: list[tuple[int, int]]) -> None:
    # One bucket for all examples, so that they are compiled once: each has a row of the longest
    # chunk.
    q_lens = [1] * len(prefixes) + [*fresh, 40] + [n for n, _ in chunks]
    kv_lens = [n + 1 for n in prefixes] + [*fresh, 40] + [n + before for n, before in chunks]
    padding = {"padding_rows": 7 - len(q_lens), "padding_tokens": 184 - sum(q_lens)}
    spec = AttnSpec(4, 2, 16, window=25)
    case = AttentionCase("ragged", "mixed", tuple(q_lens), tuple(kv_lens), spec, **padding)
    kernels.check_attention(xla_attention, case, HndLayout)


def spec_of(layout: KVLayout) -> AttnSpec:
    heads, dtype = layout.num_kv_heads, layout.dtype
    spec = AttnSpec(2 * heads, heads, layout.head_dim, q_dtype=dtype, kv_dtype=dtype)
    return spec.stored_as(layout.storage or dtype)


def decode_loop(layout: HndLayout, num_steps: int) -> jax.stages.Compiled:
    """`num_steps` decode steps in one call that donates the cache."""
    rows, heads, width = layout.num_pages, layout.num_kv_heads, layout.head_dim
    spec = spec_of(layout)
    bucket = Bucket(rows, rows, 1, 1, layout.page_size, "decode", rows_are_pages=True)

    def steps(
        cache: CacheArrays, q: jax.Array, kv_lens: jax.Array
    ) -> tuple[CacheArrays, jax.Array]:
        def step(
            i: jax.Array, state: tuple[CacheArrays, jax.Array]
        ) -> tuple[CacheArrays, jax.Array]:
            cache, q = state
            table = jnp.arange(rows, dtype=jnp.int32)[:, None]
            batch = derive_batch(
                jnp.ones_like(kv_lens), kv_lens + i, table, layout.page_size, bucket
            )
            new = q[:, :heads]
            out, cache, _ = xla_attention(q, new, new, cache, batch, spec=spec, layout=layout)
            return cache, out

        return jax.lax.fori_loop(0, num_steps, step, (cache, q))

    q = jax.ShapeDtypeStruct((rows, 2 * heads, width), layout.dtype)
    kv_lens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return jax.jit(steps, donate_argnums=0).lower(layout.shapes(), q, kv_lens).compile()


@pytest.mark.parametrize("rows", [1, 4])
def test_decode_steps_never_copy_the_cache(rows: int) -> None:
    layout = HndLayout(rows, 4096, 2, 64, "float32")
    program = decode_loop(layout, 4)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= layout.num_bytes()
    # One row's values may be copied, in the branch for values that are not finite; scores are small
    # against them.
    assert memory.temp_size_in_bytes < 1.5 * layout.num_bytes() / 2 / rows
    cache_shape = re.escape(f"f32[{rows},2,4096,64]")
    assert not re.search(rf"= {cache_shape}\S* copy\(", program.as_text())


def step_over_pages(layout: KVLayout, mode: Mode) -> jax.stages.Compiled:
    """A step of two rows that share all pages of a donated cache."""
    pages = layout.num_pages // 2
    tokens = {"decode": 2, "mixed": 48, "prefill": 48}[mode]
    bucket = Bucket(tokens, 2, pages, tokens // 2, pages * layout.page_size, mode)

    def step(cache: CacheArrays, q: jax.Array, lens: jax.Array) -> tuple[jax.Array, CacheArrays]:
        table = jnp.arange(layout.num_pages, dtype=jnp.int32).reshape(2, pages)
        batch = derive_batch(lens[0], lens[1], table, layout.page_size, bucket)
        new = q[:, : layout.num_kv_heads]
        spec = spec_of(layout)
        return xla_attention(q, new, new, cache, batch, spec=spec, layout=layout)[:2]

    q = jax.ShapeDtypeStruct((tokens, 2 * layout.num_kv_heads, layout.head_dim), layout.dtype)
    lens = jax.ShapeDtypeStruct((2, 2), jnp.int32)
    return jax.jit(step, donate_argnums=0).lower(layout.shapes(), q, lens).compile()


def hold_no_wide_copy(program: jax.stages.Compiled, layout: KVLayout) -> None:
    """Check that a program converts a small part of a quantised cache at a time."""
    plain = dataclasses.replace(layout, storage=None)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= layout.num_bytes()
    assert memory.temp_size_in_bytes < plain.num_bytes() / 8
    for shape in re.findall(r"f32\[([\d,]+)\]", program.as_text()):
        assert math.prod(map(int, shape.split(","))) < plain.num_bytes() / 4 / 8, shape


@pytest.mark.parametrize(
    ("kind", "mode", "storage"),
    [
        (HndLayout, "decode", "uint4"),
        (HndLayout, "mixed", "int8"),
        *(
            pytest.param(kind, mode, storage, marks=pytest.mark.slow)
            for kind in (HndLayout, NhdLayout, TpuRpaLayout)
            for mode in ("decode", "mixed", "prefill")
            for storage in ("int8", "uint4", "fp8")
        ),
    ],
)
def test_a_quantised_cache_is_never_converted_as_a_whole(
    kind: type[KVLayout], mode: Mode, storage: str
) -> None:
    layout = kind(256, 64, 2, 64, "float32", storage=storage)
    hold_no_wide_copy(step_over_pages(layout, mode), layout)


def test_decode_steps_on_rows_of_one_page_convert_a_part_of_the_cache() -> None:
    layout = HndLayout(4, 4096, 2, 64, "float32", storage="int8")
    hold_no_wide_copy(decode_loop(layout, 4), layout)


def test_donated_cache_is_updated_in_place() -> None:
    layout = HndLayout(4, 64, 2, 16, "float32")
    cache = layout.init()
    addresses = {name: a.unsafe_buffer_pointer() for name, a in cache.items()}
    q = jnp.ones((4, 4, 16))
    after, _ = decode_loop(layout, 2)(cache, q, jnp.full(4, 7, jnp.int32))
    assert {name: a.unsafe_buffer_pointer() for name, a in after.items()} == addresses
    assert all(a.is_deleted() for a in cache.values())
    written = np.asarray(after["k"]).any(axis=(1, 3))
    assert (written == np.isin(np.arange(64), [6, 7])).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["decode_rows_are_pages_float32", "mixed_paged_float32", "prefill_paged_float32"]
)
def test_runs_under_shard_map(name: str) -> None:
    problem = make_problem(named(name), HndLayout)
    spec = problem.case.spec
    mesh = Mesh(np.array(jax.devices()[:2]), ("kv_heads",))
    heads, pages, whole = (PartitionSpec(*a) for a in ((None, "kv_heads"), (None, "kv_heads"), ()))
    op = functools.partial(
        xla_attention,
        spec=spec.per_shard(2),
        layout=dataclasses.replace(problem.layout, num_kv_heads=1),
    )
    sharded = jax.shard_map(
        lambda *args: op(*args)[:2],
        mesh=mesh,
        in_specs=(heads, heads, heads, pages, whole),
        out_specs=(heads, pages),
    )
    out, cache = jax.jit(sharded)(
        problem.q, problem.k, problem.v, dict(problem.cache), problem.batch
    )
    kernels.check_result(problem, np.asarray(out), cache, None)


def test_unsupported_head_widths_are_refused() -> None:
    problem = make_problem(named("decode_lse"), HndLayout)
    spec = dataclasses.replace(problem.case.spec, v_head_dim=8)
    with pytest.raises(Exception, match="v_head_dim 8"):
        XlaAttention()(
            problem.q,
            problem.k,
            problem.v,
            problem.cache,
            problem.batch,
            spec=spec,
            layout=problem.layout,
        )
