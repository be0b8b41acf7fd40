"""Speculative decoding is exact: whatever is drafted, rows get the tokens, ends and log-probabilities of ordinary decoding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import InternalError
from enginebay.loop.speculation import Speculation
from enginebay.proposer import Proposer
from enginebay.registry import load_registry
from enginebay.testing.engine_logprobs import check_logprobs
from enginebay.testing.reference import ReferenceModel
from enginebay.testing.subject import greedy, penalised, prompts_of, seeded
from enginebay.testing.ties import assert_same_tokens
from enginebay.testing.tiny import write_tiny_checkpoint
from enginebay.types import RequestOutput

pytestmark = pytest.mark.xdist_group("speculation")
ENGINES: dict[str, dict[str, Any]] = {
    "vinference": {"engine": "vinference", "kernels": {"attention": "xla"}},
    "oengine": {"engine": {"name": "oengine", "page_size": 8}},
}
"""Attention in plain JAX is given drafts as a chunk of their row, what `auto` chooses here each as a row of its own."""
NUM_NEW, DRAFTS = 40, 4
PAIRS_TOP_K, NUM_DRAWS = 3, 400


class Oracle(Proposer):
    """Knows how rows go on, and says something else for every `wrong_every`-th token. Other rows get tokens of 1."""

    def __init__(self, known: Sequence[list[int]] = (), wrong_every: int = 0) -> None:
        self.known = known
        self.wrong_every = wrong_every
        self.num_asked = 0

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        self.num_asked += 1
        length = len(token_ids)
        for one in self.known:
            if one[:length] == token_ids.tolist():
                drafts = np.asarray(one[length : length + most], np.int32)
                wrong = (np.arange(length, length + len(drafts)) % max(1, self.wrong_every)) == 0
                return np.where(wrong & (self.wrong_every > 0), (drafts + 1) % 90, drafts).astype(np.int32)
        return np.ones(most, np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder, load_registry())
    return str(folder)


@pytest.fixture(scope="module", params=list(ENGINES))
def llm(request: pytest.FixtureRequest, model: str) -> Iterator[LLM]:
    """All of its programs are compiled, and none is while it serves."""
    with LLM(
        model,
        **ENGINES[request.param],
        proposer="ngram",
        draft_tokens=DRAFTS,
        decode_steps=3,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        processors=(),
        forbid_compiling=True,
    ) as made:
        made.warmup()
        yield made
        made.run_on_engine(made.engine.ledger.check)
        assert made.run_on_engine(lambda: made.engine.rows.num_reqs) == 0


@pytest.fixture(scope="module")
def reference(llm: LLM) -> ReferenceModel:
    return ReferenceModel(llm.plan)


def speculation(llm: LLM) -> Speculation:
    return llm._loop._steps.speculation


@pytest.fixture(autouse=True)
def own_proposer(llm: LLM) -> Iterator[None]:
    """Each test may put its own proposer in the place of the chosen one."""
    chosen = speculation(llm).proposer
    yield
    speculation(llm).proposer = chosen


def run(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, proposer: Proposer | None
) -> list[RequestOutput]:
    speculation(llm).proposer = proposer
    return llm.generate(list(prompts), params)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


KINDS = {
    "greedy": greedy(NUM_NEW),
    "seeded": seeded(NUM_NEW),
    "logprobs": SamplingParams(max_tokens=NUM_NEW, temperature=0.7, seed=5, ignore_eos=True, logprobs=3),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("wrong_every", [0, 3, 1], ids=["right", "every_third_wrong", "all_wrong"])
def test_tokens_are_those_of_ordinary_decoding(
    llm: LLM, reference: ReferenceModel, kind: str, wrong_every: int
) -> None:
    prompts, params = prompts_of(90, (5, 20, 9)), KINDS[kind]
    plain = run(llm, prompts, params, None)
    assert all(output.metrics and output.metrics.num_draft_tokens == 0 for output in plain)
    whole = [p + t for p, t in zip(prompts, tokens_of(plain), strict=True)]
    drafted = run(llm, prompts, params, Oracle(whole, wrong_every))
    assert_same_tokens(reference, prompts, tokens_of(plain), tokens_of(drafted), params)
    for prompt, output in zip(prompts, drafted, strict=True):
        metrics, completion = output.metrics, output.outputs[0]
        assert metrics is not None
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", NUM_NEW)
        assert metrics.num_draft_tokens > 0
        if wrong_every != 1:
            assert metrics.num_accepted_tokens > 2
        if wrong_every == 0 and prompt + completion.token_ids in whole:
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens
        if wrong_every == 1:
            assert metrics.num_accepted_tokens <= 1
            assert metrics.num_draft_tokens <= 8, "a row whose drafts fail decodes as usual"
        check_logprobs(reference, prompt, completion, params.logprobs)


class FarOracle(Oracle):
    """One that is asked for the drafts of several passes."""

    looks_far = True


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("wrong_every", [0, 7], ids=["right", "every_seventh_wrong"])
def test_drafts_that_hold_are_followed_by_more_in_the_same_step(
    llm: LLM, reference: ReferenceModel, kind: str, wrong_every: int
) -> None:
    prompts, params = prompts_of(93, (6, 17)), KINDS[kind]
    for prompt in prompts:
        plain = run(llm, [prompt], params, None)
        far = FarOracle([prompt + tokens_of(plain)[0]], wrong_every)
        drafted = run(llm, [prompt], params, far)
        assert_same_tokens(reference, [prompt], tokens_of(plain), tokens_of(drafted), params)
        metrics = drafted[0].metrics
        assert metrics is not None
        if tokens_of(plain) != tokens_of(drafted):
            continue  # a counted tie: what came after it was not foreseen
        if wrong_every:
            # A step looks at no pass of drafts after one that did not hold, and counts none.
            assert metrics.num_draft_tokens <= metrics.num_accepted_tokens + far.num_asked * (DRAFTS + 1)
        else:
            width = DRAFTS + 1
            assert far.num_asked <= 1 + -(-NUM_NEW // (llm.plan.config.draft_passes * width))
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens


def test_alone_and_with_neighbours_that_have_penalties_or_no_drafts(
    llm: LLM, reference: ReferenceModel
) -> None:
    prompts = prompts_of(90, (6, 11, 17, 25), seed=4)
    params = [greedy(NUM_NEW), penalised(NUM_NEW), seeded(NUM_NEW), greedy(NUM_NEW)]
    speculation(llm).proposer = None
    plain = tokens_of(llm.generate(prompts, params))
    known = [p + t for p, t in zip(prompts[:3], plain[:3], strict=True)]
    speculation(llm).proposer = Oracle(known)
    outputs = llm.generate(prompts, params)
    for i, output in enumerate(outputs):
        assert_same_tokens(reference, [prompts[i]], [plain[i]], [output.outputs[0].token_ids], params[i])
    drafted = [output.metrics.num_draft_tokens for output in outputs if output.metrics]
    assert drafted[1] == 0, "penalties count tokens: such rows are not drafted"
    assert drafted[0] > 0
    assert drafted[2] > 0


def test_drafts_are_rows_where_attention_leaves_writing_to_others(llm: LLM) -> None:
    caps = llm.plan.kernels.attention["decode"].caps
    assert llm.engine.runner.program.drafts_are_rows == caps.splits_rows
    assert caps.splits_rows == (llm.plan.kernels.names["attention.decode"] == "native")


def test_drafts_and_wide_log_probabilities_are_warmed_up_together(model: str) -> None:
    with LLM(
        model,
        engine="oengine",
        proposer="ngram",
        wide_logprobs=True,
        dtype="float32",
        max_model_len=32,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        decode_steps=2,
    ) as llm:
        llm.warmup()
        wide = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0, logprobs=-1)
        prompt = [5, 6, 7, 5, 6, 7, 5, 6]
        for params in (wide, greedy(9)):
            assert llm.generate([prompt], params)[0].outputs[0].finish_reason == "length"


def test_text_that_repeats_is_drafted_by_looking_it_up(llm: LLM) -> None:
    prompt = prompts_of(90, (12,), seed=2)[0] * 3
    plain = run(llm, [prompt], greedy(NUM_NEW), None)
    speculation(llm).proposer = llm._parts.proposer
    drafted = llm.generate([prompt], greedy(NUM_NEW))
    assert tokens_of(drafted) == tokens_of(plain)


@pytest.mark.parametrize("at", range(3, 9))
def test_a_stop_token_among_the_drafts_ends_the_row_there(llm: LLM, at: int) -> None:
    prompt = prompts_of(90, (8,), seed=7)[0]
    params = SamplingParams(max_tokens=NUM_NEW, temperature=3.0, seed=1, ignore_eos=True)
    plain = tokens_of(run(llm, [prompt], params, None))[0]
    stop = plain[at]
    params = params.model_copy(update={"stop_token_ids": (stop,)})
    completion = run(llm, [prompt], params, Oracle([prompt + plain]))[0].outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == plain[: plain.index(stop) + 1]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_lengths_end_rows_within_and_between_steps(llm: LLM, max_tokens: int) -> None:
    prompt = prompts_of(90, (8,), seed=8)[0]
    plain = tokens_of(run(llm, [prompt], greedy(12), None))[0]
    completion = run(llm, [prompt], greedy(max_tokens), Oracle([prompt + plain]))[0].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (plain[:max_tokens], "length")


def test_a_row_may_end_at_the_last_place_of_the_cache(llm: LLM) -> None:
    prompt = prompts_of(90, (100,), seed=9)[0]
    plain = tokens_of(run(llm, [prompt], greedy(28), None))[0]
    assert tokens_of(run(llm, [prompt], greedy(28), Oracle([prompt + plain], wrong_every=5))) == [plain]


def test_what_rejected_drafts_left_behind_is_never_found_again(llm: LLM, reference: ReferenceModel) -> None:
    """The text that was generated is a prompt now: pages that were published hold it, and not the drafts."""
    prompt = prompts_of(90, (10,), seed=12)[0]
    plain = tokens_of(run(llm, [prompt], greedy(NUM_NEW), None))[0]
    text = prompt + tokens_of(run(llm, [prompt], greedy(NUM_NEW), Oracle([prompt + plain], wrong_every=3)))[0]
    output = run(llm, [text], greedy(8), None)[0]
    assert output.metrics is not None
    assert (output.metrics.num_cached_tokens > 0) == llm.engine.ledger.forks, (
        "pages are shared, slots are not"
    )
    assert reference.first_wrong_token(text, output.outputs[0].token_ids, 1e-3) is None


def test_frequencies_are_those_of_the_model(
    llm: LLM, reference: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of tokens, the second of which is always verified against a draft: chi-square, 8 degrees of freedom."""
    monkeypatch.setattr("enginebay.loop.standing.ENOUGH", 0.0)
    prompt = prompts_of(90, (8,), seed=3)[0]
    params = SamplingParams(max_tokens=4, temperature=1.0, top_k=PAIRS_TOP_K, n=100, ignore_eos=True)
    expected = {
        (a, b): pa * pb for a, pa in kept(reference, prompt) for b, pb in kept(reference, [*prompt, a])
    }
    likely = max(expected, key=lambda pair: expected[pair])[1]
    speculation(llm).proposer = Constant(likely)
    seen: Counter[tuple[int, int]] = Counter()
    num_accepted = 0
    for seed in range(NUM_DRAWS // 100):
        output = llm.generate([prompt], params.model_copy(update={"seed": seed}))[0]
        assert output.metrics is not None
        num_accepted += output.metrics.num_accepted_tokens
        seen.update((one.token_ids[0], one.token_ids[1]) for one in output.outputs)
    assert set(seen) <= set(expected)
    square = sum((seen[pair] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for pair, p in expected.items())
    assert square < 26.1, f"{square}: by chance once in a thousand"
    assert num_accepted > 0


class Constant(Proposer):
    """Always the same token."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        return np.full(most, self.token_id, np.int32)


def kept(reference: ReferenceModel, tokens: list[int]) -> list[tuple[int, float]]:
    """The tokens that top_k leaves, with their probabilities."""
    logits = reference.logits(tokens)[-1].astype(np.float64)
    best = np.argsort(-logits)[:PAIRS_TOP_K]
    weights = np.exp(logits[best] - logits[best].max())
    return list(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))


def test_drafts_that_are_no_tokens_fail_the_request_and_nothing_else(llm: LLM) -> None:
    speculation(llm).proposer = Constant(10**6)
    with pytest.raises(InternalError, match=r"Constant proposes .1000000, "):
        llm.generate([[1, 2, 3]], greedy(8))
    assert len(tokens_of(run(llm, [[1, 2, 3]], greedy(8), None))[0]) == 8


def test_more_rows_than_are_verified_together_decode_as_usual(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginebay.loop.speculation.MOST_VERIFIED_ROWS", 1)
    prompts = prompts_of(90, (6, 7), seed=5)
    oracle = Oracle()
    outputs = run(llm, prompts, greedy(9), oracle)
    drafted = [output.metrics.num_draft_tokens for output in outputs if output.metrics]
    assert drafted == [0, 0]


def test_without_overlap_the_tokens_are_the_same(llm: LLM) -> None:
    prompts = prompts_of(90, (6, 14), seed=6)
    plain = tokens_of(run(llm, prompts, greedy(NUM_NEW), None))
    known = [p + t for p, t in zip(prompts, plain, strict=True)]
    steps = llm._loop._steps
    config = steps.config
    steps.config = config.model_copy(update={"overlap_execution": False})
    try:
        assert tokens_of(run(llm, prompts, greedy(NUM_NEW), Oracle(known, wrong_every=4))) == plain
    finally:
        steps.config = config
