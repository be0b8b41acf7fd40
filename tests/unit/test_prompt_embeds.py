"""Prompts of segments: embeddings stand in place of tokens, are cached by their content, and are
checked before anything is queued.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM, SamplingParams, Segments
from enginebay.contracts.commands import ExecutorCommand, Step
from enginebay.contracts.proposer import Proposer
from enginebay.errors import RequestError
from enginebay_runtime.codec import decode, encode
from tests.brief import TINY
from tests.unit.test_embed import GREEDY, SIZES, PreemptsOnce

VOCAB, WIDTH = 96, 32
PROMPT = np.random.default_rng(5).integers(0, VOCAB, 70).tolist()


@pytest.fixture(
    scope="module", params=["oengine", pytest.param("vinference", marks=pytest.mark.slow)]
)
def llm(request: pytest.FixtureRequest, few_sizes_module: None) -> Iterator[LLM]:
    with LLM(TINY, engine=request.param, **SIZES) as llm:
        llm.engine.make_arrays()
        yield llm


@pytest.fixture(scope="module")
def table(llm: LLM) -> np.ndarray:
    return np.asarray(llm.engine.executor.weights()["embed"])


def tokens_of(llm: LLM, *args: Any, **named: Any) -> list[list[int]]:
    outputs = llm.generate(*args, **named)
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.mark.long
def test_embeddings_of_tokens_give_the_tokens_that_these_give(llm: LLM, table: np.ndarray) -> None:
    embeds = table[PROMPT]
    [expected] = tokens_of(llm, PROMPT, GREEDY)
    mixed = [PROMPT[:20], embeds[20:45], jnp.asarray(embeds[45:50]), PROMPT[50:]]
    assert tokens_of(llm, prompt_embeds=embeds, params=GREEDY) == [expected]
    assert tokens_of(llm, prompt_embeds=mixed, params=GREEDY) == [expected]
    assert tokens_of(llm, prompt_embeds=[mixed, [embeds]], params=GREEDY) == [expected] * 2
    both = [Segments(*mixed), PROMPT]
    assert tokens_of(llm, both, GREEDY) == [expected] * 2
    np.testing.assert_allclose(*llm.embed(both), atol=1e-6)
    penalised = GREEDY.model_copy(update={"n": 2, "presence_penalty": 1.5})
    # Embeddings are no tokens that a presence penalty could count.
    assert tokens_of(llm, [Segments(embeds)], penalised) == tokens_of(llm, [PROMPT], penalised)


@pytest.mark.long
def test_a_preempted_prompt_is_computed_again_from_its_embeddings(
    llm: LLM, table: np.ndarray
) -> None:
    [expected] = tokens_of(llm, PROMPT, GREEDY)
    scheduler = PreemptsOnce(llm.loop.scheduler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.loop, "scheduler", scheduler)
        salted: Any = {"prompt_embeds": [PROMPT[:9], table[PROMPT[9:]]], "cache_salt": "again"}
        assert tokens_of(llm, params=GREEDY, **salted) == [expected]
    assert len(scheduler.preempted) == 1


@pytest.mark.long
def test_equal_embeddings_are_found_in_the_cache_and_other_ones_never(
    llm: LLM, table: np.ndarray
) -> None:
    if llm.config.engine.name != "oengine":
        pytest.skip("slots share no prefix")
    page = llm.engine.ledger.page_size
    embeds = table[PROMPT][:, ::-1].copy()
    changed = embeds.copy()
    changed[page + 1, 0] += 1.0

    def num_cached(array: np.ndarray, **named: Any) -> int:
        [output] = llm.generate(prompt_embeds=array, params=GREEDY, **named)
        assert output.metrics is not None
        return output.metrics.num_cached_tokens

    full = len(PROMPT) // page * page
    assert [num_cached(embeds), num_cached(embeds)] == [0, full]
    assert num_cached(changed) == page
    assert num_cached(embeds, cache_salt="a") == 0
    assert [num_cached(embeds, cache_salt=salt) for salt in ("a", "b")] == [full, 0]


@pytest.mark.long
def test_commands_carry_embeddings_as_bytes(llm: LLM, table: np.ndarray) -> None:
    steps: list[Step] = []
    run = llm.engine.executor.run

    def recording(command: ExecutorCommand[Any]) -> Any:
        if isinstance(command, Step) and command.program.embeds:
            steps.append(command)
        return run(command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.executor, "run", recording)
        llm.generate(prompt_embeds=table[PROMPT[:8]] * 2, params=GREEDY, cache_salt="bytes")
    [step] = steps
    again = decode(encode(step))
    assert isinstance(again, Step)
    assert again.program == step.program
    np.testing.assert_array_equal(again.inputs.embeds[:8], table[PROMPT[:8]] * 2)


class Recording(Proposer):
    """Proposes nothing, and keeps what it is asked about."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        self.seen.append(token_ids.copy())
        return np.empty(0, np.int32)


def test_proposers_see_the_tokens_after_the_last_embedding(faked: None) -> None:
    with LLM(TINY, proposer="ngram", **SIZES) as llm:
        proposer = Recording()
        speculation = llm.loop._steps.speculation
        assert speculation.proposer is not None
        speculation.proposer = proposer
        width = llm.plan.model.info.hidden_size
        llm.generate(
            prompt_embeds=[[1, 2], np.zeros((3, width), np.float32), [4, 5]], params=GREEDY
        )
    assert proposer.seen
    assert all(one[:2].tolist() == [4, 5] for one in proposer.seen)


BAD: list[tuple[Any, str]] = [
    (
        np.zeros((3, 5), np.float32),
        r"embeddings float32 \[3, 5\]. Allowed: \[tokens, \d+\] with at",
    ),
    (np.zeros((3, WIDTH), np.float64), r"embeddings float64 .* Allowed: float32 or bfloat16 or"),
    (np.zeros((3, WIDTH), np.int32), r"embeddings int32 .*"),
    (np.full((2, WIDTH), np.nan, np.float32), r"with NaN or infinity"),
    ([[1, VOCAB], np.zeros((2, WIDTH), np.float32)], rf"token id {VOCAB}"),
    (np.zeros((0, WIDTH), np.float32), r"embeddings float32 \[0, 32\]"),
    ("text", r"prompt_embeds of type str. Allowed: an array"),
    ([], r"prompt_embeds of type list"),
    (np.zeros((200, WIDTH), np.float32), r"a prompt of 200 tokens. Allowed: at most 127"),
]


def test_wrong_ones_are_refused_before_anything_is_queued(faked: None) -> None:
    with LLM(TINY, **SIZES) as llm:
        assert llm.plan.model.info.hidden_size == WIDTH
        for given, message in BAD:
            with pytest.raises(RequestError, match=message):
                llm.generate(prompt_embeds=given)
        fine = np.zeros((2, WIDTH), np.float32)
        with pytest.raises(RequestError, match="both prompts and prompt_embeds"):
            llm.generate("A", prompt_embeds=fine)
        with pytest.raises(RequestError, match="a prompt of type NoneType"):
            llm.generate()
        with pytest.raises(RequestError, match="prompt_logprobs = 1 with embeddings"):
            llm.generate(prompt_embeds=fine, params=SamplingParams(prompt_logprobs=1))
        with pytest.raises(RequestError, match="a segment of type str"):
            Segments("text")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"cache_salt = ''. Allowed: a text that is not"):
            llm.generate("A", cache_salt="")
    with (
        LLM(TINY, forbid_compiling=True, **SIZES) as llm,
        pytest.raises(RequestError, match="Set prompt_embeds = true"),
    ):
        llm.generate(prompt_embeds=fine)
