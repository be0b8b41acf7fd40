"""The requests of a load: from a file, or of words drawn at random, with or without shared
prefixes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.contracts.text import Tokenizer
from enginebay.errors import InputError, shown
from enginebay.json_text import parse_json

_TEXT = """
the of and to in a is that it was for on are as with his they at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will
up other about out many then them these so some her would make like him into time has look two
more write go see number no way could people my than first water been call who oil its now find
long down day did get come made may part over new sound take only little work
"""
WORDS = tuple(_TEXT.split())
"""Short common words, each of which is one token of most vocabularies."""

CHARACTERS_PER_TOKEN = 4
"""Estimates the tokens of an answer in a file where no tokenizer is given."""

FORMATS = (
    'a JSON list or JSONL, with "prompt", "messages" or "conversations" (ShareGPT) in each entry'
)
HUMANS = ("human", "user")


@dataclasses.dataclass(frozen=True)
class PromptSpec:
    """One request: a text or the messages of a chat, and the most tokens of its answer."""

    max_tokens: int
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclasses.dataclass(frozen=True)
class LengthRange:
    """Tokens of generated requests: each length is drawn evenly between (1 - spread) and
    (1 + spread) times its value.
    """

    prompt: int
    new: int
    spread: float = 0.0

    def draw(self, rng: np.random.Generator) -> tuple[int, int]:
        """A length of the prompt and one of the answer."""
        low, high = 1 - self.spread, 1 + self.spread
        prompt, new = (max(1, round(n * rng.uniform(low, high))) for n in (self.prompt, self.new))
        return prompt, new


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """`count` texts of `tokens` tokens each; every request begins with one of them."""

    count: int
    tokens: int


class GeneratedPrompts:
    """Requests of random words. `take` of equal arguments returns equal requests.

    A prompt has as many tokens as asked for if a tokenizer is given, else as many words. The
    server's chat template may add tokens.
    """

    def __init__(
        self,
        lengths: LengthRange,
        seed: int,
        prefixes: Prefixes | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._lengths, self._seed, self._tokenizer = lengths, seed, tokenizer
        rng = np.random.default_rng([seed, 0])
        count, tokens = (prefixes.count, prefixes.tokens) if prefixes is not None else (0, 0)
        self._prefixes = [self._text(rng, tokens) for _ in range(count)]

    def take(self, num_requests: int, point: int) -> list[PromptSpec]:
        """The requests of measurement number `point`, other ones for each number."""
        rng = np.random.default_rng([self._seed, 1, point])
        specs = []
        for _ in range(num_requests):
            prompt_len, new_tokens = self._lengths.draw(rng)
            text = self._text(rng, prompt_len)
            if self._prefixes:
                text = f"{self._prefixes[int(rng.integers(len(self._prefixes)))]} {text}"
            specs.append(PromptSpec(new_tokens, prompt=text))
        return specs

    def _text(self, rng: np.random.Generator, num_tokens: int) -> str:
        words = " ".join(WORDS[int(i)] for i in rng.integers(len(WORDS), size=num_tokens))
        if self._tokenizer is None:
            return words
        ids = self._tokenizer.encode(words, add_special_tokens=False)
        return self._tokenizer.decode(ids[:num_tokens])


class FilePrompts:
    """Requests of a file, in an order that the seed shuffles. Each measurement goes on where the
    one before it ended, and begins again at the end of the file.
    """

    def __init__(self, specs: Sequence[PromptSpec], seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(specs))
        self._specs = itertools.cycle([specs[int(i)] for i in order])
        self.num_in_file = len(specs)

    def take(self, num_requests: int, point: int) -> list[PromptSpec]:
        """The next requests."""
        return list(itertools.islice(self._specs, num_requests))


PromptSource = GeneratedPrompts | FilePrompts


def read_requests(
    path: str, new_tokens: int | None = None, tokenizer: Tokenizer | None = None
) -> list[PromptSpec]:
    """The requests of a file; InputError names the first entry that is none.

    An entry has `prompt` (a text), `messages` (a chat) or `conversations` (ShareGPT: the first
    message of the person is the prompt), and may have `max_tokens`. Else the most tokens are
    `new_tokens`; else, of ShareGPT, the length of the answer in the file: by `tokenizer`, or
    estimated at four characters a token. Entries of ShareGPT without a person's message are left
    out.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--requests {path}: {error}", FORMATS, "Pass a readable file.") from None
    count = _counter(tokenizer)
    specs = []
    for where, entry in _entries(path, text):
        spec = _spec(entry, new_tokens, count)
        if spec is None:
            todo = "Correct the entry." if isinstance(entry, dict) else "Make it an object."
            raise InputError(f"{where}: {shown(entry)}", FORMATS, todo)
        specs += [spec] if spec.max_tokens else []
    if not specs:
        raise InputError(f"--requests {path} without any request", FORMATS, "Pass another file.")
    return specs


def _entries(path: str, text: str) -> Iterator[tuple[str, Any]]:
    """Each entry, and where it is."""
    if text.lstrip().startswith("["):
        for number, entry in enumerate(_parsed(path, text), start=1):
            yield f"entry {number} of {path}", entry
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"line {number} of {path}", _parsed(f"line {number} of {path}", line)


def _parsed(where: str, text: str) -> Any:
    try:
        return parse_json(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _counter(tokenizer: Tokenizer | None) -> Callable[[str], int]:
    def count(text: str) -> int:
        if tokenizer is None:
            return -(-len(text) // CHARACTERS_PER_TOKEN)
        return len(tokenizer.encode(text, add_special_tokens=False))

    return count


def _spec(entry: Any, new_tokens: int | None, count: Callable[[str], int]) -> PromptSpec | None:
    """The request of an entry, with `max_tokens` 0 where it is left out; None when it is none."""
    if not isinstance(entry, dict):
        return None
    max_tokens = entry.get("max_tokens", new_tokens)
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        return None
    turns = entry.get("conversations")
    if isinstance(turns, list) and all(_is_turn(turn) for turn in turns):
        return _first_turn(turns, max_tokens, count)
    if isinstance(entry.get("prompt"), str) and entry["prompt"]:
        return PromptSpec(max_tokens or DEFAULT_NEW_TOKENS, prompt=entry["prompt"])
    messages = entry.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return PromptSpec(max_tokens or DEFAULT_NEW_TOKENS, messages=tuple(messages))
    return None


DEFAULT_NEW_TOKENS = 128
"""Most tokens of an answer where neither the file nor a flag says it."""


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("value"), str)


def _first_turn(
    turns: Sequence[Mapping[str, Any]], max_tokens: int | None, count: Callable[[str], int]
) -> PromptSpec:
    """The first message of a person, and the length of the message after it."""
    for turn, answer in itertools.zip_longest(turns, turns[1:]):
        if turn.get("from") in HUMANS and turn["value"]:
            found = count(answer["value"]) if answer is not None else 0
            return PromptSpec(max_tokens or found, prompt=turn["value"])
    return PromptSpec(0)
