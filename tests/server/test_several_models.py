"""Several models in one process: each is asked for by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.in_process_client import HELLO, Asker

if TYPE_CHECKING:
    from enginebay import LLM

PATH = "/v1/completions"
PROMPT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture
def both(llm: LLM) -> Iterator[tuple[Asker, LLM]]:
    """An application that serves the demo model as "large", and its last two layers as "small"."""
    from enginebay import LLM
    from enginebay_server.app import create_app
    from enginebay_server.served import ServedModel
    from tests.brief import LATE
    from tests.pool import few_sizes
    from tests.server.conftest import SIZES

    with few_sizes(), LLM(LATE, **SIZES) as other:
        models = [ServedModel("large", llm), ServedModel("small", other)]
        for model in models:
            model.warmup = "lazy"
        asker = Asker(llm)
        asker.app = create_app(models)
        asker.state = asker.app.state.server
        yield asker, other


def test_each_model_answers_under_its_name(both: tuple[Asker, LLM]) -> None:
    asker, other = both
    names = [model["id"] for model in asker.get("/v1/models").json()["data"]]
    assert names == ["large", "small"]
    for name, llm in (("large", asker.llm), ("small", other), (None, asker.llm)):
        answer = asker.ok(PATH, model=name, **PROMPT)
        assert answer["model"] == (name or "large")
        [expected] = llm.generate(PROMPT["prompt"], {"max_tokens": 4})
        assert answer["choices"][0]["text"] == expected.get_text()
    error = asker.refused("/v1/chat/completions", 404, model="demo", messages=HELLO)
    assert "large, small" in error["message"]
    text = asker.get("/metrics").text
    for name in ("large", "small"):
        line = f'finished_reason="length",model_name="{name}"}} {2.0 if name == "large" else 1.0}'
        assert line in text
    assert set(asker.get("/explain").json()) == {"large", "small"}


def test_a_server_is_unhealthy_when_one_engine_is_dead(both: tuple[Asker, LLM]) -> None:
    asker, other = both
    other.close()
    health = asker.get("/health")
    assert (health.status_code, health.json()["models"]) == (
        503,
        {"large": "alive", "small": "dead"},
    )
    assert asker.ok(PATH, model="large", **PROMPT)
    assert asker.post(PATH, {"model": "small", **PROMPT}).status_code == 503
