"""The model of the oEngine tests, opened once, an engine over it, and what LLM says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from enginebay import LLM, SamplingParams
from enginebay.testing.reference import ReferenceModel
from enginebay_oengine import OpenedModel, oEngine, open_model
from tests.unit.oengine.small import MODEL, assert_nothing_is_held, make_engine

PROMPTS = (
    "Once upon a time",
    "The little fox",
    "A",
    (
        "In the morning, the baker opened the shop and found a very large cat that slept upon the bread and would not go away, "
        "however loud the baker called"
    ),
)

Oracle = Callable[[list[int], SamplingParams], list[int]]


@pytest.fixture(scope="session")
def model() -> OpenedModel:
    """The demo model; every engine of these tests shares its weights."""
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
def oracle() -> Iterator[Oracle]:
    """The tokens that LLM gives a prompt on the engine "oengine"; each answer is kept."""
    known: dict[str, list[int]] = {}
    with LLM(engine="oengine", **MODEL) as llm:

        def answer(prompt: list[int], params: SamplingParams) -> list[int]:
            key = f"{prompt} {params}"
            if key not in known:
                known[key] = llm.generate([prompt], params)[0].outputs[0].token_ids
            return known[key]

        yield answer


@pytest.fixture(scope="session")
def reference(model: OpenedModel) -> ReferenceModel:
    """The model without engine, cache or batch."""
    return ReferenceModel(model.plan, dict(model.weights))
