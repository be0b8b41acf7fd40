"""While only a few programs are compiled, steps run in parts or in larger programs, and requests
get the same tokens, log-probabilities and hidden states.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.cache import Lease
from enginebay.contracts.engine import RowPlan, StepPlan
from enginebay.contracts.step_key import StepKey
from enginebay.ops.spec import Bucket
from enginebay_runtime import local
from enginebay_runtime.background import Background
from enginebay_runtime.compiling import StepCompiler, StepSource
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.local import LocalExecutor
from enginebay_runtime.parts_of_step import decode_parts, prefill_parts
from enginebay_runtime.programs import (
    FIRST_TOKENS,
    SEVERAL_ROWS,
    SEVERAL_TOKENS,
    first_steps,
    is_near,
    several_rows,
    several_tokens,
)
from tests.unit.serving import DEADLOCK_S

ENGINES = [pytest.param(name, marks=pytest.mark.long) for name in ("oengine", "vinference")]
PROMPTS = ["Once upon a time", "The snail " * 30, "a", "b c d e f " * 12, "The sun"]


def rows(*sizes: int) -> tuple[RowPlan, ...]:
    """Rows that compute so many tokens after 10 others, and sample."""
    return tuple(RowPlan(i, Lease(i, 64), 10, size, samples=True) for i, size in enumerate(sizes))


@pytest.mark.parametrize("max_rows", [1, 2, 8])
@pytest.mark.parametrize("max_tokens", [1, 7, 16])
def test_parts_of_a_prefill_compute_each_token_once_and_sample_last(
    max_rows: int, max_tokens: int
) -> None:
    plan = StepPlan(rows(5, 40, 1, 16))
    parts = prefill_parts(plan, max_rows, max_tokens)
    computed: dict[int, list[int]] = {place: [] for place in range(4)}
    sampled: list[int] = []
    for part in parts:
        assert len(part.plan.rows) <= max_rows
        assert sum(row.num_tokens for row in part.plan.rows) <= max_tokens
        for place, row in zip(part.places, part.plan.rows, strict=True):
            assert place not in sampled, "nothing of a row comes after its sample"
            first = row.num_computed
            computed[place] += range(first, first + row.num_tokens)
            sampled += [place] * row.samples
    assert computed == {i: list(range(10, 10 + row.num_tokens)) for i, row in enumerate(plan.rows)}
    assert sampled == [0, 1, 2, 3]


def test_parts_of_a_decode_have_each_row_once() -> None:
    plan = StepPlan(rows(1, 1, 1, 1, 1), num_steps=4)
    parts = decode_parts(plan, 2)
    assert [part.places for part in parts] == [(0, 1), (2, 3), (4,)]
    assert {part.plan.num_steps for part in parts} == {4}


def test_what_is_left_is_split_again_when_no_program_is_near_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = StepPlan(rows(1, 1, 1, 1, 1, 1), num_steps=4)
    # Its products do not skip padding, so there is a size for two rows.
    kernels = {"linear": "xla"}
    with LLM("demo", max_num_seqs=8, max_model_len=64, dtype="float32", kernels=kernels) as llm:
        engine = llm.engine
        assert isinstance(engine, StepEngine)
        able = {1, 4}
        monkeypatch.setattr(engine.executor, "serves", lambda key: key.bucket.seqs in able)
        parts = engine._parts(plan)
        assert [part.places for part in parts] == [(0, 1, 2, 3), (4,), (5,)]
        assert [part.plan.rows[-1].row for part in parts] == [3, 4, 5]


def test_a_step_that_is_there_already_is_counted(both: tuple[LLM, LLM]) -> None:
    executor = both[1].engine.executor
    assert isinstance(executor, LocalExecutor)
    compiler = StepCompiler(StepSource.of(executor), executor._programs)
    for key in executor.programs:
        if not compiler.missing([key]):
            counted: list[StepKey] = []
            compiler.make_missing(key, counted.append)
            assert counted == [key]


def test_the_executor_is_busy_while_a_step_runs_and_a_moment_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tokens:
        is_there = False

        def is_deleted(self) -> bool:
            return False

        def is_ready(self) -> bool:
            return self.is_there

    owner: Any = SimpleNamespace(_launched=None, _launched_s=-math.inf)
    assert not LocalExecutor._is_busy(owner)
    owner._launched_s = math.inf
    assert LocalExecutor._is_busy(owner), "its program has not returned"
    owner._launched, owner._launched_s = Tokens(), -math.inf
    assert LocalExecutor._is_busy(owner), "a long step"
    owner._launched.is_there = True
    assert not LocalExecutor._is_busy(owner)
    owner._launched_s = time.monotonic()
    monkeypatch.setattr(local, "BUSY_S", DEADLOCK_S)
    assert LocalExecutor._is_busy(owner), "others are expected"


def test_a_program_of_many_rows_serves_no_small_batch() -> None:
    def decode(seqs: int) -> StepKey:
        return StepKey("decode", Bucket(seqs, seqs, 8, 1, 512, "decode"))

    def prefill(tokens: int) -> StepKey:
        return StepKey("prefill", Bucket(tokens, 4, 8, tokens, 512, "mixed"))

    assert is_near(decode(32), decode(8))
    assert not is_near(decode(32), decode(4))
    assert is_near(prefill(FIRST_TOKENS), prefill(16))
    assert is_near(prefill(1024), prefill(512))
    assert not is_near(prefill(1024), prefill(256))
    keys = [*map(decode, (1, 2, 4, 8, 16, 32)), prefill(512)]
    assert several_rows(keys) == [decode(8)]
    assert several_rows([decode(1), decode(4)]) == []
    free = SEVERAL_ROWS
    assert is_near(decode(8), decode(1), free)
    assert not is_near(decode(8), decode(1), free - 1)
    assert not is_near(decode(16), decode(1), free)
    assert first_steps(keys, free)[:1] == [decode(8)]
    assert first_steps(keys, free - 1)[:1] == [decode(1)]
    assert first_steps([decode(1), decode(4)], free) == [decode(4)]
    prefills = [prefill(n) for n in (FIRST_TOKENS, 256, SEVERAL_TOKENS, 1024)]
    assert several_tokens([*prefills, decode(8)], SEVERAL_TOKENS) == [prefill(SEVERAL_TOKENS)]
    assert several_tokens(prefills, SEVERAL_TOKENS - 1) == []
    assert several_tokens(prefills[:1], SEVERAL_TOKENS) == []
    assert is_near(prefill(SEVERAL_TOKENS), prefill(16), SEVERAL_TOKENS)
    assert not is_near(prefill(SEVERAL_TOKENS), prefill(16), SEVERAL_TOKENS - 1)
    assert first_steps([decode(16), decode(32)], free) == [decode(16)]


def test_the_first_steps_are_few_and_of_each_kind() -> None:
    def prefill(tokens: int, seqs: int, mode: Any) -> StepKey:
        return StepKey("prefill", Bucket(tokens, seqs, 8, tokens, 512, mode))

    def decode(seqs: int, kv_len: int, *, whole: bool = False) -> StepKey:
        bucket = Bucket(seqs, seqs, 8, 1, kv_len, "decode", rows_are_pages=whole)
        return StepKey("decode" if whole else "compact", bucket)

    prefills = [
        prefill(tokens, seqs, mode)
        for tokens in (16, 64, 256, 1024)
        for seqs in (1, 4)
        for mode in ("prefill", "mixed")
    ]
    decodes = [decode(n, kv) for n in (1, 2, 4) for kv in (256, 512)]
    wanted = [prefill(64, 4, "mixed"), decode(1, 512)]
    assert first_steps([*prefills, *decodes, decode(4, 512, whole=True)]) == wanted
    assert first_steps([prefill(1024, 4, "mixed"), prefill(512, 4, "mixed")]) == [
        prefill(512, 4, "mixed")
    ], f"none has {FIRST_TOKENS} tokens or fewer"
    alone = [decode(1, 256), decode(1, 512, whole=True)]
    assert first_steps(alone) == alone, "a row of full length has a program of its own"
    whole = decode(4, 512, whole=True)  # it stands in for no step of fewer rows
    assert first_steps([decode(1, 512), whole], SEVERAL_ROWS) == [decode(1, 512)]
    assert first_steps([whole], SEVERAL_ROWS) == [whole]


@pytest.fixture(scope="module", params=ENGINES)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LLM]]:
    """An LLM that compiles each program when it is needed, and one with the first programs only."""
    sizes: dict[str, Any] = {
        "engine": request.param,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "dtype": "float32",
        "embeddings": True,
        "full_vocab_logprobs": True,
    }
    with LLM("demo", **sizes) as usual, LLM("demo", **sizes, forbid_compiling=True) as first:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Background, "start", lambda _: None)
            assert first.warmup(background=True) > 0
        yield usual, first


def results(llm: LLM) -> list[Any]:
    """Tokens of greedy, sampled and biased requests, five at a time."""
    greedy = SamplingParams(max_tokens=9, temperature=0, logprobs=3)
    hot = [SamplingParams(max_tokens=12, temperature=1.0, seed=i) for i in range(len(PROMPTS))]
    found: list[Any] = []
    for params in (greedy, hot, SamplingParams(max_tokens=5, temperature=0, logit_bias={5: 2.0})):
        outputs = llm.generate(PROMPTS, params)
        found += [o.outputs[0].token_ids for o in outputs]
    return found


def test_requests_get_the_same_from_the_first_programs(both: tuple[LLM, LLM]) -> None:
    usual, first = both
    executor = first.engine.executor
    assert isinstance(executor, LocalExecutor)
    before = set(executor.programs)
    assert len({key.kind for key in before}) == 2
    assert results(first) == results(usual)
    assert set(executor.programs) == before, "nothing was compiled for them"


def test_it_is_known_which_steps_stand_in_and_which_come(both: tuple[LLM, LLM]) -> None:
    _, llm = both
    found = llm.engine.compilations
    first, later = llm.engine.warmup_steps()
    assert set(found.coming) == set(later)
    found.stand_ins.clear()
    llm.generate(PROMPTS, SamplingParams(max_tokens=3, temperature=0))
    there = {key.bucket for key in first}
    assert {ran.bucket for _, ran in found.stand_ins} <= there
    steps = {step.bucket for step, _ in found.stand_ins}
    assert {step.mode for step in steps} >= {"decode"}
    assert not steps & there, "a step whose program is there needs no other"
    found.stand_ins.clear()
    (at_once,) = {bucket.seqs for bucket in there if bucket.mode == "decode"}
    llm.generate(["a"] * at_once, SamplingParams(max_tokens=3, temperature=0))
    assert not [step for step, _ in found.stand_ins if step.kind != "prefill"]


def test_a_program_that_cannot_be_compiled_no_longer_comes(
    both: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = both[1].engine.executor
    assert isinstance(executor, LocalExecutor)
    first, later = both[1].engine.warmup_steps()
    tried: list[StepKey] = []

    def cannot(self: StepCompiler, key: StepKey, *_: Any) -> None:
        tried.append(key)
        raise MemoryError("no room for its program")

    monkeypatch.setattr(StepCompiler, "make_missing", cannot)
    # Other tests use the same LLM, whose own jobs have not run.
    monkeypatch.setattr(executor, "_background", executor._background)
    background = executor.compile_first_steps([*first, *later])
    assert executor.compilations.coming
    background._run_jobs(threading.Event())  # the fixture lets no thread start
    assert set(tried) >= set(later), "one that fails does not keep the others from being compiled"
    assert executor.compilations.coming == ()
    assert "no room for its program" in caplog.text


def test_hidden_states_and_prompt_logprobs_of_parts_are_joined(both: tuple[LLM, LLM]) -> None:
    usual, first = both
    texts = ["The snail " * 40, "a cat"]
    for pooling in ("mean", "last"):
        wanted, got = (llm.embed(texts, pooling=pooling) for llm in both)
        for one, other in zip(wanted, got, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    wanted, got = (llm.generate(texts, params) for llm in (usual, first))
    for one, other in zip(wanted, got, strict=True):
        pairs = zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True)
        each = [(a, b) for a, b in pairs if a is not None and b is not None]
        assert len(each) == len(one.prompt_token_ids) - 1
        for a, b in each:
            assert a.keys() == b.keys()
            np.testing.assert_allclose(list(a.values()), [b[k] for k in a], rtol=1e-4, atol=1e-4)
