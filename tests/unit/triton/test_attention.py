"""Attention in Triton by interpretation: the op's contract, and faults planted in the kernel are
found.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

pytest.importorskip("triton", reason='triton is not installed: the extra "gpu" brings it')
pytest.importorskip("jax_triton", reason='jax-triton is not installed: the extra "gpu" brings it')

from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_testing.attention_cases import AttentionCase, attention_cases
from enginebay_testing.attention_inputs import make_problem
from enginebay_testing.kernels import (
    check_attention,
    check_result,
    check_rows_are_independent,
    run_attention,
    why_not_case,
)
from enginebay_triton.attention import TritonAttention, attention
from enginebay_triton.attention_config import TritonAttentionConfig
from enginebay_triton.call import Launch
from enginebay_triton.interpreter import interpret
from enginebay_triton.layout import NhdLayout
from enginebay_triton.targets import TARGETS
from enginebay_xla.layout import HndLayout

CPU = Env("cpu")
CASES = {case.name: case for case in attention_cases()}
QUICK = (
    "decode_paged_float32",
    "prefill_sinks",
    "decode_group_16_dim_16_float32",
    "mixed_softcap",
    "decode_all",
    "mixed_kv_shared",
)
interpreted = attention.interpreted()


@pytest.mark.parametrize("name", QUICK)
def test_representative_cases(name: str) -> None:
    case = CASES[name]
    assert why_not_case(interpreted, case, NhdLayout, CPU) is None
    check_attention(interpreted, case, NhdLayout)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [NhdLayout, HndLayout])
@pytest.mark.parametrize("name", CASES)
def test_every_case(name: str, layout: Any) -> None:
    reason = why_not_case(interpreted, CASES[name], layout, CPU)
    if reason is not None:
        pytest.skip(reason)
    check_attention(interpreted, CASES[name], layout)


def test_the_other_layout() -> None:
    check_attention(interpreted, CASES["decode_paged_float16"], HndLayout)


def test_rows_are_independent() -> None:
    check_rows_are_independent(interpreted, CASES["decode_paged_float32"], NhdLayout)


LONG = AttentionCase(
    "decode_long",
    "decode",
    (1, 1, 1),
    (1, 130, 500),
    AttnSpec(4, 2, 16),
    page_size=32,
    capacity=512,
)


@dataclasses.dataclass(frozen=True)
class Configured(TritonAttention):
    """Attention whose default is a given configuration."""

    fixed: TritonAttentionConfig | None = None

    def default_config(self, *_: Any) -> TritonAttentionConfig:
        assert self.fixed is not None, "made by configured"
        return self.fixed


def configured(config: TritonAttentionConfig, launcher: Any = interpret) -> Configured:
    return Configured(caps=interpreted.caps, launcher=launcher, fixed=config)


@pytest.mark.parametrize(
    ("splits", "fields"),
    [(5, {"inputs": ("sinks",), "return_lse": True}), (5, {"window": 300})],
)
def test_splits_of_the_context_change_nothing(splits: int, fields: dict[str, Any]) -> None:
    spec = dataclasses.replace(LONG.spec, **fields)
    case = dataclasses.replace(LONG, spec=spec)
    check_attention(configured(TritonAttentionConfig(16, 32, splits)), case, NhdLayout)


@pytest.mark.parametrize("page_size", [8, 16, 24, 64])
def test_pages_smaller_than_a_tile_and_pages_that_do_not_fit_it(page_size: int) -> None:
    case = dataclasses.replace(LONG, page_size=page_size, capacity=528)
    check_attention(configured(TritonAttentionConfig(16, 32, splits=3)), case, NhdLayout)


def test_splits_past_a_short_row_are_not_read(tmp_path: Any) -> None:
    filled = planted("if (start >= stop) & (split > 0):", "if start < 0:", tmp_path)
    for launcher in (interpret, filled):  # what nobody wrote, or parts of nothing
        check_attention(
            configured(TritonAttentionConfig(16, 32, splits=16), launcher), LONG, NhdLayout
        )


def test_the_first_split_has_the_sinks_though_the_window_begins_behind_it() -> None:
    spec = dataclasses.replace(LONG.spec, inputs=("sinks",), return_lse=True, window=100)
    case = dataclasses.replace(LONG, spec=spec)
    check_attention(configured(TritonAttentionConfig(16, 32, splits=4, chunk=128)), case, NhdLayout)


@pytest.mark.parametrize(
    ("kv_len", "buckets"),
    [(1100, (1104, 2200)), (500, (512, 2200)), (8500, (8512, 10000))],
    ids=["several_splits", "one_split", "more_than_are_added_up_at_a_time"],
)
def test_deterministic_rows_have_the_same_bits_in_any_bucket(
    kv_len: int, buckets: tuple[int, int]
) -> None:
    spec = dataclasses.replace(LONG.spec, deterministic=True)
    alone = AttentionCase(
        "decode_long",
        "decode",
        (1,),
        (kv_len,),
        spec,
        page_size=32,
        capacity=(kv_len // 32 + 3) * 32,
    )
    bits = []
    for max_kv_len in buckets:
        case = dataclasses.replace(alone, max_kv_len=max_kv_len)
        config = attention.default_config(
            Env("cuda", "sm_90"), spec, case.bucket, case.layout(NhdLayout)
        )
        assert (config.splits, config.chunk) == (-(-max_kv_len // 512), 512)
        problem = make_problem(case, NhdLayout)
        out, cache, lse = run_attention(interpreted, problem)
        check_result(problem, out, cache, lse)
        bits.append(out[0].tobytes())
    assert bits[0] == bits[1]


def test_small_batches_are_split_and_full_ones_are_not() -> None:
    spec = AttnSpec(32, 8, 128, q_dtype="bfloat16", kv_dtype="bfloat16")
    layout = NhdLayout(64, 64, 8, 128, "bfloat16")

    def splits(rows: int, max_kv_len: int) -> int:
        bucket = Bucket(rows, rows, max_kv_len // 64, 1, max_kv_len, "decode")
        return attention.default_config(Env("cuda", "sm_90"), spec, bucket, layout).splits

    assert [splits(1, 32768), splits(1, 1024), splits(32, 4096), splits(128, 4096)] == [64, 8, 2, 1]
    assert (
        splits(128, 32768) == 8
    )  # of one long row, no more than 4,096 positions wait for each other


@pytest.mark.parametrize("mode", ["decode", "mixed"])
def test_candidates_begin_with_the_default_and_fit(mode: Any) -> None:
    spec = AttnSpec(16, 4, 256, q_dtype="bfloat16", kv_dtype="bfloat16")
    layout = NhdLayout(64, 64, 4, 256, "bfloat16")
    tokens = 4 if mode == "decode" else 512
    bucket = Bucket(tokens, 4, 64, 1 if mode == "decode" else 512, 4096, mode)
    for arch in (*TARGETS, "sm_89"):  # of one that is not known, the least that any has
        env = Env("cuda", arch)
        found = attention.candidates(env, spec, bucket, layout)
        assert found[0] == attention.default_config(env, spec, bucket, layout)
        assert len(found) == len(set(found)) > 5


def planted(text: str, replacement: str, tmp_path: Any) -> Any:
    """A launcher that runs the attention kernel with a line of it changed."""
    import importlib.util

    from enginebay_triton import attention_kernels

    source = attention_kernels.__file__
    assert source is not None
    code = Path(source).read_text(encoding="utf-8")
    assert code.count(text) == 1
    path = tmp_path / "planted.py"
    path.write_text(code.replace(text, replacement), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"planted_{abs(hash(replacement))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def launcher(kernel: Any, arrays: Any, how: Launch) -> Any:
        return interpret(getattr(module, kernel.fn.__name__), arrays, how)

    return launcher


SMALL = CASES["decode_paged_float32"]


def test_a_mask_off_by_one_is_found(tmp_path: Any) -> None:
    launcher = planted("is_key = at < stop", "is_key = at <= stop", tmp_path)
    case = dataclasses.replace(CASES["prefill_not_causal"], poison=1e30)
    with pytest.raises(AssertionError, match="is off by"):
        check_attention(configured(TritonAttentionConfig(16, 16), launcher), case, NhdLayout)


def test_a_page_read_beyond_the_cache_is_found(tmp_path: Any) -> None:
    launcher = planted("pages.to(tl.int64) * PAGE", "(pages + 9).to(tl.int64) * PAGE", tmp_path)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="outside of k_ptr"):
        check_attention(configured(TritonAttentionConfig(16, 16), launcher), SMALL, NhdLayout)


def test_a_read_beyond_the_page_table_is_found(tmp_path: Any) -> None:
    launcher = planted(
        "table + tile // PAGE_SIZE", "table + tile // PAGE_SIZE + 100 * PAGE_SIZE", tmp_path
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="outside of page_table_ptr"):
        check_attention(configured(TritonAttentionConfig(16, 16), launcher), SMALL, NhdLayout)


def test_a_race_between_splits_is_found(tmp_path: Any) -> None:
    launcher = planted(
        "part = ((row * SPLITS + split) * NUM_Q_HEADS",
        "part = ((row * SPLITS) * NUM_Q_HEADS",
        tmp_path,
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="a race"):
        check_attention(
            configured(TritonAttentionConfig(16, 16, splits=2), launcher), LONG, NhdLayout
        )


def test_the_cache_is_the_array_that_was_given() -> None:
    problem = make_problem(SMALL, NhdLayout)
    config = TritonAttentionConfig(16, 16)
    arguments = (problem.q, None, None, problem.cache, problem.batch)
    _, cache, lse = interpreted(*arguments, spec=SMALL.spec, layout=problem.layout, config=config)
    assert cache["kv"] is problem.cache["kv"]
    assert lse is None
