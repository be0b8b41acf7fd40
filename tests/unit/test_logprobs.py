"""Log-probabilities of new tokens: what is told, to whom, and that nobody else pays for it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.composition import make_plan
from enginebay.config import make_config
from enginebay.contracts.commands import Step
from enginebay.contracts.engine import Pending
from enginebay.errors import InternalError, RequestError
from enginebay.outputs import CompletionOutput
from enginebay.plugins.registry import Registry, load_registry
from enginebay.serving.abilities import Abilities
from enginebay.text.guides.grammars import choose_grammars
from enginebay.types import MAX_LOGPROBS
from enginebay_runtime.launched import LaunchedStep
from enginebay_runtime.logprobs import logprobs_of
from enginebay_runtime.step import Sampled
from enginebay_testing.engine_logprobs import asking, check_returned_logprobs, log_softmax
from enginebay_testing.reference import ReferenceModel
from tests.brief import LEAST, TINY
from tests.fakes import install
from tests.unit.logprob_engines import SMALL, pages
from tests.unit.replaceable_parts import Changing
from tests.unit.serving import GREEDY, HOT, assert_idle, with_

pytestmark = [pytest.mark.xdist_group("logprobs"), pytest.mark.usefixtures("few_sizes_module")]

TOLD = jax.jit(logprobs_of)
PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "The little fox", "A", "In the morning, the baker opened the shop and " * 3]


@pytest.fixture(scope="module")
def made(few_sizes_module: None) -> Iterator[Changing]:
    with pages() as made:
        yield made


@pytest.fixture
def llm(made: Changing) -> Iterator[LLM]:
    yield made.llm
    assert_idle(made.llm)


@pytest.fixture(scope="module")
def reference(made: Changing) -> ReferenceModel:
    return ReferenceModel(made.llm.plan)


def test_values_are_log_softmax_of_the_logits_and_come_best_first() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (3, 50)).astype(np.float32)
    logits[1, 7] = -np.inf
    sampled = np.array([4, 7, int(logits[2].argmax())], np.int32)
    told = TOLD(logits, sampled, np.ones(3, bool))
    expected = log_softmax(logits)
    assert told.values.shape == told.token_ids.shape == (3, MAX_LOGPROBS + 1)
    for row in range(3):
        ids = np.asarray(told.token_ids[row])
        assert ids[0] == sampled[row]
        assert ids[1:].tolist() == np.argsort(-expected[row], kind="stable")[:MAX_LOGPROBS].tolist()
        np.testing.assert_allclose(told.values[row], expected[row][ids], atol=1e-5)


def test_a_probability_of_nearly_one_is_not_lost_to_rounding() -> None:
    logits = np.array([[60.0, 45.0, 1.0]], np.float32)
    told = TOLD(logits, np.asarray([0], np.int32), np.asarray([True]))
    np.testing.assert_allclose(told.values[0, :2], log_softmax(logits)[0, [0, 0]], atol=2.0**-23)


def test_rows_that_ask_are_told_whoever_does_not_and_however_many_are_computed_at_once() -> None:
    rng = np.random.default_rng(1)
    logits, sampled = rng.normal(0, 5, (5, 50)).astype(np.float32), np.arange(5, dtype=np.int32)
    asks = np.array([False, True, False, True, True])
    whole = TOLD(logits, sampled, np.ones(5, bool))
    for rows_at_once in (None, 2):
        told = jax.jit(functools.partial(logprobs_of, rows_at_once=rows_at_once))(
            logits, sampled, asks
        )
        np.testing.assert_array_equal(told.token_ids[asks], whole.token_ids[asks])
        np.testing.assert_allclose(told.values[asks], whole.values[asks], atol=1e-6)
        assert not np.asarray(told.values[~asks]).any()


def test_nothing_is_computed_where_nobody_asks() -> None:
    logits, sampled = np.full((5, 50), np.nan, np.float32), np.arange(5, dtype=np.int32)
    assert not np.asarray(TOLD(logits, sampled, np.zeros(5, bool)).values).any()
    assert np.isnan(np.asarray(TOLD(logits, sampled, np.arange(5) == 0).values)).any()


def test_a_vocabulary_smaller_than_the_most_is_told_whole() -> None:
    told = TOLD(np.asarray([[1, 3, 2]], np.float32), np.asarray([2], np.int32), np.asarray([True]))
    assert told.token_ids.tolist() == [[2, 1, 2, 0]]


@pytest.mark.parametrize(
    "num_best",
    [
        0,
        pytest.param(1, marks=pytest.mark.long),
        5,
        pytest.param(MAX_LOGPROBS, marks=pytest.mark.long),
    ],
)
def test_a_request_is_told_what_it_asked_for(
    llm: LLM, reference: ReferenceModel, num_best: int
) -> None:
    for params in (GREEDY, with_(HOT, seed=3)):
        output = llm.generate(PROMPT, asking(params, num_best))[0]
        check_returned_logprobs(reference, output.prompt_token_ids, output.outputs[0], num_best)
        plain = llm.generate(PROMPT, params)[0].outputs[0]
        assert output.outputs[0].token_ids == plain.token_ids
        assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_each_of_a_batch_is_told_its_own(llm: LLM, reference: ReferenceModel) -> None:
    asked = (None, 3, 0, MAX_LOGPROBS)
    params = [asking(with_(HOT, seed=i), num_best) for i, num_best in enumerate(asked)]
    for prompt, num_best, output in zip(PROMPTS, asked, llm.generate(PROMPTS, params), strict=True):
        ids = llm.tokenizer.encode(prompt)
        check_returned_logprobs(reference, ids, output.outputs[0], num_best)


def test_penalties_and_temperature_change_nothing_of_it(
    llm: LLM, reference: ReferenceModel
) -> None:
    params = with_(HOT, seed=1, top_k=3, repetition_penalty=1.7, frequency_penalty=1.0, logprobs=4)
    output = llm.generate(PROMPT, params)[0]
    check_returned_logprobs(reference, output.prompt_token_ids, output.outputs[0], 4)


def test_several_completions_are_told_each_its_own(llm: LLM, reference: ReferenceModel) -> None:
    output = llm.generate(PROMPT, with_(HOT, n=3, seed=2, logprobs=2))[0]
    assert len({completion.cumulative_logprob for completion in output.outputs}) == 3
    for completion in output.outputs:
        check_returned_logprobs(reference, output.prompt_token_ids, completion, 2)


def test_a_stop_text_cuts_them_with_the_tokens(llm: LLM) -> None:
    whole = llm.generate(PROMPT, with_(GREEDY, logprobs=2))[0].outputs[0]
    for start, end in ((6, 9), (3, 12), (0, 2)):
        params = with_(GREEDY, stop=whole.text[start:end], logprobs=2)
        cut = llm.generate(PROMPT, params)[0].outputs[0]
        assert len(cut.token_ids) < len(whole.token_ids)
        assert cut.logprobs is not None
        assert len(cut.logprobs) == len(cut.token_ids)
        assert cut.cumulative_logprob == chosen_sum(cut)
        streamed = [chunk for chunk in llm.stream(PROMPT, params) if chunk.logprobs is not None]
        assert sum(len(chunk.logprobs or ()) for chunk in streamed) == len(cut.token_ids)


def test_a_stop_token_is_told_too(llm: LLM, reference: ReferenceModel) -> None:
    stop = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids[5]
    output = llm.generate(PROMPT, with_(GREEDY, stop_token_ids=[stop], logprobs=0))[0]
    assert output.outputs[0].token_ids[-1] == stop
    check_returned_logprobs(reference, output.prompt_token_ids, output.outputs[0], 0)


def chosen_sum(completion: CompletionOutput) -> float:
    assert completion.logprobs is not None
    return sum(
        one[token] for one, token in zip(completion.logprobs, completion.token_ids, strict=True)
    )


def test_chunks_of_a_stream_add_up(llm: LLM) -> None:
    params = with_(GREEDY, logprobs=3)
    whole = llm.generate(PROMPT, params)[0].outputs[0]
    chunks = list(llm.stream(PROMPT, params))
    assert [one for chunk in chunks for one in chunk.logprobs or ()] == whole.logprobs
    for chunk in chunks:
        assert chunk.logprobs is not None
        assert len(chunk.logprobs) == len(chunk.delta_token_ids)
    assert {chunk.logprobs for chunk in llm.stream(PROMPT, GREEDY)} == {None}


def test_conversations_and_asyncio_tell_the_same(llm: LLM) -> None:
    params = with_(GREEDY, logprobs=2)
    messages = [{"role": "user", "content": "What color is the sky?"}]
    llm.chat(messages, params)  # what is in the cache is summed up in another order

    async def gather() -> tuple[Any, list[Any], Any]:
        generated = await llm.agenerate(PROMPT, params)
        chunks = [chunk async for chunk in llm.astream(PROMPT, params)]
        return generated[0].outputs[0], chunks, await llm.achat(messages, params)

    generated, chunks, chatted = asyncio.run(gather())
    whole = llm.generate(PROMPT, params)[0].outputs[0]
    assert (generated.logprobs, generated.cumulative_logprob) == (
        whole.logprobs,
        whole.cumulative_logprob,
    )
    assert [one for chunk in chunks for one in chunk.logprobs] == whole.logprobs
    answer = llm.chat(messages, params).outputs[0]
    assert answer.logprobs
    assert chatted.outputs[0].logprobs == answer.logprobs
    in_parts = [one for chunk in llm.chat_stream(messages, params) for one in chunk.logprobs or ()]
    assert in_parts == answer.logprobs


@pytest.mark.parametrize("after", [1, 6])
def test_preempted_requests_keep_what_they_were_told(
    made: Changing, reference: ReferenceModel, after: int
) -> None:
    params = with_(GREEDY, max_tokens=12, ignore_eos=True, logprobs=3)
    with made.interrupted(
        lambda row: row.num_left == 0 and row.max_new_left <= 12 - after
    ) as scheduler:
        outputs = made.llm.generate(PROMPTS, params)
    assert len(scheduler.interrupted) == len(PROMPTS)
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 12
        check_returned_logprobs(reference, output.prompt_token_ids, output.outputs[0], 3)


def test_nothing_is_sent_to_the_host_unless_a_row_asks(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, sent = [], []
    begin = LaunchedStep.__init__

    def counted(self: LaunchedStep, sampled: Sampled, step: Step) -> None:
        sent.append(step.returns_logprobs)
        begin(self, sampled, step)

    fetch = LaunchedStep.read_logprobs
    monkeypatch.setattr(LaunchedStep, "__init__", counted)
    monkeypatch.setattr(
        LaunchedStep, "read_logprobs", lambda step: read.append(step) or fetch(step)
    )
    llm.generate(PROMPTS, GREEDY)
    assert sent
    assert not any(sent)
    assert not read
    sent.clear()
    llm.generate(PROMPTS, [GREEDY, GREEDY, GREEDY, with_(GREEDY, max_tokens=3, logprobs=0)])
    assert any(sent)
    assert not all(sent), "chunks that sample nothing, and steps after the one that asks has ended"
    assert 0 < len(read) <= sum(sent)


@pytest.mark.long
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_a_model_over_several_devices_tells_the_same() -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    with LLM(LEAST, mesh={"tensor": 2}, sampler="greedy", **SMALL) as sharded:
        reference = ReferenceModel(sharded.plan)
        for output in sharded.generate(prompts, with_(GREEDY, max_tokens=6, logprobs=5)):
            check_returned_logprobs(reference, output.prompt_token_ids, output.outputs[0], 5)


@pytest.mark.parametrize("value", [-2, MAX_LOGPROBS + 1, 2.0, "2", True])
def test_a_wrong_number_is_refused_with_field_value_and_range(value: Any) -> None:
    with pytest.raises(RequestError, match=rf"logprobs = {value!r}\. .*from -1 to {MAX_LOGPROBS}"):
        SamplingParams(logprobs=value)


def test_an_engine_that_tells_none_refuses_before_anything_is_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any step too: the engine here has no log-probabilities to tell."""
    registry = load_registry()
    entries = []
    for entry in registry.entries:
        if entry.kind == "engine" and entry.declaration is not None:
            entry = dataclasses.replace(
                entry, declaration=dataclasses.replace(entry.declaration, capabilities={})
            )
        entries.append(entry)
    plan = make_plan(make_config({"model": TINY} | SMALL), registry)
    assert Abilities.of(plan) == Abilities(
        greedy_only=False,
        processors=plan.processors,
        make_guides=choose_grammars(plan.config),
        hidden_size=plan.model.info.hidden_size,
        capabilities=frozenset(
            {"logprobs", "full_vocab_logprobs", "hidden_states", "prompt_embeds"}
        ),
        defaults=plan.sampling_defaults,
    )
    install(monkeypatch)
    monkeypatch.setattr("enginebay.compose.composition.load_registry", lambda: Registry(entries))
    with LLM(TINY, engine="oengine", **SMALL) as llm:
        for params in (with_(GREEDY, logprobs=0), [GREEDY, with_(GREEDY, logprobs=4)]):
            with pytest.raises(
                RequestError, match=r"logprobs = \d with an engine without logprobs"
            ):
                llm.generate([[5], [6]], params)
        assert_idle(llm)
        assert llm.generate([[5]], GREEDY)[0].outputs[0].logprobs is None


def test_steps_that_tell_none_say_so_when_asked() -> None:
    class Silent(Pending):
        def read(self) -> np.ndarray:
            return np.zeros((1, 1), np.int32)

    with pytest.raises(InternalError, match=r"Silent\.read_logprobs was called"):
        Silent().read_logprobs()


Run = Callable[..., tuple[int, str, str]]


def test_the_command_prints_them_as_json(
    run: Run, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "close", lambda: None)  # the command would
    monkeypatch.setattr("enginebay.serving.LLM", lambda **_: llm)
    code, out, _ = run("generate", PROMPT, "--max-tokens", "5", "--logprobs", "2", "--json")
    record = json.loads(out)
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=5, logprobs=2))[0].outputs[0]
    assert code == 0
    assert record["token_ids"] == whole.token_ids
    assert [{int(k): v for k, v in one.items()} for one in record["logprobs"]] == whole.logprobs
    assert record["cumulative_logprob"] == whole.cumulative_logprob
    code, out, _ = run("generate", PROMPT, "--max-tokens", "2", "--json")
    assert "logprobs" not in json.loads(out)
