"""Which compiled steps can stand in for others, and how many there are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from enginebay.config import EngineConfig
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.ops.spec import Bucket
from enginebay.types import StepVariant
from enginebay_runtime.buckets import default_sizes
from enginebay_runtime.geometry import Geometry
from enginebay_runtime.programs import Scoping, covering, covers, in_order, parts_of

DEFAULTS = {"max_num_seqs": 256, "max_num_batched_tokens": 1024, "max_model_len": 1024}


def geometry(*, ragged: bool = True, num_drafts: int = 0) -> Geometry:
    """That of the demo model with the default sizes of eSurge."""
    sizes = default_sizes(**DEFAULTS, min_rows=2, ragged_decode=ragged)
    return Geometry(sizes, 128, 1024, compact_decode=False, num_drafts=num_drafts)


@pytest.mark.parametrize(
    ("ragged", "num_drafts", "kinds"),
    [
        (True, 0, ["decode", "prefill"]),
        (False, 0, ["decode", "prefill"]),
        (True, 4, ["decode", "prefill", "verify"]),
    ],
)
def test_the_largest_of_each_kind_cover_all(
    ragged: bool, num_drafts: int, kinds: list[str]
) -> None:
    keys = geometry(ragged=ragged, num_drafts=num_drafts).all_steps()
    first = covering(keys)
    assert [key.kind for key in first] == kinds
    assert all(any(covers(one, key) for one in first) for key in keys)
    assert first[1].bucket.mode == "mixed"


def test_the_number_of_programs_is_bounded() -> None:
    assert len(geometry().all_steps()) <= 43


CPU: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "max_model_len": 1536,
    "min_rows": 1,
    "ragged_decode": True,
    "one_prefill_width": True,
}


def test_a_cpu_has_few_programs_for_32_rows() -> None:
    sizes = default_sizes(**CPU)
    steps = Geometry(sizes, 64, 1536, compact_decode=False).all_steps()
    parts = {part for key in steps for part in parts_of(key)}
    assert len(steps) == 18
    assert len(parts) <= 20
    assert {part.kind for part in parts} == {"decode", "forward", "sample"}
    modes = {(key.bucket.tokens, key.bucket.mode) for key in steps if key.kind == "prefill"}
    for num_rows, num_tokens in ((1, 20), (1, 1024), (9, 300), (32, 64)):
        for no_prefix in (True, False):
            one = Geometry(sizes, 64, 1536, compact_decode=False)
            bucket = one.prefill_bucket(num_rows, num_tokens, no_prefix=no_prefix)
            assert (bucket.tokens, bucket.mode) in modes
            assert num_tokens <= bucket.tokens < 2 * max(num_tokens, 16)
            assert bucket.mode == "mixed" or no_prefix


@pytest.mark.parametrize(("apart", "fresh"), [(False, [1024]), (True, [16, 64, 256, 1024])])
def test_a_prefill_kernel_of_its_own_has_programs_for_short_prompts_too(
    apart: bool, fresh: list[int]
) -> None:
    sizes = default_sizes(**CPU, apart=apart)
    steps = Geometry(sizes, 64, 1536, compact_decode=False).all_steps()
    modes = [key.bucket for key in steps if key.bucket.mode == "prefill"]
    assert sorted(bucket.tokens for bucket in modes) == fresh


def test_prefills_share_what_samples_after_them() -> None:
    first, second = (StepKey("prefill", Bucket(n, 8, 4, n, 256, "mixed")) for n in (16, 64))
    greedy = dataclasses.replace(first, variant=StepVariant.GREEDY)
    assert parts_of(first)[0] != parts_of(second)[0]
    assert parts_of(first)[1:] == parts_of(second)[1:]
    assert [part.bucket.tokens for part in parts_of(first)[1:]] == [1, 8]
    assert parts_of(first)[0] == parts_of(greedy)[0], (
        "whatever rows ask of sampling, the model runs alike"
    )
    assert not set(parts_of(first)[1:]) & set(parts_of(greedy)[1:])


def test_what_pads_less_or_differs_otherwise_does_not_cover() -> None:
    bucket = Bucket(64, 4, 8, 64, 1024, "mixed")
    key = StepKey("prefill", bucket)
    fresh = StepKey("prefill", dataclasses.replace(bucket, max_kv_len=64, mode="prefill"))
    assert covers(key, key)
    assert covers(key, fresh)
    assert not covers(fresh, key)
    for field in ("tokens", "seqs", "pages_per_seq", "max_q_len", "max_kv_len"):
        smaller = dataclasses.replace(bucket, **{field: getattr(bucket, field) // 2})
        assert covers(key, StepKey("prefill", smaller)), field
        assert not covers(StepKey("prefill", smaller), key), field
    for other in (
        {"variant": StepVariant.SAMPLE},
        {"full_vocab": True},
        {"names": frozenset({"dry"})},
    ):
        assert not covers(dataclasses.replace(key, **other), key)
    verify = StepKey("verify", Bucket(20, 4, 8, 5, 1024, "mixed"))
    fewer = dataclasses.replace(verify, bucket=Bucket(10, 2, 8, 5, 1024, "mixed"))
    other_width = dataclasses.replace(verify, bucket=Bucket(8, 2, 8, 4, 1024, "mixed"))
    assert covers(verify, fewer)
    assert not covers(verify, other_width)
    assert not covers(verify, dataclasses.replace(fewer, kind="decode"))


def test_a_step_for_adapters_covers_the_step_of_the_model_alone() -> None:
    keys = geometry().all_steps()
    adapting = [dataclasses.replace(key, adapts=True) for key in keys]
    assert covering([*keys, *adapting]) == covering(adapting)
    assert covers(adapting[0], keys[0])
    assert not covers(keys[0], adapting[0])


def test_steps_with_adapters_are_compiled_before_those_of_the_model_alone() -> None:
    keys, config = geometry().all_steps(), EngineConfig(model="m", max_loras=2)
    first, later = in_order(keys, config)
    adapts = [key.adapts for key in (*first, *later)]
    assert adapts == sorted(adapts, reverse=True)
    assert sum(adapts) == len(keys) == len(adapts) / 2


def test_rows_without_adapters_prefer_the_step_of_the_model_alone() -> None:
    scoping = Scoping(has_greedy=True)
    key = StepKey("decode", Bucket(4, 4, 8, 1, 1024, "decode"))
    adapting, need = dataclasses.replace(key, adapts=True), StepNeeds(StepVariant.GREEDY)
    assert not scoping.to_compile(key, need).adapts
    served = [one.adapts for one in scoping.serving(key, need)]
    assert served == sorted(served)
    assert set(served) == {False, True}, "a compiled step for adapters will do"
    assert all(one.adapts for one in scoping.serving(adapting, need))
    assert scoping.to_compile(adapting, need).adapts
    assert scoping.to_compile(key, need).adapts, "what was needed once is needed again"
