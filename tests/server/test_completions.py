"""/v1/completions: prompts of every form, echo, log-probabilities with offsets, and their
streams.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.in_process_client import Asker, reasons_of, text_of

PATH = "/v1/completions"
TEXT = "Once upon a time"


def text(answer: dict[str, Any]) -> str:
    [choice] = answer["choices"]
    found: str = choice["text"]
    return found


def test_a_prompt_is_continued(asker: Asker) -> None:
    answer = asker.ok(PATH, model="demo", prompt=TEXT)
    [expected] = asker.llm.generate(TEXT, {"max_tokens": 16})[0].outputs
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert text(answer) == expected.text
    assert answer["usage"]["completion_tokens"] == 16  # as many as in OpenAI's API


def test_token_ids_are_a_prompt_as_their_text_is(asker: Asker) -> None:
    ids = asker.llm.tokenizer.encode(TEXT)
    assert text(asker.ok(PATH, prompt=ids)) == text(asker.ok(PATH, prompt=TEXT))


@pytest.mark.parametrize("form", ["texts", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_choices_in_their_order(asker: Asker, form: str, stream: bool) -> None:
    texts = ["The cat", "One day"]
    prompts: list[Any] = (
        [*texts] if form == "texts" else list(map(asker.llm.tokenizer.encode, texts))
    )
    fields: dict[str, Any] = {"prompt": prompts, "n": 2, "temperature": 1.0, "seed": 1}
    alone = [
        choice["text"]
        for prompt in prompts
        for choice in asker.ok(PATH, **{**fields, "prompt": prompt})["choices"]
    ]
    if stream:
        events = asker.events(PATH, **fields)
        assert [text_of(events, index) for index in range(4)] == alone
        assert all(len(reasons_of(events, index)) == 1 for index in range(4))
    else:
        choices = asker.ok(PATH, **fields)["choices"]
        assert [choice["text"] for choice in choices] == alone
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_before_its_completion(asker: Asker, stream: bool) -> None:
    fields: dict[str, Any] = {"prompt": TEXT, "max_tokens": 4, "echo": True}
    expected = TEXT + text(asker.ok(PATH, prompt=TEXT, max_tokens=4))
    found = text_of(asker.events(PATH, **fields)) if stream else text(asker.ok(PATH, **fields))
    assert found == expected


def test_log_probabilities_name_the_place_of_each_token(asker: Asker) -> None:
    fields: dict[str, Any] = {"prompt": TEXT, "max_tokens": 5, "logprobs": 2, "echo": True}
    [choice] = asker.ok(PATH, **fields)["choices"]
    told = choice["logprobs"]
    whole = choice["text"]
    assert "".join(told["tokens"]) == whole
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert whole[offset : offset + len(token)] == token
    num_prompt = len(asker.llm.tokenizer.encode(TEXT))
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert all(value <= 0 for value in told["token_logprobs"][1:])
    assert len(told["tokens"]) == num_prompt + 5
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:])
    events = asker.events(PATH, **fields)
    parts = [c["logprobs"] for event in events for c in event["choices"] if c["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [one for part in parts for one in part[name]] == told[name]


def test_tokens_within_a_character_have_their_own_bytes_and_places(asker: Asker) -> None:
    whole = "客 🫠"
    fields: dict[str, Any] = {"prompt": "Hi", "guided_choice": [whole], "max_tokens": 40}
    [choice] = asker.ok(PATH, **fields, logprobs=2)["choices"]
    told = choice["logprobs"]
    assert choice["text"] == whole
    assert told["tokens"][0] == r"bytes:\xe5"
    assert told["text_offset"] == sorted(told["text_offset"])
    assert {0, 1} <= set(told["text_offset"]) <= {0, 1, 2, 3}
    fields = {**fields, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    del fields["prompt"]
    [choice] = asker.ok("/v1/chat/completions", **fields, top_logprobs=2)["choices"]
    content = [e for e in choice["logprobs"]["content"] if e["token"] != "<|im_end|>"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == whole.encode()
    found = asker.ok("/tokenize", prompt="客", return_token_strs=True)["token_strs"]
    assert found == [r"\xe5", r"\xae", r"\xa2"]


def test_the_prompt_alone_is_scored_without_new_tokens(asker: Asker) -> None:
    answer = asker.ok(PATH, prompt=TEXT, max_tokens=0, echo=True, logprobs=1)
    assert text(answer) == TEXT
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_is_scored(asker: Asker, stream: bool) -> None:
    most = asker.llm.config.max_model_len or 0
    fields = {"prompt": [5] * most, "max_tokens": 0, "echo": True, "logprobs": 1}
    found = asker.events(PATH, **fields) if stream else [asker.ok(PATH, **fields)]
    told = [c["logprobs"]["tokens"] for event in found for c in event["choices"] if c["logprobs"]]
    assert sum(map(len, told)) == most
    usage = asker.ok("/v1/embeddings", input=[5] * most)["usage"]
    assert usage["prompt_tokens"] == most
    error = asker.refused(PATH, 400, **{**fields, "prompt": [5] * (most + 1)})
    assert error["message"].endswith(f"maximum context length is {most} tokens.")


def test_the_likeliest_of_several_is_returned(asker: Asker) -> None:
    fields: dict[str, Any] = {"prompt": TEXT, "temperature": 1.5, "seed": 4, "max_tokens": 6}
    best = text(asker.ok(PATH, **fields, best_of=3))
    expected = asker.llm.generate(TEXT, {**fields_of(fields), "best_of": 3})[0].get_text()
    assert best == expected


def fields_of(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "prompt"}


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "[0-9]{3}"}, {f"{number:03d}" for number in range(1000)}),
        ({"guided_grammar": 'start: "a" | "b"'}, {"a", "b"}),
    ],
)
def test_a_completion_has_the_form_that_was_asked_for(
    asker: Asker, form: dict[str, Any], allowed: set[str]
) -> None:
    assert text(asker.ok(PATH, prompt="Is it late?", **form)) in allowed


def test_a_bias_makes_a_token_certain(asker: Asker) -> None:
    [token_id] = asker.llm.tokenizer.encode(" cat")
    answer = asker.ok(PATH, prompt=TEXT, max_tokens=2, logit_bias={str(token_id): 100})
    assert text(answer) == " cat cat"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_bad_word_is_not_written_and_words_that_contain_it_are(asker: Asker, seed: int) -> None:
    fields: dict[str, Any] = {"prompt": "Once upon a time, there was a", "max_tokens": 80}
    drawn = {**fields, "temperature": 1.3, "seed": seed, "logprobs": 0}
    [free] = asker.ok(PATH, **drawn)["choices"]
    [bound] = asker.ok(PATH, **drawn, bad_words=["the"])["choices"]
    assert {"the", " the"} & set(free["logprobs"]["tokens"])
    assert not {"the", " the"} & set(bound["logprobs"]["tokens"])
    [token_id] = asker.llm.tokenizer.encode(" together")
    certain = {**fields, "max_tokens": 2, "logit_bias": {str(token_id): 100}}
    assert text(asker.ok(PATH, **certain, bad_words=["the"])) == " together together"


def test_embeddings_are_the_pooled_states(asker: Asker) -> None:
    import base64

    import numpy as np

    texts = ["One day", "The cat"]
    expected = asker.llm.embed(texts, normalize=True)
    answer = asker.ok("/v1/embeddings", model="demo", input=texts)
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    for entry, vector in zip(answer["data"], expected, strict=True):
        np.testing.assert_allclose(entry["embedding"], vector, atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == 4
    [entry] = asker.ok("/v1/embeddings", input=texts[0], encoding_format="base64")["data"]
    found = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    np.testing.assert_allclose(found, expected[0], atol=1e-6)
