"""Steps that verify drafts, on real engines: tokens and log-probabilities are those of ordinary
decoding.

What the loop does with drafts is in test_speculation.py, on the fake engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay_testing.engine_logprobs import check_returned_logprobs
from enginebay_testing.near_ties import assert_same_tokens
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.subject import greedy, penalty_params, random_prompts, seeded
from tests.brief import LEAST, TINY
from tests.pool import few_sizes
from tests.unit.replaceable_parts import Changing, changing
from tests.unit.serving import assert_idle
from tests.unit.speculation_helpers import (
    DRAFTS,
    Constant,
    Counts,
    FarOracle,
    Oracle,
    plain_and_known,
    run,
    tokens_of,
)

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("verifying")]
SIZES: dict[str, Any] = {
    "proposer": "ngram",
    "draft_tokens": DRAFTS,
    "decode_steps": 3,
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "processors": (),
}
NUM_NEW = 40
PAIRS_TOP_K, NUM_DRAWS = 3, 400
KINDS = {
    "greedy": greedy(NUM_NEW),
    "seeded": seeded(NUM_NEW),
    "logprobs": SamplingParams(
        max_tokens=NUM_NEW, temperature=0.7, seed=5, ignore_eos=True, logprobs=3
    ),
}


@pytest.fixture(scope="module")
def pages() -> Iterator[Changing]:
    """Each draft is a row of its own. All programs are compiled, and none is while it serves.

    Four rows of their full length have too few pages.
    """
    engine = {"name": "oengine", "page_size": 8, "num_pages": 31}
    with few_sizes(), changing(TINY, engine=engine, forbid_compiling=True, **SIZES) as made:
        made.llm.warmup()
        yield made
        assert_idle(made.llm)


@pytest.fixture(scope="module")
def slots() -> Iterator[Changing]:
    """With attention in plain JAX, which is given drafts as a chunk of their row."""
    choices = SIZES | {"engine": "vinference", "kernels": {"attention": "xla"}}
    with few_sizes(), changing(TINY, **choices) as made:
        yield made
        assert_idle(made.llm)


@pytest.fixture(scope="module")
def reference(pages: Changing) -> ReferenceModel:
    return ReferenceModel(pages.llm.plan)


def check_drafted(
    made: Changing,
    reference: ReferenceModel,
    params: SamplingParams,
    wrong_every: int,
    lengths: tuple[int, ...],
) -> None:
    """Prompts of these lengths get the tokens of ordinary decoding; those drafts hold that are
    right.
    """
    prompts = random_prompts(90, lengths)
    plain, known = plain_and_known(made, prompts, params)
    drafted = run(made, prompts, params, Oracle(known, wrong_every))
    assert_same_tokens(reference, prompts, plain, tokens_of(drafted), params)
    for prompt, output in zip(prompts, drafted, strict=True):
        metrics, completion = output.metrics, output.outputs[0]
        assert metrics is not None
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", NUM_NEW)
        assert metrics.num_draft_tokens > 0
        if wrong_every != 1:
            assert metrics.num_accepted_tokens > 2
        if wrong_every == 0 and prompt + completion.token_ids in known:
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens
        if wrong_every == 1:
            assert metrics.num_accepted_tokens <= 1
        check_returned_logprobs(reference, prompt, completion, params.logprobs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "wrong_every"),
    [("greedy", 3), ("seeded", 0), ("seeded", 1), ("logprobs", 0), ("logprobs", 3), ("greedy", 1)],
)
def test_drafts_that_are_rows_change_no_token(
    pages: Changing, reference: ReferenceModel, kind: str, wrong_every: int
) -> None:
    check_drafted(pages, reference, KINDS[kind], wrong_every, (5, 20, 9))


@pytest.mark.long
@pytest.mark.parametrize("wrong_every", [0, 3, 1], ids=["right", "every_third_wrong", "all_wrong"])
def test_drafts_that_are_a_chunk_change_no_token(
    slots: Changing, reference: ReferenceModel, wrong_every: int
) -> None:
    check_drafted(slots, reference, KINDS["greedy"], wrong_every, (5, 9))


def check_far(made: Changing, reference: ReferenceModel, kind: str, wrong_every: int) -> None:
    params = KINDS[kind]
    for prompt in random_prompts(93, (6, 15)):
        plain, known = plain_and_known(made, [prompt], params)
        far = FarOracle(known, wrong_every)
        drafted = run(made, [prompt], params, far)
        assert_same_tokens(reference, [prompt], plain, tokens_of(drafted), params)
        check_returned_logprobs(reference, prompt, drafted[0].outputs[0], params.logprobs)
        metrics = drafted[0].metrics
        assert metrics is not None
        if plain != tokens_of(drafted):
            continue  # a counted tie: what came after it was not foreseen
        if wrong_every:
            assert metrics.num_draft_tokens <= metrics.num_accepted_tokens + far.num_asked * (
                DRAFTS + 1
            )
        else:
            width = DRAFTS + 1
            assert far.num_asked <= 1 + -(-NUM_NEW // (made.llm.plan.config.draft_passes * width))
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens


@pytest.mark.long
@pytest.mark.parametrize(("kind", "wrong_every"), [("greedy", 0), ("seeded", 7), ("logprobs", 0)])
def test_drafts_of_several_passes_are_verified_in_one_step(
    pages: Changing, reference: ReferenceModel, kind: str, wrong_every: int
) -> None:
    check_far(pages, reference, kind, wrong_every)


@pytest.mark.long
def test_passes_of_chunks_are_verified_in_one_step(
    slots: Changing, reference: ReferenceModel
) -> None:
    check_far(slots, reference, "greedy", 7)


def test_alone_and_with_neighbours_that_have_penalties_or_no_drafts(
    pages: Changing, reference: ReferenceModel
) -> None:
    prompts = random_prompts(90, (6, 11, 17, 23), seed=4)
    params = [greedy(NUM_NEW), penalty_params(NUM_NEW), seeded(NUM_NEW), greedy(NUM_NEW)]
    with pages.drafted(None):
        plain = tokens_of(pages.llm.generate(prompts, params))
    known = [p + t for p, t in zip(prompts[:3], plain[:3], strict=True)]
    with pages.drafted(Oracle(known)):
        outputs = pages.llm.generate(prompts, params)
    for i, output in enumerate(outputs):
        assert_same_tokens(
            reference, [prompts[i]], [plain[i]], [output.outputs[0].token_ids], params[i]
        )
    drafted = [output.metrics.num_draft_tokens for output in outputs if output.metrics]
    assert drafted[1] == 0, "penalties count tokens: such rows are not drafted"
    assert drafted[0] > 0
    assert drafted[2] > 0


def test_drafts_are_rows_where_attention_leaves_writing_to_others(
    pages: Changing, slots: Changing
) -> None:
    for llm in (pages.llm, slots.llm):
        caps = llm.plan.kernels.attention["decode"].caps
        assert llm.engine.executor.parts.drafts_are_rows == caps.splits_rows
        assert caps.splits_rows == (llm.plan.kernels.names["attention.decode"] == "native")
    assert not slots.llm.engine.executor.parts.drafts_are_rows


def test_drafts_and_wide_log_probabilities_are_warmed_up_together() -> None:
    """Rows that request full-vocabulary log-probabilities are not drafted."""
    sizes = SIZES | {"max_model_len": 16, "max_num_seqs": 1}
    with LLM(LEAST, engine="oengine", sampler="greedy", full_vocab_logprobs=True, **sizes) as llm:
        runner = llm.engine.executor
        keys = [key for key in llm.engine.geometry.all_steps() if key.kind in ("decode", "verify")]
        llm.run_on_engine(lambda: runner.compile_steps(keys))
        compiled = sorted((key.kind, key.full_vocab) for key in runner.programs)
    assert compiled == [("decode", False), ("decode", True), ("verify", False)]


def test_text_that_repeats_is_drafted_by_looking_it_up(pages: Changing) -> None:
    prompt = random_prompts(90, (8,), seed=2)[0] * 3
    plain, _ = plain_and_known(pages, [prompt], greedy(NUM_NEW))
    drafted = run(pages, [prompt], greedy(NUM_NEW), pages.proposer.usual)
    assert tokens_of(drafted) == plain
    assert drafted[0].metrics is not None
    assert drafted[0].metrics.num_draft_tokens > 0


@pytest.mark.parametrize("at", [3, 6])
def test_a_stop_token_among_the_drafts_ends_the_row_there(pages: Changing, at: int) -> None:
    prompt = random_prompts(90, (8,), seed=7)[0]
    params = SamplingParams(max_tokens=NUM_NEW, temperature=3.0, seed=1, ignore_eos=True)
    [plain], known = plain_and_known(pages, [prompt], params)
    stop = plain[at]
    params = params.model_copy(update={"stop_token_ids": (stop,)})
    completion = run(pages, [prompt], params, Oracle(known))[0].outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == plain[: plain.index(stop) + 1]


def test_lengths_end_rows_within_and_between_steps(pages: Changing, slots: Changing) -> None:
    prompt = random_prompts(90, (8,), seed=8)[0]
    for made, lengths in ((pages, (1, 2, 5, 6, 7, 11)), (slots, (4, 9))):
        [plain], known = plain_and_known(made, [prompt], greedy(12))
        for max_tokens in lengths:
            completion = run(made, [prompt], greedy(max_tokens), Oracle(known))[0].outputs[0]
            assert (completion.token_ids, completion.finish_reason) == (
                plain[:max_tokens],
                "length",
            )


def test_a_row_may_end_at_the_last_place_of_the_cache(pages: Changing, slots: Changing) -> None:
    prompt = random_prompts(90, (14,), seed=9)[0]
    for made in (pages, slots):
        plain, known = plain_and_known(made, [prompt], greedy(50))
        assert tokens_of(run(made, [prompt], greedy(50), Oracle(known, wrong_every=5))) == plain


def test_what_rejected_drafts_left_behind_is_never_found_again(
    pages: Changing, reference: ReferenceModel
) -> None:
    """The text that was generated is a prompt now: pages that were published hold it, and no
    draft.
    """
    prompt = random_prompts(90, (10,), seed=12)[0]
    _, known = plain_and_known(pages, [prompt], greedy(NUM_NEW))
    text = (
        prompt + tokens_of(run(pages, [prompt], greedy(NUM_NEW), Oracle(known, wrong_every=3)))[0]
    )
    output = run(pages, [text], greedy(8), None)[0]
    assert output.metrics is not None
    assert output.metrics.num_cached_tokens > 0
    assert reference.first_wrong_token(text, output.outputs[0].token_ids, 1e-3) is None


def test_preempted_rows_that_are_drafted_get_the_tokens_of_ordinary_decoding(
    pages: Changing, reference: ReferenceModel
) -> None:  # holds SG5
    prompts, params = random_prompts(90, (16, 15, 16, 14), seed=6), greedy(48)
    plain = [plain_and_known(pages, [prompt], params)[0][0] for prompt in prompts]
    counts = Counts()
    pages.llm.loop.observers.add(counts)
    known = [p + t for p, t in zip(prompts, plain, strict=True)]
    drafted = tokens_of(run(pages, prompts, params, Oracle(known, wrong_every=3)))
    pages.llm.loop.observers.remove(counts)
    assert_same_tokens(reference, prompts, plain, drafted, params)
    assert counts.num_preempted > 0
    assert 0 < counts.num_accepted < counts.num_drafted


def test_frequencies_are_those_of_the_model(
    pages: Changing, reference: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of tokens, the second of which is verified: chi-square, 8 degrees of freedom."""
    monkeypatch.setattr("enginebay.serving.running.MIN_ACCEPTED_SHARE", 0.0)
    prompt = random_prompts(90, (8,), seed=3)[0]
    params = SamplingParams(
        max_tokens=3, temperature=1.0, top_k=PAIRS_TOP_K, n=100, ignore_eos=True
    )
    expected = {
        (a, b): pa * pb
        for a, pa in kept(reference, prompt)
        for b, pb in kept(reference, [*prompt, a])
    }
    likely = max(expected, key=lambda pair: expected[pair])[1]
    seen: Counter[tuple[int, int]] = Counter()
    counts = Counts()
    pages.llm.loop.observers.add(counts)
    for seed in range(NUM_DRAWS // 100):
        output = run(pages, [prompt], params.model_copy(update={"seed": seed}), Constant(likely))[0]
        seen.update((one.token_ids[0], one.token_ids[1]) for one in output.outputs)
    pages.llm.loop.observers.remove(counts)
    assert set(seen) <= set(expected)
    square = sum(
        (seen[pair] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for pair, p in expected.items()
    )
    assert square < 26.1, f"{square}: by chance once in a thousand"
    assert counts.num_drafted == NUM_DRAWS, "each second token is verified"
    assert 0 < counts.num_accepted < NUM_DRAWS


def kept(reference: ReferenceModel, tokens: list[int]) -> list[tuple[int, float]]:
    """The tokens that top_k leaves, with their probabilities."""
    logits = reference.logits(tokens)[-1].astype(np.float64)
    best = np.argsort(-logits)[:PAIRS_TOP_K]
    weights = np.exp(logits[best] - logits[best].max())
    return list(zip(best.tolist(), (weights / weights.sum()).tolist(), strict=True))
