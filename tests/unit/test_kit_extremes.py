"""Attention cases have sizes that 8 and 16 bits do not number, and numbers that narrow formats do
not hold.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops import batches
from enginebay.ops.spec import AttnSpec, Bucket, Mode
from enginebay_testing import oracle
from enginebay_testing.attention_cases import (
    IN_THE_DEFAULT_CHECK,
    AttentionCase,
    attention_cases,
)
from enginebay_testing.attention_inputs import packed_batch
from enginebay_testing.attention_numbers import (
    EXTREME_SCORES,
    common_parts,
    extreme_numbers,
    random_keys,
    random_queries,
    random_values,
)
from enginebay_testing.attention_runs import AttentionRuns, other_numbers
from enginebay_testing.attention_suite import fitted
from enginebay_xla.attention import xla_attention
from enginebay_xla.layout import HndLayout

pytestmark = pytest.mark.long

NARROW = AttnSpec(4, 2, 80, q_dtype="bfloat16", kv_dtype="bfloat16")
WIDE = AttnSpec(4, 2, 80, q_dtype="float32")
CASES = {case.name: case for case in attention_cases()}


def numbers_of(spec: AttnSpec, scores: str, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two queries, and the keys of one row."""
    rng = np.random.default_rng(0)
    parts = common_parts(spec, scores, rng)
    (found,) = random_keys(spec, scores, (keys,), rng, parts)
    return random_queries(spec, scores, 2, rng, parts), found


def scores_of(spec: AttnSpec, scores: str, keys: int = 200) -> np.ndarray:
    """Return the scores [2, Hq, keys] of two queries with each key."""
    q, k = numbers_of(spec, scores, keys)
    by_head = np.repeat(k.astype(np.float64), spec.group, axis=1)
    return np.einsum("qhd,khd->qhk", q.astype(np.float64), by_head) * spec.softmax_scale


def share_of(spec: AttnSpec, q: np.ndarray, k: np.ndarray, **changed: Any) -> np.ndarray:
    """Return the output over values that are random numbers near 1."""
    v = random_values("one_sign", "float32", k.shape, np.random.default_rng(1))
    return oracle.attend(q, k, v, dataclasses.replace(spec, causal=False, **changed))[0]


def test_a_default_case_has_more_rows_pages_and_slots_than_narrow_numbers_count() -> None:
    case = CASES["decode_many_rows"]
    layout = case.layout(HndLayout)
    assert case.name in IN_THE_DEFAULT_CHECK
    assert len(case.q_lens) > 256
    assert layout.num_pages > 256
    assert layout.num_pages * layout.page_size > 65_536
    assert max(case.kv_lens) == case.bucket.max_kv_len, "a row fills its pages"
    assert case.spec.group == 3
    assert len({case.kv_lens[i] - case.kv_lens[i % 64] for i in range(64, 256)}) > 1


def test_a_default_case_has_a_long_row_that_is_a_page_and_its_first_key_matters() -> None:
    case = CASES["decode_long_rows_are_pages"]
    assert case.name in IN_THE_DEFAULT_CHECK
    assert max(case.kv_lens) > 4096
    assert max(CASES["decode_very_long_rows_are_pages"].kv_lens) > 65_536
    rng = np.random.default_rng(0)
    parts = common_parts(case.spec, case.scores, rng)
    keys = random_keys(case.spec, case.scores, case.kv_lens, rng, parts)[1]
    along = keys[:, 0].astype(np.float64) @ parts.queries[0] * case.spec.softmax_scale
    assert np.argmax(along) == 0


def test_a_default_case_has_slopes_over_distances_that_bfloat16_does_not_hold() -> None:
    case = CASES["decode_alibi_far"]
    assert case.name in IN_THE_DEFAULT_CHECK
    assert case.spec.inputs == ("slopes",)
    assert max(case.kv_lens) > 2 * 256


def test_rows_and_groups_fit_a_kernel() -> None:
    caps = dataclasses.replace(
        xla_attention.caps, rows=lambda n: n <= 64, group=lambda n: n in (1, 2, 4)
    )
    case = fitted(CASES["decode_many_rows"], caps)
    assert (len(case.q_lens), case.spec.group) == (33, 4)
    assert caps.rows(case.bucket.seqs)
    assert fitted(CASES["decode_many_rows"], xla_attention.caps) == CASES["decode_many_rows"]


@pytest.mark.parametrize("spec", [NARROW, WIDE], ids=["narrow", "wide"])
def test_very_large_scores_are_beyond_float16_and_below_a_weak_mask(spec: AttnSpec) -> None:
    assert scores_of(spec, "very_low").max() < -70_000
    assert scores_of(spec, "very_high").min() > 70_000


def test_scores_that_rise_give_each_block_a_new_maximum() -> None:
    found = scores_of(NARROW, "rising", 1000)
    highest = found.reshape(*found.shape[:2], 10, 100).max(axis=-1)
    assert (np.diff(highest, axis=-1) > 0).mean() > 0.8
    assert 1.0 < np.median(found[..., -1] - found[..., 0]) < 3.0


def test_a_peak_weighs_about_as_much_as_all_others() -> None:
    weights = np.exp(scores_of(NARROW, "peak", 300))
    share = weights.max(axis=-1) / weights.sum(axis=-1)
    assert 0.1 < np.median(share) < 0.9


def test_queries_that_are_scaled_in_16_bits_show_where_products_cancel() -> None:
    def off_by(scores: str) -> float:
        q, k = numbers_of(NARROW, scores, 200)
        scaled = (q * np.float32(NARROW.softmax_scale)).astype(jnp.bfloat16)
        right = share_of(NARROW, q, k)
        return float(np.abs(share_of(NARROW, scaled, k, scale=1.0) - right).max())

    assert off_by("cancelling") > 0.03
    assert off_by("plain") < 0.01
    assert np.abs(scores_of(NARROW, "cancelling")).max() < 50


def test_far_values_have_scales_and_zero_points_that_narrow_formats_do_not_hold() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        rng = np.random.default_rng(0)
        v = random_values("far", dtype, (50, 64), rng).astype(jnp.dtype(dtype)).astype(float)
        low, high = v.min(axis=-1), v.max(axis=-1)
        assert np.isfinite(v).all()
        assert (low / ((high - low) / 15) > 128).all()
        if dtype != "float16":
            assert (high / 448 > 65_504).all()


def test_each_program_also_runs_with_extreme_numbers() -> None:
    def found(spec: AttnSpec, *, spares: bool = True) -> set[tuple[str, str]]:
        runs = AttentionRuns(spares=spares)
        made = [
            other_numbers(AttentionCase(f"case {i}", "decode", (1,), (9,), spec), runs)
            for i in range(40)
        ]
        assert {len(each) for each in made} == {2 if spares else 5}
        return {(each.scores, each.values) for case in made for each in case}

    assert {scores for scores, _ in found(NARROW)} >= set(EXTREME_SCORES)
    assert {scores for scores, _ in found(WIDE)} >= {"very_low", "very_high"}
    stored = dataclasses.replace(WIDE, kv_storage="uint4")
    assert {values for _, values in found(stored)} == {"plain", "far"}
    assert all(each.values == "far" for each in extreme_numbers(stored, "any", "plain"))
    assert len(found(NARROW, spares=False)) >= len(found(NARROW))


BUCKETS: dict[str, tuple[Mode, tuple[int, ...], tuple[int, ...]]] = {
    "decode": ("decode", (1, 0, 1, 0), (5, 0, 33, 0)),
    "prefill": ("prefill", (17, 5, 1, 0), (17, 5, 1, 0)),
    "mixed": ("mixed", (1, 1, 9, 17, 30, 0), (17, 64, 9, 40, 64, 0)),
    "empty": ("mixed", (0, 0), (0, 0)),
}


@pytest.mark.parametrize("kind", BUCKETS)
def test_the_batch_of_a_case_is_the_one_that_engines_derive(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "jnp", np)  # the same arithmetic, without a program
    mode, q_lens, kv_lens = BUCKETS[kind]
    rows = len(q_lens)
    bucket = Bucket(
        tokens=rows if mode == "decode" else sum(q_lens) + 3,
        seqs=rows,
        pages_per_seq=4,
        max_q_len=64,
        max_kv_len=64,
        mode=mode,
    )
    table = np.random.default_rng(0).permutation(rows * 4).reshape(rows, 4).astype(np.int32)
    new, totals = (np.array(each, np.int32) for each in (q_lens, kv_lens))
    found = packed_batch(bucket, 16, new, totals, table)
    derive: Any = batches.derive_batch
    wanted = derive(new, totals, table, 16, bucket)
    for field in dataclasses.fields(wanted):
        one, other = (np.asarray(getattr(each, field.name)) for each in (found, wanted))
        assert (one == other).all(), field.name
        assert one.dtype == other.dtype, field.name
