"""LangChain and LiteLLM, whose answers are those of OpenAI's client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.clients.conftest import KEY, run_script
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from enginebay import LLM

Answer = Callable[..., Any]
PAINT = ["paint", {"color": "red"}]
EMBEDDED = ["One day", "The cat"]


@pytest.fixture(scope="module")
def langchain(server: ServerProcess) -> dict[str, Any]:
    return run_script("langchain", server.url, KEY)


@pytest.fixture(scope="module")
def litellm(server: ServerProcess) -> dict[str, Any]:
    return run_script("litellm", server.url, KEY)


def text(whole: Any) -> str:
    found: str = whole.choices[0].message.content
    return found


def completion(llm: LLM) -> str:
    return llm.generate("One day", {"max_tokens": 8})[0].outputs[0].text


def check_logprobs(found: list[float], answer: Answer) -> None:
    told = answer(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert found == pytest.approx([entry.logprob for entry in told], abs=1e-4)


def test_langchains_answers_are_the_servers(langchain: dict[str, Any], answer: Answer) -> None:
    whole = answer()
    assert langchain["chat"] == langchain["streamed"] == text(whole)
    assert langchain["asynchronous"] == [text(whole)] * 2
    assert langchain["batch"] == [text(whole), text(answer("Why?"))]
    assert langchain["response"] == langchain["response_stream"] == text(whole)
    assert langchain["finish_reason"] == whole.choices[0].finish_reason
    for usage in (langchain["usage"], langchain["stream_usage"]):
        assert usage["input_tokens"] == whole.usage.prompt_tokens
        assert usage["output_tokens"] == whole.usage.completion_tokens
    check_logprobs(langchain["logprobs"], answer)


def test_langchains_tools_are_called(langchain: dict[str, Any]) -> None:
    assert langchain["chosen"] == [PAINT]
    for name in ("demanded", "demanded_stream", "named"):
        [[tool, arguments]] = langchain[name]
        assert (tool, arguments["color"] in ("red", "blue")) == ("paint", True)
    assert langchain["demanded"] == langchain["demanded_stream"]
    assert langchain["after_tool"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "strict"])
def test_langchain_gets_structured_output(langchain: dict[str, Any], method: str) -> None:
    assert langchain[method]["kind"] in ("sun", "rain")


def test_langchain_completes_and_embeds(langchain: dict[str, Any], llm: LLM) -> None:
    assert langchain["completion"] == completion(llm)
    expected = llm.embed(EMBEDDED[:1], normalize=True)[0]
    np.testing.assert_allclose(langchain["embedding"], expected, atol=1e-5)


def test_langchains_errors_are_classes_of_its_own(langchain: dict[str, Any]) -> None:
    assert langchain["errors"] == {
        "key": ["OpenAIAuthenticationError", 401],
        "model": ["OpenAIModelNotFoundError", 404],
        "field": ["OpenAIInvalidRequestError", 400],
        "length": ["OpenAIContextOverflowError", 400],
    }


def test_litellms_answers_are_the_servers(
    litellm: dict[str, Any], answer: Answer, llm: LLM
) -> None:
    whole = answer()
    for name in ("chat", "hosted", "streamed", "rebuilt", "asynchronous", "response"):
        assert litellm[name] == text(whole), name
    assert litellm["usage"] == {
        "prompt_tokens": whole.usage.prompt_tokens,
        "completion_tokens": whole.usage.completion_tokens,
    }
    assert litellm["stream_usage"] == [whole.usage.total_tokens]
    assert litellm["finish_reason"] == whole.choices[0].finish_reason
    several = answer(n=2, temperature=1.0, seed=3).choices
    assert litellm["several"] == [choice.message.content for choice in several]
    assert litellm["completion"] == litellm["completion_stream"] == completion(llm)
    check_logprobs(litellm["logprobs"], answer)


def test_litellms_tools_and_forms_are_followed(litellm: dict[str, Any]) -> None:
    assert litellm["chosen"] == [["set_age", {"age": 7}]]
    [[name, arguments]] = litellm["demanded"]
    assert (name, set(arguments)) == ("set_age", {"age"})
    assert litellm["demanded_stream"] == litellm["demanded"]
    assert 0 <= litellm["json"]["age"] <= 9


def test_litellms_embeddings_are_the_models(litellm: dict[str, Any], llm: LLM) -> None:
    np.testing.assert_allclose(litellm["embedding"], llm.embed(EMBEDDED, normalize=True), atol=1e-5)


def test_litellms_errors_are_classes_of_its_own(litellm: dict[str, Any]) -> None:
    assert litellm["errors"] == {
        "key": ["AuthenticationError", 401],
        "model": ["NotFoundError", 404],
        "field": ["BadRequestError", 400],
        "length": ["ContextWindowExceededError", 400],
    }
