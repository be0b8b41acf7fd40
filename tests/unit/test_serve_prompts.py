"""bench serve: requests of files, random words and shared prefixes, and their bodies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from enginebay.errors import InputError
from enginebay_bench.serve.prompts import (
    FilePrompts,
    GeneratedPrompts,
    LengthRange,
    Prefixes,
    PromptSpec,
    read_requests,
)
from enginebay_bench.serve.target import ServerTarget, parse_address
from enginebay_models.tokenizer import load_tokenizer
from tests.brief import BRIEF

CONVERSATION = {
    "id": "a",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "What color is the sky?"},
        {"from": "gpt", "value": "It is blue, I say."},
        {"from": "human", "value": "Why?"},
    ],
}
MESSAGES = [{"role": "user", "content": "Hi"}]


def write(folder: Path, text: str) -> str:
    path = folder / "requests.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def lines(*entries: object) -> str:
    return "\n".join(json.dumps(entry) for entry in entries) + "\n\n"


def test_sharegpt_gives_first_questions_with_the_lengths_of_their_answers(tmp_path: Path) -> None:
    silent = {"conversations": [{"from": "gpt", "value": "Hello."}]}
    path = write(tmp_path, json.dumps([CONVERSATION, silent]))
    (spec,) = read_requests(path)
    assert spec == PromptSpec(5, prompt="What color is the sky?")  # 18 characters
    tokenizer = load_tokenizer(Path(BRIEF))
    wanted = len(tokenizer.encode("It is blue, I say.", add_special_tokens=False))
    assert read_requests(path, tokenizer=tokenizer)[0].max_tokens == wanted
    assert read_requests(path, new_tokens=9)[0].max_tokens == 9


def test_lines_have_prompts_messages_or_conversations(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        lines({"prompt": "a", "max_tokens": 3}, {"messages": MESSAGES}, CONVERSATION),
    )
    first, second, third = read_requests(path, new_tokens=7)
    assert first == PromptSpec(3, prompt="a")
    assert second == PromptSpec(7, messages=tuple(MESSAGES))
    assert third.max_tokens == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lines({"prompt": "a"}, {"question": "b"}), "line 2 of"),
        (lines({"prompt": ""}), "line 1 of"),
        (lines({"prompt": "a", "max_tokens": 0}), "line 1 of"),
        (lines([1]).replace("[1]", "17"), "line 1 of"),
        ('{"prompt": "a"', "line 1 of .* JSON"),
        ('[{"prompt": "a"}, 3]', "entry 2 of"),
        ("", "without any request"),
        (json.dumps([{"conversations": []}]), "without any request"),
    ],
)
def test_other_files_are_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_requests(write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--requests .*none.*Pass a readable file"):
        read_requests(str(tmp_path / "none"))


def test_file_requests_are_shuffled_and_go_on() -> None:
    specs = [PromptSpec(1, prompt=str(n)) for n in range(5)]
    prompts, again = FilePrompts(specs, 4), FilePrompts(specs, 4)
    first, second = prompts.take(3, 0), prompts.take(7, 1)
    assert sorted(str(one.prompt) for one in first + second[:2]) == list("01234")
    assert second[2:] == first + second[:2]
    assert again.take(10, 0) == first + second
    assert FilePrompts(specs, 5).take(5, 0) != again.take(5, 0)


def test_generated_requests_repeat_by_seed_and_differ_by_measurement() -> None:
    lengths = LengthRange(prompt=40, new=20, spread=0.5)
    prompts = GeneratedPrompts(lengths, 1)
    taken = prompts.take(50, 0)
    assert GeneratedPrompts(lengths, 1).take(50, 0) == taken
    assert prompts.take(50, 1) != taken
    assert GeneratedPrompts(lengths, 2).take(50, 0) != taken
    sizes = [len(str(one.prompt).split()) for one in taken]
    assert min(sizes) >= 20
    assert max(sizes) <= 60
    assert len(set(sizes)) > 10
    assert all(10 <= one.max_tokens <= 30 for one in taken)
    fixed = GeneratedPrompts(LengthRange(40, 20), 1).take(9, 0)
    assert {(len(str(one.prompt).split()), one.max_tokens) for one in fixed} == {(40, 20)}


def test_every_request_begins_with_one_of_the_prefixes() -> None:
    taken = GeneratedPrompts(LengthRange(8, 4), 1, Prefixes(3, 30)).take(40, 0)
    words = [str(one.prompt).split() for one in taken]
    assert {len(one) for one in words} == {38}
    assert len({tuple(one[:30]) for one in words}) == 3
    assert len({tuple(one[30:]) for one in words}) == 40


def test_a_tokenizer_makes_prompts_of_exact_length() -> None:
    tokenizer = load_tokenizer(Path(BRIEF))
    (spec,) = GeneratedPrompts(LengthRange(33, 4), 1, None, tokenizer).take(1, 0)
    assert len(tokenizer.encode(str(spec.prompt), add_special_tokens=False)) == 33


def test_bodies_are_those_of_the_endpoint_and_name_no_key() -> None:
    target = ServerTarget("http://h:1", "m", "chat", {"ignore_eos": True, "stream": True}, "secret")
    body = json.loads(target.body(PromptSpec(3, prompt="a")))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert target.headers["authorization"] == "Bearer secret"
    assert "secret" not in repr(target)
    plain = ServerTarget("http://h:1", "m", "completions")
    assert json.loads(plain.body(PromptSpec(3, prompt="a")))["prompt"] == "a"
    assert plain.url == "http://h:1/v1/completions"
    with pytest.raises(InputError, match="Pass --endpoint chat"):
        plain.body(PromptSpec(3, messages=tuple(MESSAGES)))


def test_addresses_are_taken_with_and_without_v1() -> None:
    assert parse_address("http://h:8000/v1/") == parse_address("http://h:8000") == "http://h:8000"
    assert parse_address("https://h/base") == "https://h/base"
    for wrong in ("h:8000", "ftp://h", "http://", "http://h:x", "http://h/?a=1"):
        with pytest.raises(InputError, match="Pass --url"):
            parse_address(wrong)
