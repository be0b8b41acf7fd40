"""Drafting in a pool of too few pages: rows are preempted between drafts, get the tokens of
ordinary decoding, and leak no page.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from enginebay import LLM, SamplingParams
from enginebay_testing.subject import greedy, random_prompts, seeded
from tests.brief import TINY
from tests.fakes import install
from tests.unit.loops import Pauses, go_on, seeing
from tests.unit.replaceable_parts import Changing, changing
from tests.unit.serving import within_minutes
from tests.unit.speculation_helpers import Counts, Oracle, run, tokens_of

pytestmark = pytest.mark.xdist_group("speculation")

NUM_NEW = 36
PROMPTS = random_prompts(90, (9, 21, 13, 27), seed=6)
KINDS = {"greedy": greedy(NUM_NEW), "seeded": seeded(NUM_NEW)}
PAGE_SIZE, NUM_PAGES = 8, 11
"""One of the requests fits, and two run."""


@pytest.fixture(scope="module", params=[False, True], ids=["in_turn", "overlapping"])
def made(request: pytest.FixtureRequest) -> Iterator[Changing]:
    """On the fake engine, whose tokens are others when a page is lost or written by two rows."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        with changing(
            TINY,
            engine={
                "name": "oengine",
                "page_size": PAGE_SIZE,
                "num_pages": NUM_PAGES,
                "prefix_caching": False,
            },
            overlap_execution=request.param,
            proposer="ngram",
            draft_tokens=4,
            decode_steps=3,
            dtype="float32",
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=16,
        ) as made:
            yield made


def assert_nothing_is_held(llm: LLM) -> None:
    llm.run_on_engine(llm.engine.ledger.check)
    pool = llm.engine.ledger.groups["full"].store.pool
    assert llm.run_on_engine(lambda: (llm.engine.rows.num_reqs, pool.num_used)) == (0, 0)
    assert llm.run_on_engine(lambda: pool.num_free) == NUM_PAGES - 1


def one_by_one(made: Changing, params: SamplingParams) -> list[list[int]]:
    """The tokens of ordinary decoding, of each prompt alone."""
    return [tokens_of(run(made, [prompt], params, None))[0] for prompt in PROMPTS]


@within_minutes
@pytest.mark.parametrize("kind", list(KINDS))
def test_preempted_rows_that_are_drafted_get_the_tokens_of_ordinary_decoding(
    made: Changing, kind: str
) -> None:  # holds SG5
    params = KINDS[kind]
    plain = one_by_one(made, params)
    known = [p + t for p, t in zip(PROMPTS, plain, strict=True)]
    for proposer in (Oracle(known, wrong_every=3), made.proposer.usual):
        counts = Counts()
        made.llm.loop.observers.add(counts)
        outputs = run(made, PROMPTS, params, proposer)
        made.llm.loop.observers.remove(counts)
        assert tokens_of(outputs) == plain
        assert counts.num_preempted > 0
        metrics = [output.metrics for output in outputs if output.metrics]
        assert sum(one.num_draft_tokens for one in metrics) == counts.num_drafted
        assert sum(one.num_accepted_tokens for one in metrics) == counts.num_accepted
        assert_nothing_is_held(made.llm)
        if isinstance(proposer, Oracle):
            assert 0 < counts.num_accepted < counts.num_drafted


def test_readers_that_leave_between_drafts_leave_no_page(made: Changing) -> None:  # holds SG5
    plain = one_by_one(made, KINDS["greedy"])
    known = [p + t for p, t in zip(PROMPTS, plain, strict=True)]
    with made.drafted(Oracle(known, wrong_every=3)):
        go_on(made.llm.loop, paused=True)
        streams = [made.llm.stream(prompt, KINDS["greedy"]) for prompt in PROMPTS]
        for stream in streams:
            pauses = Pauses(made.llm.loop, after=3)
            with seeing(made.llm.engine, launch=pauses):
                go_on(made.llm.loop)
                pauses.wait()  # between two drafts
                stream.close()
        go_on(made.llm.loop)
        assert_nothing_is_held(made.llm)
