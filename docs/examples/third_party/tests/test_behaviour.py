"""Tests of what the two parts promise in addition to their contracts."""

from __future__ import annotations

import pytest
from enginebay_third_party.chunked_scan import WORKING_BYTES, chunked_scan
from enginebay_third_party.shortest_prompt_first import (
    ShortestPromptFirst,
    ShortestPromptFirstOptions,
)

from enginebay.contracts.scheduler import Limits, SchedulerView, WaitingView
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay_xla.layout import HndLayout


def admitted(*waiting: WaitingView, tokens_per_s: float = 100.0) -> list[str]:
    view = SchedulerView(10.0, waiting, (), Limits(4, 64, 8, free_rows=1, free_tokens=1000))
    scheduler = ShortestPromptFirst(ShortestPromptFirstOptions(tokens_per_s=tokens_per_s))
    return [name for name, _ in scheduler.decide(view, None)[0].prefill]


def test_short_prompt_overtakes_a_long_one_that_has_just_come() -> None:
    assert admitted(
        WaitingView("long", 500, 8, arrival_s=0.0), WaitingView("short", 3, 8, arrival_s=1.0)
    ) == ["short"]


def test_waiting_makes_up_for_length() -> None:
    assert admitted(
        WaitingView("long", 500, 8, arrival_s=0.0), WaitingView("short", 3, 8, arrival_s=5.5)
    ) == ["long"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("softcap", 5.0, "features softcap"),
        ("inputs", ("sinks",), "features sinks"),
        ("kv_shared", True, "features kv_share"),
    ],
)
def test_kernel_says_what_it_cannot_do(field: str, value: object, reason: str) -> None:
    spec = AttnSpec(4, 2, 16, **{field: value})  # type: ignore[arg-type]
    layout = HndLayout(2, 16, 2, 16, "float32")
    bucket = Bucket(1, 1, 1, 1, 16, "decode")
    assert (
        chunked_scan.caps.why_not(Env("cpu"), spec, bucket, layout) == f"does not support {reason}"
    )
    assert "needs platform cpu" in (
        chunked_scan.caps.why_not(Env("cuda"), spec, bucket, layout) or ""
    )


def test_candidates_for_tuning_keep_to_the_working_memory() -> None:
    spec, layout = AttnSpec(4, 2, 16), HndLayout(2, 64, 2, 16, "float32")
    env = Env("cpu")
    few, many = (Bucket(tokens, 1, 16, tokens, 1024, "mixed") for tokens in (16, 16384))
    sizes = [
        [c.key_chunk for c in chunked_scan.candidates(env, spec, b, layout)] for b in (few, many)
    ]
    assert sizes[0] == [16, 32, 64, 128, 256, 512]
    assert sizes[1] == [16, 32, 64, 128, 256]
    assert 2 * 4 * 16384 * 2 * 16 * max(sizes[1]) <= WORKING_BYTES
    assert chunked_scan.default_config(env, spec, many, layout).key_chunk in sizes[1]
