"""Drafting in a pool of too few pages: rows are preempted between drafts, get the tokens of ordinary decoding, and leak no page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.loop.observer import Ending, Execution, Observer, Update
from enginebay.proposer import Proposer
from enginebay.registry import load_registry
from enginebay.testing.reference import ReferenceModel
from enginebay.testing.subject import greedy, prompts_of, seeded
from enginebay.testing.ties import assert_same_tokens
from enginebay.testing.tiny import write_tiny_checkpoint

pytestmark = pytest.mark.xdist_group("speculation")

NUM_NEW = 36
PROMPTS = prompts_of(90, (9, 21, 13, 27), seed=6)
KINDS = {"greedy": greedy(NUM_NEW), "seeded": seeded(NUM_NEW)}
PAGE_SIZE, NUM_PAGES = 8, 11
"""One of the requests fits, and two run."""


class Knowing(Proposer):
    """Knows how rows go on, and says something else for every third token."""

    def __init__(self, known: Sequence[list[int]]) -> None:
        self.known = known

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        length = len(token_ids)
        for one in self.known:
            if one[:length] == token_ids.tolist():
                drafts = np.asarray(one[length : length + most], np.int32)
                wrong = np.arange(length, length + len(drafts)) % 3 == 0
                return np.where(wrong, (drafts + 1) % 90, drafts).astype(np.int32)
        return np.empty(0, np.int32)


class Counts(Observer):
    """Preemptions, and what was drafted and held."""

    def __init__(self) -> None:
        self.num_preempted = self.num_drafted = self.num_accepted = 0

    def updated(self, update: Update) -> None:
        self.num_preempted += update.num_preempted

    def executed(self, execution: Execution) -> None:
        self.num_drafted += execution.num_draft_tokens
        self.num_accepted += execution.num_accepted_tokens

    def ended(self, ending: Ending) -> None:
        pass


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["in_turn", "overlapping"]
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder, load_registry())
    with LLM(
        str(folder),
        engine={"name": "oengine", "page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "prefix_caching": False},
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


def set_proposer(llm: LLM, proposer: Proposer | None) -> None:
    def put() -> None:
        llm._loop._steps.speculation.proposer = proposer

    llm.run_on_engine(put)


def assert_nothing_is_held(llm: LLM) -> None:
    llm.run_on_engine(llm.engine.ledger.check)
    pool = llm.engine.ledger.store.pool  # type: ignore[attr-defined]
    assert llm.run_on_engine(lambda: (llm.engine.rows.num_reqs, pool.num_used)) == (0, 0)
    assert llm.run_on_engine(lambda: pool.num_free) == NUM_PAGES - 1


def one_by_one(llm: LLM, params: SamplingParams) -> list[list[int]]:
    """The tokens of ordinary decoding, of each prompt alone."""
    set_proposer(llm, None)
    return [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["greedy", pytest.param("seeded", marks=pytest.mark.slow)])
def test_preempted_rows_that_are_drafted_get_the_tokens_of_ordinary_decoding(
    llm: LLM, kind: str
) -> None:  # holds SG5
    params = KINDS[kind]
    plain = one_by_one(llm, params)
    reference = ReferenceModel(llm.plan)
    known = [p + t for p, t in zip(PROMPTS, plain, strict=True)]
    for proposer in (Knowing(known), llm._parts.proposer):
        set_proposer(llm, proposer)
        counts = Counts()
        llm._loop.watch.add(counts)
        outputs = llm.generate(PROMPTS, params)
        llm._loop.watch.remove(counts)
        drafted = [output.outputs[0].token_ids for output in outputs]
        assert_same_tokens(reference, PROMPTS, plain, drafted, params)
        assert counts.num_preempted > 0
        metrics = [output.metrics for output in outputs if output.metrics]
        assert sum(one.num_draft_tokens for one in metrics) == counts.num_drafted
        assert sum(one.num_accepted_tokens for one in metrics) == counts.num_accepted
        assert_nothing_is_held(llm)
        assert counts.num_drafted > 0 or kind == "seeded"
        if isinstance(proposer, Knowing):
            assert 0 < counts.num_accepted < counts.num_drafted


def test_readers_that_leave_between_drafts_leave_no_page(llm: LLM) -> None:  # holds SG5
    plain = one_by_one(llm, KINDS["greedy"])
    set_proposer(llm, Knowing([p + t for p, t in zip(PROMPTS, plain, strict=True)]))
    streams = [llm.stream(prompt, KINDS["greedy"]) for prompt in PROMPTS]
    for number, stream in enumerate(streams):
        for _ in range(2 + number):
            next(stream)
        stream.close()
    assert_nothing_is_held(llm)
