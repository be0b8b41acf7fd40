"""The engine under test of the conformance kit: checks share one LLM, which begins each as if it
were new.
"""

from __future__ import annotations

import numpy as np
import pytest

from enginebay import LLM
from enginebay.contracts.prefix_key import PrefixKey
from enginebay_testing.driver import RequestDriver, request_of
from enginebay_testing.subject import EngineSubject, generate, greedy
from tests.brief import TINY

pytestmark = pytest.mark.usefixtures("faked")


@pytest.fixture
def subject() -> EngineSubject:
    return EngineSubject("oengine", model=TINY)


def test_checks_share_an_llm_whose_cache_is_empty_again(subject: EngineSubject) -> None:
    prompt = list(range(80))
    with subject.shared() as first:
        generate(first, [prompt], greedy(4))
        assert num_cached(first, prompt) > 0
        first.engine.compilations.forbidden = True
    with subject.shared() as second:
        assert second is first
        assert num_cached(second, prompt) == 0
        assert not second.engine.compilations.forbidden
        assert len(generate(second, [prompt], greedy(4))[0]) == 4


def test_a_fresh_one_takes_the_place_of_the_one_that_was_kept(subject: EngineSubject) -> None:
    with subject.shared() as first:
        pass
    fresh = subject.make()
    with subject.shared(fresh) as second:
        assert second is fresh
    with subject.shared() as third:
        assert third is fresh
    assert_closed(first)


def test_one_whose_check_has_failed_is_closed(subject: EngineSubject) -> None:
    with pytest.raises(ValueError, match="a finding"), subject.shared() as first:
        raise ValueError("a finding")
    assert_closed(first)
    with subject.shared() as second:
        assert second is not first


def test_a_check_that_leaves_a_row_is_told(subject: EngineSubject) -> None:
    def leave() -> None:
        RequestDriver(llm.engine, request_of([1, 2, 3], greedy(4)))

    with pytest.raises(AssertionError, match="1 rows are still in use"), subject.shared() as llm:
        llm.run_on_engine(leave)


def num_cached(llm: LLM, prompt: list[int]) -> int:
    key = PrefixKey(llm.engine.weights_version)
    find = llm.engine.ledger.num_cached_tokens
    return int(llm.run_on_engine(lambda: find(np.asarray(prompt), key)))


def assert_closed(llm: LLM) -> None:
    with pytest.raises(Exception, match="clos"):
        generate(llm, [[1, 2, 3]], greedy(2))
