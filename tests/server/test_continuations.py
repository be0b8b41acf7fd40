"""Over HTTP: what a model writes after a prompt keeps its first space, and the first word of an
answer in a chat has none. The tokenizer is one like SentencePiece's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from enginebay_server import routes_anthropic, routes_responses
from enginebay_server.chat import chat_params
from tests.server.in_process_client import Asker
from tests.unit.test_continuations import save_model, sentencepiece_like

if TYPE_CHECKING:
    from enginebay import LLM

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "well"}]
CONTINUES = {"continue_final_message": True, "add_generation_prompt": False}
ONLY = {"allowed_token_ids": [sentencepiece_like().token_to_id("▁wo")], "max_tokens": 2}
CHOICE = {"guided_choice": [" wow"], "max_tokens": 8}


@pytest.fixture(scope="module")
def spaced_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    from enginebay import LLM
    from tests.pool import few_sizes

    folder = tmp_path_factory.mktemp("sentencepiece")
    save_model(folder, sentencepiece_like())
    with few_sizes(), LLM(str(folder), max_model_len=64, max_num_seqs=2) as made:
        yield made


def text_of(choice: dict[str, Any], field: str) -> str:
    """The text of a choice of an answer or an event."""
    found = choice.get("text") or choice.get(field, {}).get("content")
    return found or ""


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (COMPLETIONS, {"prompt": "Hello", **ONLY}, " wo wo"),
        (COMPLETIONS, {"prompt": [278], **ONLY}, " wo wo"),
        (COMPLETIONS, {"prompt": "Hello", **CHOICE}, " wow"),
        (COMPLETIONS, {"prompt": "Hello", "echo": True, **ONLY}, "Hello wo wo"),
        (CHAT, {"messages": HELLO, **ONLY}, "wo wo"),
        (CHAT, {"messages": BEGUN, **CONTINUES, **ONLY}, " wo wo"),
        (CHAT, {"messages": BEGUN, **CONTINUES, **CHOICE}, " wow"),
    ],
)
def test_a_continuation_keeps_its_first_space(
    spaced_llm: LLM, path: str, body: dict[str, Any], text: str
) -> None:
    asker = Asker(spaced_llm)
    assert text_of(asker.ok(path, **body)["choices"][0], "message") == text
    events = asker.events(path, **body)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(text_of(choice, "delta") for choice in choices) == text


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (MESSAGES, {"messages": HELLO, "max_tokens": 2}, "wo wo"),
        (MESSAGES, {"messages": BEGUN, "max_tokens": 2}, " wo wo"),
        (RESPONSES, {"input": HELLO, "max_output_tokens": 2}, "wo wo"),
    ],
)
def test_other_apis_keep_the_first_space_of_a_continuation_alone(
    spaced_llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], text: str
) -> None:
    """Their bodies have no allowed_token_ids, so these are added to what is read of them."""
    for routes in (routes_anthropic, routes_responses):
        monkeypatch.setattr(routes, "chat_params", _only_one_token)
    asker = Asker(spaced_llm)
    whole = asker.ok(path, **body)
    parts = whole["content"] if path == MESSAGES else whole["output"][0]["content"]
    assert [part["text"] for part in parts] == [text]
    answer = asker.post(path, {**body, "stream": True})
    lines = [line for line in answer.text.split("\n") if line.startswith("data: ")]
    deltas = [json.loads(line.removeprefix("data: ")).get("delta", "") for line in lines]
    texts = [one if isinstance(one, str) else one.get("text", "") for one in deltas]
    assert "".join(texts) == text


def _only_one_token(*given: Any) -> Any:
    return chat_params(*given).model_copy(update={"allowed_token_ids": ONLY["allowed_token_ids"]})


def test_the_texts_of_tokens_with_logprobs_are_the_continuation(spaced_llm: LLM) -> None:
    asker = Asker(spaced_llm)
    told = asker.ok(COMPLETIONS, prompt="Hello", logprobs=1, **ONLY)["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == " wo wo"
    assert json.dumps(told["text_offset"]) == "[0, 3]"
