"""The engines of the eSurge tests: a shared one with few pages, compiled ahead, and one with other weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginebay.engine import Pending, StepPlan
from enginebay.model import Model
from enginebay_esurge import eSurge
from enginebay_models.source import CheckpointSource
from tests.unit.esurge.small import GREEDY_ON, OPTIONS, PROMPT, assert_idle, with_


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[eSurge]:
    """Every option but the sizes as documented: all programs are compiled ahead, and none may be later."""
    with eSurge("demo", **OPTIONS) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: eSurge) -> Iterator[eSurge]:
    """The shared one, which must hold nothing when a test is over."""
    yield shared_engine
    assert_idle(shared_engine)


@pytest.fixture
def slow_engine(engine: eSurge, monkeypatch: pytest.MonkeyPatch) -> eSurge:
    """The shared one with steps that take a while, so that a long request is surely under way when a test looks."""
    paged = engine._service.parts.engine
    step = paged.step

    def slow_step(plan: StepPlan) -> Pending:
        time.sleep(0.01)
        return step(plan)

    monkeypatch.setattr(paged, "step", slow_step)
    return engine


class Shrunk(CheckpointSource):
    """The demo model, whose feed-forward weights are nine tenths of what they are."""

    def load_weights(self, model: Model, **how: Any) -> dict[str, Any]:
        return {p: change(p, w) for p, w in super().load_weights(model, **how).items()}


def change(path: str, weight: Any) -> Any:
    return weight * 0.9 if "mlp" in path else weight


@pytest.fixture(scope="session")
def shrink() -> Callable[[eSurge], dict[str, Any]]:
    """Makes the weights that Shrunk has and an engine has not, by path."""

    def shrunk(engine: eSurge) -> dict[str, Any]:
        weights = engine._service.parts.engine.runner.weights
        return {path: change(path, weight) for path, weight in weights.items() if "mlp" in path}

    return shrunk


@pytest.fixture(scope="session")
def shrunk(
    shared_engine: eSurge, shrink: Callable[[eSurge], dict[str, Any]]
) -> Iterator[tuple[eSurge, int, list[int]]]:
    """A fresh engine of Shrunk, not initiated; its end of sequence; and what the shared one says with its weights."""
    shared_engine.update_model_weights(graphstate=shrink(shared_engine))
    tokens = shared_engine.generate(PROMPT, with_(GREEDY_ON, max_tokens=24))[0].outputs[0].token_ids
    shared_engine.update_model_weights("demo")
    end = next(token for i, token in enumerate(tokens[4:], 4) if token not in tokens[:i])
    model = Shrunk("demo")
    options = OPTIONS | {"compile_runner": False, "extra_eos_token_ids": [end]}
    with pytest.raises(ValueError, match="tokenizer"):
        eSurge(model, **options)
    fresh = eSurge(model, model.load_tokenizer().inner, **options)
    yield fresh, end, tokens
    fresh.terminate()
