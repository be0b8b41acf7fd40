"""A server over a model with quantised weights and a quantised cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from enginebay import LLM
from tests.brief import BRIEF
from tests.pool import few_sizes
from tests.server.conftest import SIZES
from tests.server.in_process_client import Asker, text_of

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
TEXTS = ["Once upon a time", "One day", "The cat"]


@pytest.fixture(
    scope="module",
    params=[
        {"kv_cache_dtype": "int8", "quantization": "int8", "activation_quantization": "int8"},
        {"kv_cache_dtype": "uint4", "quantization": "int4"},
    ],
    ids=lambda choices: choices["kv_cache_dtype"],
)
def quantised(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with few_sizes(), LLM(BRIEF, **SIZES, **request.param) as llm:
        yield llm


def test_answers_and_streams_are_the_llms(quantised: LLM) -> None:
    asker = Asker(quantised)
    fields: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 16}
    expected = [
        completion.text
        for text in TEXTS
        for completion in quantised.generate(text, fields)[0].outputs
    ]
    choices = asker.ok(PATH, prompt=TEXTS, **fields)["choices"]
    assert [choice["text"] for choice in choices] == expected
    events = asker.events(PATH, prompt=TEXTS, **fields)
    assert [text_of(events, index) for index in range(len(expected))] == expected
    assert quantised.run_on_engine(lambda: quantised.engine.rows.num_reqs) == 0
