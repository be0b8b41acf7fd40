"""Which compiled steps can stand in for others, and how many there are."""

from __future__ import annotations

import dataclasses

import pytest

from enginebay.ops.spec import Bucket
from enginebay.runner.buckets import default_sizes
from enginebay.runner.keys import StepKey, covering
from enginebay.stepping.geometry import Geometry
from enginebay.types import StepVariant

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
    assert all(any(one.covers(key) for one in first) for key in keys)
    assert first[1].bucket.mode == "mixed"


def test_the_number_of_programs_is_bounded() -> None:
    assert len(geometry().all_steps()) <= 43


def test_what_pads_less_or_differs_otherwise_does_not_cover() -> None:
    bucket = Bucket(64, 4, 8, 64, 1024, "mixed")
    key = StepKey("prefill", bucket)
    fresh = StepKey("prefill", dataclasses.replace(bucket, max_kv_len=64, mode="prefill"))
    assert key.covers(key)
    assert key.covers(fresh)
    assert not fresh.covers(key)
    for field in ("tokens", "seqs", "pages_per_seq", "max_q_len", "max_kv_len"):
        smaller = dataclasses.replace(bucket, **{field: getattr(bucket, field) // 2})
        assert key.covers(StepKey("prefill", smaller)), field
        assert not StepKey("prefill", smaller).covers(key), field
    for other in (
        {"variant": StepVariant.SAMPLE},
        {"full_vocab": True},
        {"names": frozenset({"dry"})},
    ):
        assert not dataclasses.replace(key, **other).covers(key)  # type: ignore[arg-type]
    verify = StepKey("verify", Bucket(20, 4, 8, 5, 1024, "mixed"))
    fewer = dataclasses.replace(verify, bucket=Bucket(10, 2, 8, 5, 1024, "mixed"))
    other_width = dataclasses.replace(verify, bucket=Bucket(8, 2, 8, 4, 1024, "mixed"))
    assert verify.covers(fewer)
    assert not verify.covers(other_width)
    assert not verify.covers(dataclasses.replace(fewer, kind="decode"))
