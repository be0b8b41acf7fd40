"""min_tokens holds off stop texts: one that ends in the text of the first tokens ends nothing,
whole and in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginebay import LLM, SamplingParams
from enginebay.contracts.text import StopChecker
from enginebay.serving.assemble import CompletionReader
from enginebay.serving.running import TokenEvent
from enginebay.types import Request
from tests.brief import BRIEF
from tests.fakes import install, sampling_of
from tests.unit.serving import SIZES, assert_idle, with_
from tests.unit.test_text import byte_level

PROMPT = "Once upon a time"
ON = SamplingParams(max_tokens=12, temperature=1.5, seed=4, ignore_eos=True, min_tokens=1)
ONE_ROW = SIZES | {"max_num_seqs": 1}


def first_end(parts: Sequence[str], stop: Sequence[str], least: int) -> tuple[int, str] | None:
    """By the definition: the first end of a stop text that lies behind the first `least` parts, and
    the longest that ends there.
    """
    text, early = "".join(parts), len("".join(parts[:least]))
    for end in range(early + 1, len(text) + 1):
        met = [one for one in stop if text[:end].endswith(one)]
        if met:
            return end, max(met, key=len)
    return None


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(st.text(alphabet="ab", max_size=3), max_size=8),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 9),
    include=st.booleans(),
)
def test_a_stop_text_counts_when_it_ends_late(
    parts: list[str], stop: list[str], least: int, include: bool
) -> None:  # holds SG2
    checker = StopChecker(stop, include_stop_str_in_output=include)
    text, found = "".join(parts), first_end(parts, stop, least)
    wanted = text if found is None else text[: found[0] if include else found[0] - len(found[1])]
    shown = ""
    for number, part in enumerate(parts):
        shown += checker.push(part, counts=number >= least)
        assert wanted.startswith(shown), "text was shown that the stop text cuts"
    assert shown + checker.flush() == wanted
    assert checker.met == (None if found is None else found[1])


@pytest.mark.parametrize(("least", "reason"), [(1, "stop"), (2, "length")])
def test_half_a_character_at_the_end_counts_as_its_token_does(
    least: int, reason: str
) -> None:  # holds SG2
    tokenizer = byte_level()
    ids = tuple(tokenizer.encode("日"))[:2]  # what is left of it is the text of an error
    assert tokenizer.decode(ids) == "\ufffd"
    sampling = sampling_of(2, min_tokens=least, stop=["\ufffd"])
    request = Request("r", np.asarray([5], np.int32), sampling, (0, 0), 0.0)
    reader = CompletionReader(request, tokenizer, lambda _: None)
    reader.feed(TokenEvent(ids, "length"))
    assert (reader.text, reader.finish_reason) == ("\ufffd" if least == 2 else "", reason)


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    """On the fake engine: text is the host's."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        with LLM(BRIEF, engine="oengine", processors=("min_tokens",), **ONE_ROW) as llm:
            yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_idle(shared)


def parts_of(llm: LLM, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text."""
    texts = [llm.tokenizer.decode(token_ids[:end]) for end in range(len(token_ids) + 1)]
    return [after[len(before) :] for before, after in itertools.pairwise(texts)]


def test_requests_run_until_one_ends_behind_the_least_tokens(llm: LLM) -> None:  # holds SG2
    whole = llm.generate(PROMPT, ON)[0].outputs[0]
    parts = parts_of(llm, whole.token_ids)
    assert "".join(parts) == whole.text
    over_two = parts[4][-2:] + parts[5][:2]  # begins in one token and ends in the next
    stops = [parts[2], parts[7], over_two, "".join(parts[1:4])]
    asked = [
        with_(ON, stop=[stop, "never there"], min_tokens=least, stop_words_ids=held)
        for stop in stops
        for least in (1, 3, 5, 6, 8, 20)
        for held in (
            (),
            ((whole.token_ids[2], 7), (whole.token_ids[5], 7, 7)),
        )  # tokens that are held back
    ]
    ended = 0
    for params, output in zip(asked, llm.generate([PROMPT] * len(asked), asked), strict=True):
        [one] = output.outputs
        found = first_end(parts, params.stop, params.min_tokens)
        ended += found is not None
        assert one.finish_reason == ("length" if found is None else "stop")
        assert one.text == (whole.text if found is None else whole.text[: found[0] - len(found[1])])
        assert len(one.token_ids) > min(params.min_tokens, 11)
        assert one.token_ids == whole.token_ids[: len(one.token_ids)]
    assert 0 < ended < len(asked)


def test_a_stream_gives_what_generate_gives(llm: LLM) -> None:  # holds SG2
    whole = llm.generate(PROMPT, ON)[0].outputs[0]
    parts = parts_of(llm, whole.token_ids)
    for least in (2, 3, 4):
        params = with_(ON, stop=parts[3], min_tokens=least, include_stop_str_in_output=True)
        chunks = list(llm.stream(PROMPT, params))
        [expected] = llm.generate(PROMPT, params)
        assert "".join(chunk.delta_text for chunk in chunks) == expected.get_text()
        assert chunks[-1].finish_reason == expected.outputs[0].finish_reason
        if parts[3] not in "".join(parts[4:]):
            assert (expected.get_text() == whole.text) is (least == 4)
