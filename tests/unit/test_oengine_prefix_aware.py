"""Scheduling by what lies in the cache, through LLM on the paged engine."""

from __future__ import annotations

import pytest

from enginebay import LLM, SamplingParams
from tests.brief import BRIEF
from tests.unit.serving import SIZES

pytestmark = pytest.mark.xdist_group("oengine")


def test_prefix_aware_scheduling_admits_what_the_cache_holds_first() -> None:
    with LLM(
        BRIEF,
        **{**SIZES, "max_num_seqs": 1},
        engine={"name": "oengine", "page_size": 8},
        scheduler="prefix_aware",
    ) as llm:
        known = list(range(10, 50))
        llm.generate([known], SamplingParams(max_tokens=2))
        others = [[60 + number] * 40 for number in range(3)]
        outputs = llm.generate([*others, [*known, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
        started = [output.metrics.first_scheduled_s for output in outputs]
        assert outputs[-1].metrics.num_cached_tokens == 40
        assert min(started) in (started[0], started[-1]), (
            "the first may have begun before the others were queued"
        )
        assert started[-1] < min(started[1:-1])
