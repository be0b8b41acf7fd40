"""LLM.embed returns pooled final hidden states, whatever else the engine runs meanwhile."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.engine import Pending, StepPlan
from enginebay.contracts.scheduler import Decision, Scheduler, SchedulerView
from enginebay.errors import RequestError
from enginebay.outputs import RequestOutput
from enginebay_testing.reference import ReferenceModel
from tests.brief import TINY
from tests.fake_engine import hidden_of
from tests.unit.serving import DEADLOCK_S, assert_idle

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "generation_config": "none",
}
LENGTHS = (1, 20, 33, 70, 90)
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in LENGTHS]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(
    scope="module", params=["oengine", pytest.param("vinference", marks=pytest.mark.slow)]
)
def llm(request: pytest.FixtureRequest, few_sizes_module: None) -> Iterator[LLM]:
    with LLM(TINY, engine=request.param, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, list[np.ndarray]]:
    reference = ReferenceModel(llm.plan)
    each = [reference.hidden(prompt).astype(np.float64) for prompt in PROMPTS]
    return {"mean": [one.mean(axis=0) for one in each], "last": [one[-1] for one in each]}


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunked_and_batched_prompts_have_the_reference_hidden_states(
    llm: LLM, expected: dict[str, list[np.ndarray]], pooling: Any
) -> None:
    for _ in range(2):  # the second time the cache has the prompts
        embedded = llm.embed(PROMPTS, pooling=pooling)
        for one, other in zip(embedded, expected[pooling], strict=True):
            assert (one.dtype, one.shape) == (np.float32, (llm.plan.model.info.hidden_size,))
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.long
def test_they_run_beside_generation_and_change_none_of_its_tokens(
    llm: LLM, expected: dict[str, list[np.ndarray]]
) -> None:
    alone = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    found: list[list[list[int]]] = []

    def generate() -> None:
        found.append([one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)])

    beside = threading.Thread(target=generate)
    beside.start()
    embedded = llm.embed(PROMPTS[::-1])
    beside.join(timeout=60)
    assert found == [alone]
    for one, other in zip(embedded[::-1], expected["mean"], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert llm.engine.rows.num_reqs == 0


def test_normalized_ones_have_length_one(llm: LLM) -> None:
    [plain], [unit] = llm.embed(PROMPTS[1]), llm.embed(PROMPTS[1], normalize=True)
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain), rtol=1e-6)


@pytest.mark.long
def test_only_the_last_token_of_a_cached_prompt_is_looked_up_in_the_cache(llm: LLM) -> None:
    if llm.config.engine.name != "oengine":
        pytest.skip("slots share no prefix")
    prompt = ((np.arange(80) * 7) % 96).tolist()
    chunks: list[int] = []
    step = llm.engine.step

    def counting(plan: StepPlan) -> Pending:
        chunks.append(sum(row.num_tokens for row in plan.rows))
        return step(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", counting)
        for pooling, num_tokens in (("last", 80), ("last", 16), ("mean", 80)):
            chunks.clear()
            llm.embed(prompt, pooling=pooling)
            assert sum(chunks) == num_tokens


class PreemptsOnce(Scheduler):
    """Another scheduler; the first prompt that is half computed is preempted."""

    def __init__(self, inner: Scheduler) -> None:
        self.inner, self.preempted = inner, ()

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def decide(self, view: SchedulerView, state: Any) -> tuple[Decision, Any]:
        half = tuple(one.request_id for one in view.running if one.num_left)
        if half and not self.preempted:
            self.preempted = half
            return Decision(preempt=half), state
        return self.inner.decide(view, state)


@pytest.mark.long
def test_preempted_in_the_middle_of_a_prompt(
    llm: LLM, expected: dict[str, list[np.ndarray]]
) -> None:
    scheduler = PreemptsOnce(llm.loop.scheduler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.loop, "scheduler", scheduler)
        [found] = llm.embed(PROMPTS[-1])
    assert len(scheduler.preempted) == 1
    np.testing.assert_allclose(found, expected["mean"][-1], atol=1e-5)


def test_wrong_poolings_and_engines_without_programs_are_refused(faked: None) -> None:
    with LLM(TINY, forbid_compiling=True, **SIZES) as llm:
        with pytest.raises(RequestError, match=r"^pooling = 'max'.*'mean' or 'last'"):
            llm.embed(PROMPTS, pooling="max")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"embed\(\) with forbid_compiling.*embeddings = t"):
            llm.embed(PROMPTS)


TEXTS = ["Once upon a time", "A", "In the morning, the baker opened the shop and"]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_embed_and_its_asyncio_twin_pool_the_hidden_states_of_prompts(fake_llm: LLM) -> None:
    ids = [fake_llm.tokenizer.encode(prompt) for prompt in TEXTS]
    states = [hidden_of(np.asarray(one), 0) for one in ids]
    expected = {"mean": [one.mean(axis=0) for one in states], "last": [one[-1] for one in states]}

    async def both(pooling: Any) -> tuple[list[np.ndarray], list[list[int]]]:
        embedded, outputs = await asyncio.gather(
            fake_llm.aembed(TEXTS, pooling=pooling, normalize=pooling == "last"),
            fake_llm.agenerate(TEXTS, GREEDY),
        )
        return embedded, tokens_of(outputs)

    generated = tokens_of(fake_llm.generate(TEXTS, GREEDY))
    pooling: Any
    for pooling, pooled in expected.items():
        embedded, tokens = asyncio.run(asyncio.wait_for(both(pooling), DEADLOCK_S))
        assert tokens == generated
        plain = fake_llm.embed(TEXTS, pooling=pooling)
        for one, alone, right in zip(embedded, plain, pooled, strict=True):
            np.testing.assert_allclose(alone, right, rtol=1e-6)
            length = np.linalg.norm(right) if pooling == "last" else 1.0
            np.testing.assert_allclose(one, right / length, rtol=1e-6)
    with pytest.raises(RequestError, match="pooling = 'max'"):
        asyncio.run(fake_llm.aembed("A", pooling="max"))  # type: ignore[arg-type]


def test_cancelling_aembed_ends_its_requests(fake_llm: LLM) -> None:
    is_going, begun = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        begun.set()
        is_going.wait(DEADLOCK_S)

    async def cancel() -> None:
        task = asyncio.ensure_future(fake_llm.aembed(TEXTS))
        await asyncio.to_thread(begun.wait, DEADLOCK_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_llm.engine, "before_step", hold)
        asyncio.run(cancel())
        assert begun.is_set()
        is_going.set()
    assert_idle(fake_llm)


@pytest.mark.usefixtures("faked")
def test_embed_prints_a_line_for_each_text(
    run: Callable[..., tuple[int, str, str]],
    config: str,
    fake_llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts, flags = ["The fox", "Once upon a time"], ("--config", config)
    means = [one.tolist() for one in fake_llm.embed(texts)]
    code, out, err = run("embed", *texts, *flags)
    assert (code, err) == (0, "")
    assert [[float(x) for x in line.split()] for line in out.splitlines()] == means
    last = fake_llm.embed(texts, pooling="last", normalize=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    more = ("--pooling", "last", "--normalize", "--json", "--mixed-steps", "on")
    code, out, err = run("embed", "-", *more, *flags)
    assert (code, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"prompt": text, "embedding": one.tolist()} for text, one in zip(texts, last, strict=True)
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for nothing in [[], ["-"]]:
        code, out, err = run("embed", *nothing, *flags)
        assert (code, out) == (2, "")
        assert "no text. Allowed: one or more" in err
