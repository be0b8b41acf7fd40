"""Speculation is exact: whatever is drafted, rows get the tokens and ends of ordinary decoding.

What the loop makes of drafts is tested on the fake engine, which verifies them. Real steps that
verify are in test_verifying.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay.contracts.proposer import Proposer
from enginebay.errors import InternalError
from enginebay_testing.subject import greedy, penalty_params, random_prompts, seeded
from tests.brief import TINY
from tests.fakes import install
from tests.unit.replaceable_parts import Changing, changing
from tests.unit.serving import assert_idle
from tests.unit.speculation_helpers import (
    DRAFTS,
    Constant,
    FarOracle,
    Oracle,
    plain_and_known,
    run,
    tokens_of,
)

pytestmark = pytest.mark.xdist_group("speculation")
ENGINES: dict[str, Any] = {
    "vinference": "vinference",
    "oengine": {"name": "oengine", "page_size": 8},
}
NUM_NEW = 40
KINDS = {"greedy": greedy(NUM_NEW), "seeded": seeded(NUM_NEW)}


@pytest.fixture(
    scope="module", params=[("vinference", True), ("oengine", True), ("oengine", False)], ids=str
)
def made(request: pytest.FixtureRequest) -> Iterator[Changing]:
    """By the ledger's engine, and whether a step is launched before the one before it is read."""
    name, overlaps = request.param
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        with changing(
            TINY,
            engine=ENGINES[name],
            overlap_execution=overlaps,
            proposer="ngram",
            draft_tokens=DRAFTS,
            decode_steps=3,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            processors=(),
        ) as made:
            yield made
            assert_idle(made.llm)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("wrong_every", [0, 3, 1], ids=["right", "every_third_wrong", "all_wrong"])
def test_tokens_are_those_of_ordinary_decoding(made: Changing, kind: str, wrong_every: int) -> None:
    prompts, params = random_prompts(90, (5, 20, 9)), KINDS[kind]
    ordinary = run(made, prompts, params, None)
    assert all(output.metrics and output.metrics.num_draft_tokens == 0 for output in ordinary)
    plain, known = plain_and_known(made, prompts, params)
    drafted = run(made, prompts, params, Oracle(known, wrong_every))
    assert tokens_of(drafted) == plain == tokens_of(ordinary)
    for output in drafted:
        metrics, completion = output.metrics, output.outputs[0]
        assert metrics is not None
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", NUM_NEW)
        assert metrics.num_draft_tokens > 0
        if wrong_every != 1:
            assert metrics.num_accepted_tokens > 2
        if wrong_every == 0:
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens
        if wrong_every == 1:
            assert metrics.num_accepted_tokens == 0
            assert metrics.num_draft_tokens <= 8, "a row whose drafts fail decodes as usual"


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("wrong_every", [0, 7], ids=["right", "every_seventh_wrong"])
def test_drafts_that_hold_are_followed_by_more_in_the_same_step(
    made: Changing, kind: str, wrong_every: int
) -> None:
    params = KINDS[kind]
    assert made.llm.plan.config.draft_passes > 1
    for prompt in random_prompts(90, (6, 17), seed=93):
        plain, known = plain_and_known(made, [prompt], params)
        far = FarOracle(known, wrong_every)
        drafted = run(made, [prompt], params, far)
        assert tokens_of(drafted) == plain
        metrics = drafted[0].metrics
        assert metrics is not None
        if wrong_every:
            # A step looks at no pass of drafts after one that did not hold, and counts none.
            assert metrics.num_draft_tokens <= metrics.num_accepted_tokens + far.num_asked * (
                DRAFTS + 1
            )
        else:
            width = DRAFTS + 1
            assert far.num_asked <= 1 + -(-NUM_NEW // (made.llm.plan.config.draft_passes * width))
            assert metrics.num_accepted_tokens == metrics.num_draft_tokens


class LateOracle(Proposer):
    """Drafts wrong tokens until a row has `wrong_until` tokens, and right ones from then on."""

    def __init__(self, known: Sequence[list[int]], wrong_until: int) -> None:
        self.wrong, self.right = Oracle(known, wrong_every=1), Oracle(known)
        self.wrong_until = wrong_until

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        oracle = self.wrong if len(token_ids) < self.wrong_until else self.right
        return oracle.propose(token_ids, most)


def test_a_row_that_gave_its_drafts_up_drafts_again_when_they_would_have_held(
    made: Changing,
) -> None:  # holds G505
    [prompt] = random_prompts(90, (8,), seed=11)
    plain, known = plain_and_known(made, [prompt], KINDS["greedy"])
    late = LateOracle(known, len(prompt) + NUM_NEW // 2)
    drafted = run(made, [prompt], KINDS["greedy"], late)
    assert tokens_of(drafted) == plain
    assert drafted[0].metrics is not None
    assert drafted[0].metrics.num_accepted_tokens > 0


def test_alone_and_with_neighbours_that_have_penalties_or_no_drafts(made: Changing) -> None:
    prompts = random_prompts(90, (6, 11, 17, 25), seed=4)
    params = [greedy(NUM_NEW), penalty_params(NUM_NEW), seeded(NUM_NEW), greedy(NUM_NEW)]
    with made.drafted(None):
        plain = tokens_of(made.llm.generate(prompts, params))
    known = [p + t for p, t in zip(prompts[:3], plain[:3], strict=True)]
    with made.drafted(Oracle(known)):
        outputs = made.llm.generate(prompts, params)
    assert tokens_of(outputs) == plain
    drafted = [output.metrics.num_draft_tokens for output in outputs if output.metrics]
    assert drafted[1] == 0, "penalties count tokens: such rows are not drafted"
    assert drafted[0] > 0
    assert drafted[2] > 0


@pytest.mark.parametrize("at", range(3, 9))
def test_a_stop_token_among_the_drafts_ends_the_row_there(made: Changing, at: int) -> None:
    prompt = random_prompts(90, (8,), seed=7)[0]
    params = SamplingParams(max_tokens=NUM_NEW, temperature=3.0, seed=1, ignore_eos=True)
    [plain], known = plain_and_known(made, [prompt], params)
    stop = plain[at]
    params = params.model_copy(update={"stop_token_ids": (stop,)})
    completion = run(made, [prompt], params, Oracle(known))[0].outputs[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == plain[: plain.index(stop) + 1]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_lengths_end_rows_within_and_between_steps(made: Changing, max_tokens: int) -> None:
    prompt = random_prompts(90, (8,), seed=8)[0]
    [plain], known = plain_and_known(made, [prompt], greedy(12))
    completion = run(made, [prompt], greedy(max_tokens), Oracle(known))[0].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (plain[:max_tokens], "length")


def test_a_row_may_end_at_the_last_place_of_the_cache(made: Changing) -> None:
    prompt = random_prompts(90, (100,), seed=9)[0]
    plain, known = plain_and_known(made, [prompt], greedy(28))
    assert tokens_of(run(made, [prompt], greedy(28), Oracle(known, wrong_every=5))) == plain


def test_what_rejected_drafts_left_behind_is_never_found_again(made: Changing) -> None:
    """The text that was generated is a prompt now: pages that were published hold it, and no
    draft.
    """
    prompt = random_prompts(90, (10,), seed=12)[0]
    plain, [text] = plain_and_known(made, [prompt], greedy(NUM_NEW + 8))
    drafted = tokens_of(run(made, [prompt], greedy(NUM_NEW), Oracle([text], wrong_every=3)))
    text = prompt + drafted[0]
    output = run(made, [text], greedy(8), None)[0]
    assert output.metrics is not None
    assert (output.metrics.num_cached_tokens > 0) == made.llm.engine.ledger.forks, (
        "pages are shared, slots are not"
    )
    assert drafted[0] + output.outputs[0].token_ids == plain[0]


def test_drafts_that_are_no_tokens_fail_the_request_and_nothing_else(made: Changing) -> None:
    with pytest.raises(InternalError, match=r"ChangingProposer proposes .1000000, "):
        run(made, [[1, 2, 3]], greedy(8), Constant(10**6))
    assert len(tokens_of(run(made, [[1, 2, 3]], greedy(8), None))[0]) == 8


def test_more_rows_than_are_verified_together_decode_as_usual(
    made: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginebay.serving.planning.MAX_VERIFIED_ROWS", 1)
    prompts = random_prompts(90, (6, 7), seed=5)
    outputs = run(made, prompts, greedy(9), Oracle())
    drafted = [output.metrics.num_draft_tokens for output in outputs if output.metrics]
    assert drafted == [0, 0]


def test_rows_together_get_what_each_gets_alone(made: Changing) -> None:
    """Also where no step is launched before the one before it is read."""
    prompts = random_prompts(90, (6, 14), seed=6)
    alone = [plain_and_known(made, [prompt], greedy(NUM_NEW))[0][0] for prompt in prompts]
    known = [p + t for p, t in zip(prompts, alone, strict=True)]
    assert tokens_of(run(made, prompts, greedy(NUM_NEW), Oracle(known, wrong_every=4))) == alone
