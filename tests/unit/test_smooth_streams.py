"""Few streams get each token as it is made; batches that do not stream keep their many steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.engine import StepPlan
from enginebay.contracts.scheduler import Limits, RunningView, Scheduler, SchedulerView, WaitingView
from enginebay_schedulers.fair import Fair
from enginebay_schedulers.fcfs import Fcfs
from enginebay_schedulers.prefix_aware import PrefixAware
from enginebay_schedulers.priority import Priority
from enginebay_schedulers.sjf import Sjf
from enginebay_schedulers.static_batch import StaticBatch
from tests.brief import BRIEF
from tests.unit.serving import GREEDY, with_

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32}


def decode_steps(
    scheduler: Scheduler,
    num_streaming: int,
    *,
    chunk_tokens: int = 1,
    num_rows: int = 32,
    waiting: Sequence[WaitingView] = (),
) -> int:
    running = tuple(RunningView(str(i), 10, 0, 50, 0.0) for i in range(num_rows))
    limits = Limits(64, 128, 16, 8, 10_000, chunk_tokens)
    view = SchedulerView(1.0, tuple(waiting), running, limits, num_streaming)
    return scheduler.decide(view, scheduler.initial_state())[0].decode_steps


@pytest.mark.parametrize("make", [Fcfs, Priority, Fair, Sjf, PrefixAware, StaticBatch])
def test_streaming_requests_limit_the_steps_of_every_scheduler(
    make: Callable[[], Scheduler],
) -> None:
    assert [decode_steps(make(), num) for num in (0, 1, 8, 9, 32)] == [16, 1, 1, 2, 4]
    assert [decode_steps(make(), num, chunk_tokens=5) for num in (0, 8, 9, 32)] == [16, 5, 10, 16]


def test_a_newcomer_does_not_make_the_chunks_of_streams_longer() -> None:
    line = [WaitingView("new", 5, 20, 0.0)]
    assert decode_steps(Fcfs(), 1, waiting=line) == 1
    assert decode_steps(Fcfs(), 0, waiting=line) == 4


@contextlib.contextmanager
def launched(llm: LLM) -> Iterator[list[int]]:
    """The numbers of steps of the decodes that are launched within the block."""
    steps: list[int] = []
    step = llm.engine.step

    def spy(plan: StepPlan) -> Any:
        if plan.is_decode:
            steps.append(plan.num_steps)
        return step(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", spy)
        yield steps


@pytest.mark.parametrize("chunk_tokens", [1, 3, 16])
def test_a_stream_of_200_tokens_comes_in_chunks_of_the_bound(
    faked: None, chunk_tokens: int
) -> None:
    with LLM(BRIEF, stream_chunk_tokens=chunk_tokens, processors=(), **SIZES) as llm:
        with launched(llm) as steps:
            expected = llm.generate("Once upon a time", LONG)[0].outputs[0].token_ids
        assert steps == [16] * 12 + [7]
        with launched(llm) as steps:
            chunks = list(llm.stream("Once upon a time", LONG))
        assert [token for chunk in chunks for token in chunk.delta_token_ids] == expected
        assert chunks[-1].finish_reason == "length"
        assert sum(steps) == 199
        assert max(steps) == chunk_tokens


def test_a_batch_beside_a_stream_has_the_same_tokens_and_then_its_many_steps_again(
    faked: None,
) -> None:
    prompts = ["Once upon a time", "The little fox", "A tree"]
    with LLM(BRIEF, processors=(), **SIZES) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, LONG)]
        with launched(llm) as steps:
            stream = llm.stream("There was", with_(LONG, max_tokens=20))
            next(stream)
            beside = [output.outputs[0].token_ids for output in llm.generate(prompts, LONG)]
            assert sum(len(chunk.delta_token_ids) for chunk in stream) <= 19
        assert beside == expected
        assert (min(steps), max(steps)) == (1, 16)


def test_a_real_engine_streams_the_same_tokens_one_by_one(llm: LLM) -> None:
    expected = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    with launched(llm) as steps:
        chunks = list(llm.stream("Once upon a time", GREEDY))
    assert [token for chunk in chunks for token in chunk.delta_token_ids] == expected
    assert set(steps) == {1}
