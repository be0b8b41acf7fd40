"""prompt_logprobs, logprobs of all, best_of, stop_words_ids: told, chosen and ended as asked, or
refused.

What an engine tells is asked of real ones, on pages and in slots. Where stop sequences end is the
host's: that is tested on the fake engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError
from enginebay.serving.abilities import Abilities
from enginebay.serving.prepare import Preparer
from enginebay_runtime import full_vocab
from enginebay_runtime.full_vocab import log_softmax as device_log_softmax
from enginebay_runtime.full_vocab import prompt_logprobs
from enginebay_testing.engine_logprobs import (
    check_prompt_logprobs,
    check_returned_logprobs,
    log_softmax,
)
from enginebay_testing.reference import ReferenceModel
from tests.brief import BRIEF
from tests.fakes import install
from tests.unit.logprob_engines import SMALL, pages, slots
from tests.unit.replaceable_parts import Changing
from tests.unit.serving import GREEDY, HOT, assert_idle, with_

pytestmark = [pytest.mark.xdist_group("logprobs"), pytest.mark.usefixtures("few_sizes_module")]

LONG = [5 + 7 * i % 90 for i in range(70)]
"""A prompt of five chunks."""
SHORT = LONG[:9]
ON = with_(GREEDY, ignore_eos=True)


@pytest.fixture(scope="module")
def on_pages(few_sizes_module: None) -> Iterator[Changing]:
    with pages() as made:
        yield made


@pytest.fixture(scope="module")
def in_slots(few_sizes_module: None) -> Iterator[Changing]:
    with slots() as made:
        yield made


@pytest.fixture(params=["on_pages", "in_slots"])
def made(request: pytest.FixtureRequest) -> Changing:
    """One engine, then the other."""
    one: Changing = request.getfixturevalue(request.param)
    return one


@pytest.fixture
def llm(on_pages: Changing) -> Iterator[LLM]:
    yield on_pages.llm
    assert_idle(on_pages.llm)


@pytest.fixture(scope="module")
def fake() -> Iterator[LLM]:
    """The same model's tokenizer behind an engine that is none."""
    with pytest.MonkeyPatch.context() as patch:  # other tests of this module make real engines
        install(patch)
        llm = LLM(BRIEF, engine="oengine", **SMALL)
    with llm:
        yield llm
        assert_idle(llm)


@pytest.fixture(scope="module")
def references(on_pages: Changing, in_slots: Changing) -> dict[str, ReferenceModel]:
    """By the engine's name."""
    plans = (on_pages.llm.plan, in_slots.llm.plan)
    return {plan.config.engine.name: ReferenceModel(plan) for plan in plans}


@pytest.fixture
def reference(references: dict[str, ReferenceModel]) -> ReferenceModel:
    """That of pages."""
    return references["oengine"]


def wide_programs(llm: LLM) -> set[str]:
    return {str(key) for key in llm.engine.executor.programs if key.full_vocab}


def test_values_are_log_softmax_in_blocks_and_only_where_somebody_asks() -> None:  # holds G101
    rng = np.random.default_rng(0)
    hidden = rng.normal(0, 1, (2 * full_vocab.BLOCK + 9, 8)).astype(np.float32)
    head = rng.normal(0, 2, (8, 50)).astype(np.float32)
    targets = rng.integers(0, 50, len(hidden)).astype(np.int32)
    targets[: full_vocab.BLOCK] = -1
    told = jax.jit(lambda h, t: prompt_logprobs(lambda block, _: block @ head, h, t, 50))(
        hidden, targets
    )
    expected = log_softmax(hidden @ head)
    assert not np.asarray(told.values[: full_vocab.BLOCK]).any()
    for at in range(full_vocab.BLOCK, len(hidden)):
        ids = np.asarray(told.token_ids[at])
        assert ids[0] == targets[at]
        np.testing.assert_allclose(told.values[at], expected[at][ids], atol=1e-4)
        assert expected[at][ids[1:]].tolist() == sorted(expected[at], reverse=True)[:20]
    np.testing.assert_allclose(jax.jit(device_log_softmax)(hidden @ head), expected, atol=1e-4)


@pytest.mark.long
def test_full_vocab_programs_run_only_for_requests_that_need_them(
    llm: LLM,
) -> None:  # holds G101, G102
    if not wide_programs(llm):  # this test is the first of its engine
        llm.generate([LONG, SHORT], [with_(GREEDY, logprobs=20), HOT])
        assert wide_programs(llm) == set()
    llm.generate([LONG], with_(GREEDY, prompt_logprobs=0))
    wide = wide_programs(llm)
    assert wide
    llm.generate([LONG, SHORT], [with_(GREEDY, logprobs=20), HOT])
    assert wide_programs(llm) == wide, (
        "who does not ask is served by usual programs, whoever asked before"
    )


@pytest.mark.long
@pytest.mark.parametrize("num_best", [0, 3, 20])
def test_prompt_logprobs_across_chunks_whatever_the_cache_has(
    made: Changing, references: dict[str, ReferenceModel], num_best: int
) -> None:  # holds G101
    llm, name = made.llm, made.llm.config.engine.name
    params = with_(GREEDY, prompt_logprobs=num_best)
    first, second = (llm.generate([LONG], params)[0] for _ in range(2))
    for output in (first, second):
        check_prompt_logprobs(references[name], LONG, output.prompt_logprobs, num_best)
        assert output.metrics is not None
        assert output.metrics.num_cached_tokens == 0
        assert references[name].first_wrong_token(LONG, output.outputs[0].token_ids, 1e-3) is None
    if name == "vinference":
        return  # it keeps nothing of prompts, and has no programs for those who do not ask
    again = llm.generate([LONG], GREEDY)[0]
    assert again.outputs == first.outputs
    assert again.prompt_logprobs is None
    assert again.metrics is not None
    assert again.metrics.num_cached_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_prompt_whose_last_chunk_is_one_token_has_all_prompt_logprobs(
    llm: LLM, reference: ReferenceModel, num_chunks: int
) -> None:
    prompt = LONG[: num_chunks * SMALL["max_num_batched_tokens"] + 1]
    output = llm.generate([prompt], with_(GREEDY, prompt_logprobs=1))[0]
    check_prompt_logprobs(reference, prompt, output.prompt_logprobs, 1)


@pytest.mark.long
def test_each_of_a_batch_gets_its_own_prompt_logprobs(
    llm: LLM, reference: ReferenceModel
) -> None:  # holds G101
    prompts = [LONG, SHORT, LONG[:40], [9], SHORT]
    asked = (2, None, 0, 5, 20)
    params = [with_(HOT, seed=i, prompt_logprobs=num) for i, num in enumerate(asked)]
    params[2] = with_(params[2], logprobs=1)
    outputs = llm.generate(prompts, params)
    for prompt, num_best, output in zip(prompts, asked, outputs, strict=True):
        if num_best is None:
            assert output.prompt_logprobs is None
        else:
            check_prompt_logprobs(reference, prompt, output.prompt_logprobs, num_best)
    check_returned_logprobs(reference, prompts[2], outputs[2].outputs[0], 1)


def test_completions_and_streams_get_prompt_logprobs_once(
    llm: LLM, reference: ReferenceModel
) -> None:
    params = with_(HOT, n=3, seed=2, prompt_logprobs=1)
    output = llm.generate([SHORT], params)[0]
    check_prompt_logprobs(reference, SHORT, output.prompt_logprobs, 1)
    chunks = list(llm.stream(SHORT, params))
    told = [chunk for chunk in chunks if chunk.prompt_logprobs is not None]
    assert [chunk.index for chunk in told] == [0]
    assert told[0] is next(chunk for chunk in chunks if chunk.index == 0)
    check_prompt_logprobs(reference, SHORT, told[0].prompt_logprobs, 1)
    [awaited] = asyncio.run(llm.agenerate([SHORT], params))
    check_prompt_logprobs(reference, SHORT, awaited.prompt_logprobs, 1)


@pytest.mark.long
@pytest.mark.parametrize("in_prompt", [True, False])
def test_preempted_requests_get_all_prompt_logprobs(
    made: Changing, references: dict[str, ReferenceModel], in_prompt: bool
) -> None:  # holds G101
    reference = references[made.llm.config.engine.name]
    prompts = [LONG, LONG[5:]]
    with made.interrupted(lambda row: bool(row.num_left) == in_prompt) as scheduler:
        outputs = made.llm.generate(prompts, with_(ON, prompt_logprobs=2))
    assert len(scheduler.interrupted) == 2
    for prompt, output in zip(prompts, outputs, strict=True):
        check_prompt_logprobs(reference, prompt, output.prompt_logprobs, 2)
        assert len(output.outputs[0].token_ids) == 16
        assert reference.first_wrong_token(prompt, output.outputs[0].token_ids, 1e-3) is None


def test_full_vocab_logprobs_beside_others(
    llm: LLM, reference: ReferenceModel
) -> None:  # holds G102
    params = [with_(HOT, seed=1, max_tokens=5, logprobs=-1), with_(HOT, seed=2, logprobs=2), ON]
    outputs = llm.generate([SHORT, LONG, SHORT], params)
    vocab_size = llm.plan.model.info.vocab_size
    for prompt, output, num_best in zip(
        (SHORT, LONG, SHORT), outputs, (vocab_size, 2, None), strict=True
    ):
        check_returned_logprobs(reference, prompt, output.outputs[0], num_best)
    told = outputs[0].outputs[0].logprobs
    assert told is not None
    assert all(sorted(one) == list(range(vocab_size)) for one in told)
    assert all(sum(np.exp(list(one.values()))) == pytest.approx(1, abs=1e-3) for one in told)
    alone = llm.generate([SHORT], with_(params[0], logprobs=None))[0].outputs[0]
    assert outputs[0].outputs[0].token_ids == alone.token_ids


def test_the_likeliest_completions_are_returned_best_first(llm: LLM) -> None:  # holds G103
    made = llm.generate([SHORT], with_(HOT, seed=4, n=4, logprobs=0))[0].outputs
    ranked = sorted(made, key=lambda one: -(one.cumulative_logprob or 0.0) / len(one.token_ids))
    output = llm.generate([SHORT], with_(HOT, seed=4, n=2, best_of=4))[0]
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in output.outputs] == [0, 1]
    assert {(one.logprobs, one.cumulative_logprob) for one in output.outputs} == {(None, None)}
    assert output.num_generated_tokens == sum(len(one.token_ids) for one in made)
    shown = llm.generate([SHORT], with_(HOT, seed=4, best_of=4, logprobs=1))[0].outputs
    assert [len(one) for one in shown[0].logprobs or ()].count(0) == 0
    assert shown[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob, abs=1e-3)


def test_a_choice_cannot_be_streamed(fake: LLM) -> None:  # holds G103
    params = with_(HOT, best_of=2)
    llm = fake
    with pytest.raises(RequestError, match="best_of = 2 with n = 1 in a stream"):
        llm.stream(SHORT, params)

    async def first() -> Any:
        return await anext(llm.astream(SHORT, params))

    with pytest.raises(RequestError, match="best_of = 2 with n = 1 in a stream"):
        asyncio.run(first())
    equal = with_(HOT, seed=3, n=2, best_of=2)
    assert {chunk.index for chunk in llm.stream(SHORT, equal)} == {0, 1}


def completions(llm: LLM, params: SamplingParams) -> list[Any]:
    """What `params` give whole and in parts."""
    whole = llm.generate([SHORT], params)[0].outputs[0]
    chunks = list(llm.stream(SHORT, params))
    parts = (
        "".join(chunk.delta_text for chunk in chunks),
        [token for chunk in chunks for token in chunk.delta_token_ids],
        chunks[-1].finish_reason,
    )
    assert parts == (whole.text, whole.token_ids, whole.finish_reason)
    return [whole.text, whole.token_ids, whole.finish_reason]


def test_a_stop_sequence_ends_the_completion_and_its_text_before_it(
    fake: LLM,
) -> None:  # holds G104
    llm = fake
    hot = with_(HOT, seed=6)
    whole = llm.generate([SHORT], hot)[0].outputs[0].token_ids
    for start, end in ((0, 1), (0, 3), (2, 4), (5, 9), (13, 16)):
        sequence = whole[start:end]
        first = next(
            i for i in range(17) if i >= len(sequence) and whole[i - len(sequence) : i] == sequence
        )
        text, token_ids, reason = completions(llm, with_(hot, stop_words_ids=[[1, 1, 1], sequence]))
        assert (token_ids, reason) == (whole[:first], "stop")
        assert text == llm.tokenizer.decode(whole[: first - len(sequence)])
    absent = completions(llm, with_(hot, stop_words_ids=[[*whole[2:5], 3], [whole[-1], 3]]))
    assert absent == [llm.tokenizer.decode(whole), whole, "length"], (
        "what began like a sequence is shown"
    )


def test_a_stop_sequence_never_begins_in_the_prompt(fake: LLM) -> None:  # holds G104
    llm = fake
    whole = llm.generate([SHORT], ON)[0].outputs[0].token_ids
    straddling = with_(ON, stop_words_ids=[[SHORT[-1], whole[0]]])
    assert completions(llm, straddling)[1] == whole


def test_log_probabilities_end_with_a_stop_sequence(
    llm: LLM, reference: ReferenceModel
) -> None:  # holds G104
    hot = with_(HOT, seed=6, logprobs=2)
    whole = llm.generate([SHORT], hot)[0].outputs[0].token_ids
    output = llm.generate([SHORT], with_(hot, stop_words_ids=[whole[4:6]]))[0].outputs[0]
    assert output.token_ids == whole[:6]
    check_returned_logprobs(reference, SHORT, output, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"prompt_logprobs": 0},
            "prompt_logprobs = 0 with an engine without full_vocab_logprobs",
        ),
        ({"logprobs": -1}, "logprobs = -1 with an engine without full_vocab_logprobs"),
        ({"best_of": 2}, "best_of = 2 with an engine without logprobs"),
        ({"stop_words_ids": [[5, 10**6]]}, "token id in stop_words_ids 1000000"),
    ],
)
def test_what_an_engine_cannot_tell_is_refused_before_anything_is_queued(
    fake: LLM, changes: dict[str, Any], text: str
) -> None:  # holds G101, G102, G103
    declared = frozenset(() if "best_of" in changes else ("logprobs",))
    abilities = dataclasses.replace(Abilities.of(fake.plan), capabilities=declared)
    token_info, info = fake.plan.checkpoint.token_info, fake.plan.model.info
    preparer = Preparer(
        fake.tokenizer, token_info, info.vocab_size, 96, abilities=abilities, seed=0
    )
    with pytest.raises(RequestError, match=text):
        preparer.prepare([SHORT, LONG], [ON, with_(ON, **changes)])


def test_what_would_compile_when_that_is_forbidden_is_refused(faked: None) -> None:  # holds G105
    with LLM(BRIEF, forbid_compiling=True, **SMALL) as llm:
        for field, value in (("prompt_logprobs", 1), ("logprobs", -1)):
            match = rf"^{field} = {value} with forbid_compiling.*full_vocab_logprobs = true"
            with pytest.raises(RequestError, match=match):
                llm.generate([SHORT], SamplingParams(**{field: value}))


@pytest.mark.slow
def test_warmup_compiles_for_them_when_it_is_told_to() -> None:  # holds G105
    sizes: dict[str, Any] = SMALL | {"max_model_len": 16, "max_num_seqs": 1}
    with LLM(BRIEF, forbid_compiling=True, full_vocab_logprobs=True, **sizes) as llm:
        llm.warmup()
        output = llm.generate([SHORT], with_(GREEDY, max_tokens=3, prompt_logprobs=1, logprobs=-1))[
            0
        ]
        check_prompt_logprobs(ReferenceModel(llm.plan), SHORT, output.prompt_logprobs, 1)
        assert len((output.outputs[0].logprobs or [{}])[0]) == llm.plan.model.info.vocab_size


def test_the_command_takes_all_of_them(
    run: Callable[..., tuple[int, str, str]], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:  # holds G101, G102, G103, G104
    monkeypatch.setattr(llm, "close", lambda: None)  # the command would
    monkeypatch.setattr("enginebay.serving.LLM", lambda **_: llm)
    asked = ("generate", "--json", "--max-tokens", "4", "--prompt-ids", ",".join(map(str, SHORT)))
    params = with_(GREEDY, max_tokens=4, prompt_logprobs=2, logprobs=-1)
    expected = llm.generate([SHORT], params)[0]
    code, out, err = run(*asked, "--prompt-logprobs", "2", "--logprobs", "-1")
    assert (code, err) == (0, "")
    record = json.loads(out)
    told = [None if one is None else set(map(int, one)) for one in record["prompt_logprobs"]]
    assert told == [None if one is None else set(one) for one in expected.prompt_logprobs or ()]
    assert [len(one) for one in record["logprobs"]] == [llm.plan.model.info.vocab_size] * 4
    hot = ("--temperature", "1.5", "--seed", "4", "--best-of", "3", "-n", "2", "--ignore-eos")
    ends = expected.outputs[0].token_ids[:2]
    code, out, err = run(*asked, *hot, "--stop-words-ids", ",".join(map(str, ends)))
    assert (code, err) == (0, "")
    chosen = llm.generate(
        [SHORT], with_(HOT, max_tokens=4, seed=4, n=2, best_of=3, stop_words_ids=[ends])
    )
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["token_ids"] for line in lines] == [one.token_ids for one in chosen[0].outputs]
    assert "logprobs" not in lines[0]
