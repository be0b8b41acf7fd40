"""Logits processors in an engine: rows have their own fields, steps what their rows ask for, and
requests are checked first.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.processor import RowFacts, Sizes
from enginebay.errors import ConfigError, InputError, RequestError, UnknownNameError
from enginebay_testing.driver import RequestDriver, request_of
from tests.brief import BRIEF, LEAST
from tests.pool import few_sizes
from tests.unit import processors_for_tests
from tests.unit.replaceable_parts import Changing, changing
from tests.unit.serving import SIZES, assert_idle

pytestmark = [pytest.mark.xdist_group("processors"), pytest.mark.long]
PROMPT = "Once upon a time"
CHOSEN = (
    "penalties",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "only",
    "counting",
)
PLAIN = SamplingParams(max_tokens=9, ignore_eos=True)


def params(**processors: dict[str, Any]) -> SamplingParams:
    """Nine tokens, with these processors."""
    return SamplingParams(max_tokens=9, ignore_eos=True, processors=processors)


@contextlib.contextmanager
def made(engine: Any, sampler: str) -> Iterator[Changing]:
    """An engine of few sizes with a plugin's processors among its own.

    No prompt is cut, and none is found in the cache, so that there is one program of prefill.
    """
    with few_sizes(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginebay.compose.composition.load_registry", processors_for_tests.registry)
        sizes = SIZES | {"max_num_batched_tokens": 128}
        with changing(LEAST, engine=engine, sampler=sampler, processors=CHOSEN, **sizes) as made:
            yield made


@pytest.fixture(scope="module")
def slots() -> Iterator[Changing]:
    """Compiles for what is asked of it, and no more."""
    with made("vinference", "greedy") as one:
        yield one


@pytest.fixture(scope="module")
def pages() -> Iterator[Changing]:
    """Its programs have all of its processors: the first request asks for them."""
    every = SamplingParams(
        max_tokens=2,
        ignore_eos=True,
        min_tokens=1,
        allowed_token_ids=(5, 6, 7),
        bad_words=("x",),
        logit_bias={5: 1.0},
        repetition_penalty=2.0,
        processors={"only": {"token_id": 6}, "counting": {"first": 6}},
    )
    with made({"name": "oengine", "prefix_caching": False}, "standard") as one:
        one.llm.generate(PROMPT, every)
        yield one


@pytest.fixture(params=["slots", "pages"])
def both(request: pytest.FixtureRequest) -> Changing:
    """One engine, then the other."""
    one: Changing = request.getfixturevalue(request.param)
    return one


@pytest.fixture
def llm(pages: Changing) -> Iterator[LLM]:
    yield pages.llm
    assert_idle(pages.llm)


def tokens(llm: LLM, *each: SamplingParams) -> list[list[int]]:
    """Of the same prompt, in one batch."""
    outputs = llm.generate([PROMPT] * len(each), list(each))
    return [output.outputs[0].token_ids for output in outputs]


def variants(llm: LLM) -> set[str]:
    """Of the programs that are compiled so far."""
    return {key.variant.name.lower() for key in llm.engine.executor.programs}


@pytest.mark.long
def test_rows_have_processors_of_their_own_and_steps_the_least_variant(
    slots: Changing, pages: Changing
) -> None:
    (plain,) = tokens(slots.llm, PLAIN)
    assert variants(slots.llm) == {"greedy"}
    check_mixed(slots.llm, plain)
    assert variants(slots.llm) == {"greedy", "full"}
    check_mixed(pages.llm, tokens(pages.llm, PLAIN)[0])


def check_mixed(llm: LLM, plain: list[int]) -> None:
    """Rows that use none, one or both of the a plugin's processors, together and alone."""
    only, counting = {"token_id": 7}, {"first": 11}
    mixed = [
        PLAIN,
        params(only=only),
        params(counting=counting),
        params(counting=counting, only={"token_id": 12}),
    ]
    together = tokens(llm, *mixed)
    counted = list(range(11, 20))
    assert together[:3] == [plain, [7] * 9, counted]
    assert together[3] != counted, "what two processors leave of each other is not what one leaves"
    assert [tokens(llm, one)[0] for one in mixed] == together, (
        "neighbours change nothing, and rows are used again"
    )
    assert_idle(llm)


@pytest.mark.long
def test_a_row_goes_on_elsewhere_with_its_fields(both: Changing) -> None:
    """Fields that change with each token too."""
    engine = both.llm.engine
    facts = RowFacts(np.asarray([5, 6, 7]), (), Sizes(both.llm.plan.model.info.vocab_size, 160))
    rows = both.llm.plan.processors.rows({"counting": {"first": 20}}, facts)
    request = request_of([5, 6, 7], PLAIN)
    request = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, processors=rows)
    )

    def move() -> list[int]:
        driver = RequestDriver(engine, request)
        first = driver.prefill()
        second = driver.decode(2)
        state = engine.take(driver.lease)
        driver.close()
        again = RequestDriver(engine, request)
        engine.put(again.lease, state)
        again.resume([*first, *second])
        rest = again.decode(2)
        again.close()
        return [*first, *second, *rest]

    assert both.llm.run_on_engine(move) == [20, 21, 22, 23, 24]


@pytest.mark.long
@pytest.mark.parametrize("after", [2, 6])
def test_preempted_requests_go_on_with_their_fields(pages: Changing, after: int) -> None:
    counting = SamplingParams(
        max_tokens=12, ignore_eos=True, processors={"counting": {"first": 30}}
    )
    with pages.interrupted(
        lambda row: row.num_left == 0 and row.max_new_left <= 12 - after
    ) as scheduler:
        assert tokens(pages.llm, counting, counting) == [list(range(30, 42))] * 2
    assert len(scheduler.interrupted) == 2
    assert_idle(pages.llm)


def test_flat_fields_reach_their_processors(llm: LLM) -> None:
    vocab = llm.plan.model.info.vocab_size
    (free,) = tokens(llm, PLAIN)
    biased = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={free[0]: -100.0})
    allowed = SamplingParams(max_tokens=9, ignore_eos=True, allowed_token_ids=(5, 6, vocab - 1))
    repeated = SamplingParams(max_tokens=9, ignore_eos=True, repetition_penalty=1e6)
    suppressed = SamplingParams(
        max_tokens=9,
        ignore_eos=True,
        repetition_penalty=1e6,
        suppress_repetition_in_generation=True,
    )
    ending = SamplingParams(
        max_tokens=9, ignore_eos=True, stop_token_ids=(free[0], free[1]), min_tokens=4
    )
    got = tokens(llm, biased, allowed, repeated, suppressed)
    assert got[0][0] != free[0]
    assert set(got[1]) <= {5, 6, vocab - 1}
    assert len(set(got[2])) == len(set(got[3])) == 9, "no token twice"
    prompt = set(llm.tokenizer.encode(PROMPT))
    assert not prompt & set(got[2])
    (late,) = tokens(llm, ending)
    assert len(late) > 4 or not {free[0], free[1]} & set(late)
    assert not {free[0], free[1]} & set(late[:4])


def test_log_probabilities_are_those_of_the_models_own_logits(llm: LLM) -> None:
    asked = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=20)
    [own] = llm.generate(PROMPT, asked)[0].outputs[0].logprobs or ()
    chosen = list(own)[-1]
    biased = llm.generate(PROMPT, asked.model_copy(update={"logit_bias": {chosen: 100.0}}))[0]
    assert biased.outputs[0].token_ids == [chosen]
    [told] = biased.outputs[0].logprobs or ()
    assert told == pytest.approx(own, abs=1e-5)


def test_tokens_of_bad_words_do_not_follow_one_another(llm: LLM) -> None:
    """As in vLLM, tokens are banned and not letters: "the" may still be a part of "together"."""
    (free,) = llm.generate(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
    word = free.outputs[0].text.split()[0]
    (without,) = llm.generate(
        PROMPT, SamplingParams(max_tokens=9, ignore_eos=True, bad_words=(word,))
    )
    assert without.outputs[0].token_ids != free.outputs[0].token_ids
    banned = [tuple(llm.tokenizer.encode(t, add_special_tokens=False)) for t in (word, f" {word}")]
    out = tuple(without.outputs[0].token_ids)
    for ids in banned:
        assert not any(out[i : i + len(ids)] == ids for i in range(len(out))), (ids, out)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (
            {"processors": {"onyl": {}}},
            RequestError,
            "unknown logits processor 'onyl'.*Did you mean 'only'",
        ),
        ({"processors": {"dry": {}}}, RequestError, "'dry', which the engine was made without"),
        ({"processors": {"only": {"token": 1}}}, RequestError, "processor 'only'"),
        ({"processors": {"only": {"token_id": 10**6}}}, RequestError, "only: token id 1000000"),
        ({"typical_p": 0.5}, RequestError, "'typical', which the engine was made without"),
        (
            {"min_tokens": 2, "processors": {"min_tokens": {"min_tokens": 3}}},
            RequestError,
            "by a field of its own",
        ),
        ({"logit_bias": {10**6: 1.0}}, RequestError, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, RequestError, "a number from -100 to 100"),
        ({"allowed_token_ids": (1, 10**6)}, RequestError, "allowed_token_ids"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_queued(
    llm: LLM, asked: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(PROMPT, SamplingParams(max_tokens=2, **asked))
    assert_idle(llm)


@pytest.mark.long
def test_after_warmup_processors_compile_nothing() -> None:
    sizes = SIZES | {"max_model_len": 16, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    with few_sizes(), LLM(LEAST, processors=("logit_bias",), sampler="greedy", **sizes) as llm:
        count = llm.warmup()
        llm.engine.compilations.forbidden = True
        assert variants(llm) == {"full"}
        (biased,) = tokens(
            llm, SamplingParams(max_tokens=3, ignore_eos=True, logit_bias={4: 100.0})
        )
        assert biased == [4, 4, 4]
        assert np.isfinite(len(tokens(llm, PLAIN)[0]))
        assert llm.engine.compilations.count == count


@pytest.mark.parametrize(
    ("chosen", "error"),
    [(("nothing",), UnknownNameError), ("only", ConfigError), ((1,), ConfigError)],
)
def test_a_wrong_choice_of_processors_is_an_error(chosen: Any, error: type[InputError]) -> None:
    with pytest.raises(error):
        LLM(BRIEF, processors=chosen, **SIZES)
