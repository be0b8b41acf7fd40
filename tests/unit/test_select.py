"""Choosing implementations and layouts: explicit or an error, every refusal kept; what an op costs
at best.
"""

from __future__ import annotations

import dataclasses

import jax
import pytest

from enginebay.errors import UnknownNameError, UnsupportedError
from enginebay.ops.caps import Caps, Env
from enginebay.ops.select import Candidate, choose, common_layout
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_bench.attention import attention_cost
from enginebay_bench.cost import Cost
from enginebay_xla.cost import linear_cost
from enginebay_xla.layout import HndLayout

SPEC = AttnSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
BUCKET = Bucket(tokens=4, seqs=4, pages_per_seq=1, max_q_len=1, max_kv_len=64, mode="decode")
LAYOUT = HndLayout(num_pages=2, page_size=64, num_kv_heads=2, head_dim=64, dtype="float32")
HERE = Env("cpu")
CAPS = Caps(platforms=frozenset({"cpu"}), layouts=("hnd",))

CANDIDATES = [
    Candidate("slow", 0, impl="slow"),
    Candidate("fast", 10, impl="fast"),
    Candidate("picky", 20, impl="picky"),
    Candidate("absent", 30, unavailable="needs triton"),
    Candidate("also_slow", 0, impl="also_slow"),
]


def why_not(impl: str) -> str | None:
    return "head_dim 7" if impl == "picky" else None


def test_auto_takes_the_best_that_can_and_says_why_not_the_others() -> None:
    chosen, reason = choose("kernels.x", "auto", CANDIDATES, why_not)
    assert chosen.impl == "fast"
    assert (reason.setting, reason.chosen) == ("kernels.x", "fast")
    assert reason.refused == (
        ("absent", "needs triton"),
        ("picky", "head_dim 7"),
        ("also_slow", "lower priority (0)"),
        ("slow", "lower priority (0)"),
    )


def test_equals_are_chosen_by_name_whatever_their_order() -> None:
    for few in (CANDIDATES[:1] + CANDIDATES[4:], CANDIDATES[4:] + CANDIDATES[:1]):
        chosen, reason = choose("kernels.x", "auto", few, why_not)
        assert chosen.name == "also_slow"
        assert reason.refused == (("slow", "the same priority (0), later by name"),)


def test_a_name_is_taken_whatever_its_priority() -> None:
    chosen, reason = choose("kernels.x", "slow", CANDIDATES, why_not)
    assert (chosen.name, reason.why) == ("slow", "chosen by name")


@pytest.mark.parametrize(
    ("name", "why"), [("picky", "picky: head_dim 7"), ("absent", "absent: needs triton")]
)
def test_a_name_that_cannot_serve_is_an_error_and_nothing_else_is_taken(
    name: str, why: str
) -> None:
    with pytest.raises(UnsupportedError, match=why) as refusal:
        choose("kernels.x", name, CANDIDATES, why_not)
    assert "Allowed: fast, also_slow, slow." in str(refusal.value)


def test_a_name_that_nobody_has_is_unknown() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown kernels.x 'fst'.*Did you mean 'fast'"):
        choose("kernels.x", "fst", CANDIDATES, why_not)


def test_auto_without_any_that_can_lists_every_refusal() -> None:
    with pytest.raises(
        UnsupportedError, match=r"absent: needs triton; picky: head_dim 7.*nothing that is"
    ):
        choose("kernels.x", "auto", CANDIDATES[2:4], why_not)
    with pytest.raises(UnsupportedError, match="none is installed"):
        choose("kernels.x", "auto", [], why_not)


def test_a_broken_namesake_does_not_hide_the_one_that_works() -> None:
    twins = [
        Candidate("x", 0, unavailable="the name is already taken"),
        Candidate("x", 0, impl="works"),
    ]
    assert choose("kernels.x", "x", twins, why_not)[0].impl == "works"


@pytest.mark.parametrize(
    ("preferences", "common"),
    [
        ([], None),
        ([("a", "b")], "a"),
        ([("a", "b"), ("b", "a")], "a"),
        ([("a", "b", "c"), ("c", "b")], "b"),
        ([("a",), ("b",)], None),
        ([("a",), ()], None),
    ],
)
def test_the_common_layout_follows_the_first_ones_order(
    preferences: list[tuple[str, ...]], common: str | None
) -> None:
    assert common_layout(preferences) == common


def test_what_fits_has_no_reason_against_it() -> None:
    assert CAPS.why_not(HERE, SPEC, BUCKET, LAYOUT) is None


@pytest.mark.parametrize(
    ("caps", "spec", "reason"),
    [
        ({"platforms": frozenset({"cuda", "tpu"})}, {}, "needs platform cuda or tpu, this is cpu"),
        ({"arch": lambda arch: arch == "sm_90"}, {}, "does not support architecture unknown"),
        ({"layouts": ("nhd", "blocks")}, {}, r"does not support layout hnd \(has nhd, blocks\)"),
        ({"modes": frozenset({"prefill"})}, {}, "mode decode"),
        ({"q_dtypes": frozenset({"bfloat16"})}, {}, "dtype float32"),
        ({"kv_dtypes": frozenset({"bfloat16"})}, {}, "cache dtype float32"),
        ({"head_dim": lambda size: size >= 128}, {}, "head_dim 64"),
        ({"group": lambda size: size == 1}, {}, "4 query heads per KV head"),
        ({"page_size": lambda size: size == 16}, {}, "page size 64"),
        ({"rows": lambda count: count <= 3}, {}, "4 rows"),
        ({"context": lambda count: count <= 63}, {}, "a context of 64 tokens"),
        ({}, {"window": 8}, "features window"),
        ({}, {"softcap": 30.0}, "features softcap"),
        ({}, {"inputs": ("sinks",)}, "features sinks"),
        ({}, {"return_lse": True}, "features lse"),
        ({}, {"kv_shared": True}, "features kv_share"),
        ({}, {"v_head_dim": 32, "v_is_k_prefix": True}, "features mla"),
        ({}, {"deterministic": True}, "features deterministic"),
        (
            {"features": frozenset({"window"})},
            {"window": 8, "inputs": ("sinks",)},
            "features sinks",
        ),
    ],
)
def test_each_limit_gives_its_reason(caps: dict, spec: dict, reason: str) -> None:
    limited, asked = dataclasses.replace(CAPS, **caps), dataclasses.replace(SPEC, **spec)
    found = limited.why_not(HERE, asked, BUCKET, LAYOUT)
    assert found is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found)
    assert ";" not in found


def test_all_reasons_are_told_at_once() -> None:
    caps = dataclasses.replace(CAPS, layouts=("nhd",), modes=frozenset())
    assert str(caps.why_not(Env("tpu"), SPEC, BUCKET, LAYOUT)).count(";") == 2


def test_features_that_are_there_are_no_obstacle() -> None:
    caps = dataclasses.replace(CAPS, features=frozenset({"window", "softcap"}))
    assert (
        caps.why_not(HERE, dataclasses.replace(SPEC, window=8, softcap=30.0), BUCKET, LAYOUT)
        is None
    )


TINY = AttnSpec(num_q_heads=2, num_kv_heads=1, head_dim=4)


def pairs(spec: AttnSpec, q_lens: list[int], kv_lens: list[int]) -> float:
    """Query-key pairs that a cost counts: 2 heads, 2 * (4 + 4) operations for each pair."""
    return attention_cost(spec, q_lens, kv_lens).flops / (2 * 2 * (4 + 4))


def counted_one_by_one(window: int | None, q_len: int, kv_len: int) -> int:
    positions = range(kv_len - q_len, kv_len)
    return sum(min(p + 1, window or kv_len) for p in positions)


def test_attention_cost_of_one_token_over_a_context() -> None:
    # 2 query heads, 10 keys, 4 + 4 features, multiply and add; K and V of 10 tokens in 2 bytes; q
    # in, out and K, V out.
    assert attention_cost(TINY, [1], [10]) == Cost(
        flops=2 * 2 * 10 * 8, bytes_read=10 * 8 * 2 + 2 * 4 * 2, bytes_written=8 * 2 + 2 * 4 * 2
    )


@pytest.mark.parametrize("window", [None, 1, 2, 5, 100])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 9), (4, 4), (4, 10), (7, 9)])
def test_attention_counts_the_pairs_that_the_mask_leaves(
    window: int | None, q_len: int, kv_len: int
) -> None:
    spec = dataclasses.replace(TINY, window=window)
    assert pairs(spec, [q_len], [kv_len]) == counted_one_by_one(window, q_len, kv_len)


def test_a_window_bounds_what_is_read() -> None:
    spec = dataclasses.replace(TINY, window=3)
    # 2 new tokens see 4 positions between them.
    assert attention_cost(spec, [2], [100]).bytes_read == 4 * 8 * 2 + 2 * 2 * 4 * 2


def test_rows_add_up_and_without_a_causal_mask_everything_is_seen() -> None:
    assert pairs(TINY, [4, 1], [4, 9]) == 10 + 9
    assert pairs(dataclasses.replace(TINY, causal=False), [4], [6]) == 24


def test_a_value_that_is_part_of_the_key_is_read_once() -> None:
    spec = dataclasses.replace(TINY, v_head_dim=3, v_is_k_prefix=True)
    cost = attention_cost(spec, [1], [10], kv_bytes=1, q_bytes=4)
    assert cost.flops == 2 * 2 * 10 * (4 + 3)
    assert cost.bytes_read == 10 * 4 + 2 * 4 * 4
    assert cost.bytes_written == 4 + 2 * 3 * 4


def test_linear_cost_and_time() -> None:
    x, weight = jax.ShapeDtypeStruct((3, 10), "f4"), jax.ShapeDtypeStruct((20, 10), "f2")
    cost = linear_cost(x, weight)
    assert cost == Cost(flops=1200, bytes_read=400 + 120, bytes_written=240)
    assert cost.time_s(flops_per_s=1200, bytes_per_s=7600) == 1.0
    assert cost.time_s(flops_per_s=1e12, bytes_per_s=380) == 2.0


def test_what_was_measured_faster_is_taken_and_said_of_the_one_with_more_priority() -> None:
    chosen, reason = choose(
        "kernels.x", "auto", CANDIDATES[:2], why_not, lambda impls: (impls[-1], "measured")
    )
    assert (chosen.name, reason.why) == ("slow", "measured")
    assert reason.refused == (("fast", "measured slower, or not measured in the same buckets"),)
