"""Grammars in the worker process: a library that compiles each structure once, to see what that
takes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from enginebay.constraint import GrammarLibrary, Vocabulary
from enginebay.errors import InputError
from enginebay.grammar import Constraint, Structure
from enginebay.text import Tokenizer

NUM_PATHS, NUM_STEPS = 16, 2
"""Texts that are tried with a new grammar, and their tokens: some grammars compile at once, and
take minutes for their second mask.
"""


class Compiler:
    """Compiles structures with the library and the tokenizer that the settings name; an answer is a
    refusal, or None.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import tokenizers

        inner = SerialisedTokenizer(tokenizers.Tokenizer.from_str(settings["tokenizer"]))
        vocabulary = Vocabulary(
            Tokenizer(inner), settings["size"], tuple(settings["eos_token_ids"])
        )
        made = _named(settings["library"])
        options = settings["options"]
        more = () if options is None else (_named(settings["options_model"])(**options),)
        self._library: GrammarLibrary = made(vocabulary, *more)

    def __call__(self, request: Mapping[str, Any]) -> str | None:
        """Why the library refuses a structure, or None when it is good."""
        try:
            grammar = self._library.compile(Structure(request["form"], request["text"]))
        except InputError as error:
            return str(error)
        for path in range(NUM_PATHS):
            with contextlib.suppress(
                InputError
            ):  # it ends there, which is no matter of what a step takes
                _walk(grammar.start(), path)
        return None


def _walk(constraint: Constraint, path: int) -> None:
    """Some steps, along tokens at this place of NUM_PATHS among those that are allowed."""
    for _ in range(NUM_STEPS):
        token_ids = np.flatnonzero(
            np.unpackbits(constraint.bits().view(np.uint8), bitorder="little")
        )
        if not len(token_ids):
            return
        constraint.accept(int(token_ids[path * len(token_ids) // NUM_PATHS]))


class SerialisedTokenizer:
    """What a library of grammars may use of a tokenizer: the tokenizers library's own."""

    chat_template = None

    def __init__(self, backend: Any) -> None:
        self.backend_tokenizer = backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""
        ids: list[int] = self.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        ).ids
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Ids to text."""
        assert not clean_up_tokenization_spaces
        text: str = self.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )
        return text


def _named(target: str) -> Any:
    module, _, name = target.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
