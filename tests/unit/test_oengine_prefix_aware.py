"""Scheduling by what lies in the cache, through LLM on the fake engine with real pages."""

from __future__ import annotations

import pytest

from enginebay import LLM, SamplingParams
from tests.brief import BRIEF
from tests.unit.loops import generate_at_once
from tests.unit.serving import SIZES


@pytest.mark.usefixtures("faked")
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
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        outputs = generate_at_once(llm, [*others, [*known, 7]], params)
        started = [output.metrics.first_scheduled_s for output in outputs]
        assert outputs[-1].metrics.num_cached_tokens == 40
        assert started[-1] < min(started[:-1])
