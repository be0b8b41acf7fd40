"""The model of the oEngine tests, opened once, an engine over it, and what LLM says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from enginebay import LLM, SamplingParams
from enginebay_oengine import OpenedModel, oEngine, open_model
from enginebay_testing.reference import ReferenceModel
from tests.pool import EnginePool
from tests.unit.oengine.small import (
    GREEDY,
    MODEL,
    PIECES,
    SEEDED,
    assert_nothing_is_held,
    make_engine,
)

PROMPTS = (
    "Once upon a time",
    "The little fox",
    "A",
    (
        "In the morning, the baker opened the shop and found a very large cat that slept upon the "
        "bread and would not go away, however loud the baker called"
    ),
)

Oracle = Callable[[list[int], SamplingParams], list[int]]


@pytest.fixture(scope="session")
def model() -> OpenedModel:
    """The small model; every engine of these tests shares its weights."""
    return open_model(MODEL)


@pytest.fixture(scope="session")
def shared_engine(model: OpenedModel) -> oEngine:
    """Enough pages for four sequences of the longest."""
    return make_engine(model)


@pytest.fixture
def engine(shared_engine: oEngine) -> Iterator[oEngine]:
    """The shared one, whose pages must all be free when a test is over."""
    yield shared_engine
    shared_engine.init_decode_state()
    assert_nothing_is_held(shared_engine)


@pytest.fixture(scope="session")
def prompts(model: OpenedModel) -> list[list[int]]:
    """Of 4, 3, 1 and 36 tokens: the last is more than a step takes."""
    tokenizer = model.plan.checkpoint.load_tokenizer()
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="session")
def oracle(engine_pool: EnginePool, prompts: list[list[int]]) -> Oracle:
    """The tokens that LLM gives a prompt on the engine "oengine": all that tests ask, asked at
    once.

    In one batch of a prefill and rows that decode together, so that two programs are compiled.
    """
    pieces = [prompts[3][:count] for count in PIECES]
    asked = [(prompt, GREEDY) for prompt in [*prompts, *pieces]] + [
        (prompts[0], hot) for hot in SEEDED
    ]
    sizes = {"max_num_seqs": len(asked), "max_num_batched_tokens": 128}
    with engine_pool.leases(), LLM(engine="oengine", **(MODEL | sizes)) as llm:
        outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    known = {
        f"{prompt} {params}": output.outputs[0].token_ids
        for (prompt, params), output in zip(asked, outputs, strict=True)
    }
    return lambda prompt, params: known[f"{prompt} {params}"]


@pytest.fixture(scope="session")
def reference(model: OpenedModel) -> ReferenceModel:
    """The model without engine, cache or batch."""
    return ReferenceModel(model.plan, dict(model.weights))
