"""Grammars in worker processes: one process compiles each structure to find out its cost, another
one follows constraints and computes their masks.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from enginebay.contracts.constraint import GrammarLibrary, Vocabulary
from enginebay.errors import InputError, explain
from enginebay.grammar import Constraint, Grammar, Structure
from enginebay.text.guides.mask_messages import Answer, Mask, pack_answers, unpack_orders
from enginebay.text.tokenizer import TextTokenizer

NUM_PATHS, NUM_STEPS = 16, 2
"""Number of texts that a new grammar is tried with, and tokens per text: some grammars compile at
once but need minutes for their second mask.
"""


MAX_GRAMMARS = 64
"""Max compiled grammars that the following process keeps."""


class Compiler:
    """Compiles structures with the library and the tokenizer in the settings; an answer is a
    refusal or the first mask.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._library = _library(settings)

    def __call__(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return why the library refuses a structure, or the first mask of a valid one."""
        try:
            grammar = self._library.compile(Structure(request["form"], request["text"]))
            first = _mask(grammar.start()).as_json()
        except InputError as error:
            return {"refused": str(error)}
        for path in range(NUM_PATHS):
            with contextlib.suppress(
                InputError
            ):  # the text ends here, which says nothing about the cost of a step
                _walk(grammar.start(), path)
        return first


class Follower:
    """Keeps constraints by key. An answer has one part per order: the mask after the order's
    tokens, a refusal, or None for an unknown constraint.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._library = _library(settings)
        self._grammars: collections.OrderedDict[Structure, Grammar] = collections.OrderedDict()
        self._constraints: dict[int, Constraint] = {}

    def __call__(self, request: Mapping[str, Any]) -> list[dict[str, Any] | None]:
        """Forget the dropped constraints, and carry out all orders."""
        self._forget(request["dropped"])
        found = [
            self._carry_out(order["key"], order["token_ids"], order.get("structure"))
            for order in request["orders"]
        ]
        return [
            {"refused": answer} if isinstance(answer, str) else answer.as_json() if answer else None
            for answer in found
        ]

    def answer_bytes(self, content: bytes) -> bytes:
        """Carry out orders of one token each for known constraints, in the binary format."""
        dropped, orders = unpack_orders(content)
        self._forget(dropped)
        return pack_answers([self._carry_out(key, (token_id,), None) for key, token_id in orders])

    def _forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._constraints.pop(key, None)

    def _carry_out(
        self, key: int, token_ids: Iterable[int], structure: Mapping[str, Any] | None
    ) -> Answer:
        try:
            if structure is not None:
                self._constraints[key] = self._grammar(structure).start()
            constraint = self._constraints.get(key)
            if constraint is None:
                return None
            for token_id in token_ids:
                constraint.accept(token_id)
            return _mask(constraint)
        except (MemoryError, RecursionError):
            raise  # exceeded limits of the process
        except InputError as error:
            return str(error)
        except BaseException as error:  # noqa: BLE001  # a Rust panic must end only one request
            why = f"a constraint with which the library fails: {type(error).__name__}: {error}"
            return explain(
                why, "a constraint that the library can follow", "Simplify the constraint."
            )

    def _grammar(self, structure: Mapping[str, Any]) -> Grammar:
        wanted = Structure(structure["form"], structure["text"])
        if wanted not in self._grammars:
            self._grammars[wanted] = self._library.compile(wanted)
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(wanted)
        return self._grammars[wanted]


def _library(settings: Mapping[str, Any]) -> GrammarLibrary:
    """Make the library for the tokenizer in the settings."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(settings["tokenizer"])
    backend.no_truncation()
    backend.no_padding()
    tokenizer = TextTokenizer(SerialisedTokenizer(backend))
    vocabulary = Vocabulary(tokenizer, settings["size"], tuple(settings["eos_token_ids"]))
    made = _named(settings["library"])
    options = settings["options"]
    more = () if options is None else (made.options_model(**options),)
    library: GrammarLibrary = made(vocabulary, *more)
    return library


def _mask(constraint: Constraint) -> Mask:
    bits = np.ascontiguousarray(constraint.bits(), np.uint32)
    return Mask(bits, bool(constraint.may_end), bool(constraint.is_done))


def _walk(constraint: Constraint, path: int) -> None:
    """Take some steps along one of NUM_PATHS texts: its number chooses among the allowed tokens."""
    for _ in range(NUM_STEPS):
        token_ids = np.flatnonzero(
            np.unpackbits(constraint.bits().view(np.uint8), bitorder="little")
        )
        if not len(token_ids):
            return
        constraint.accept(int(token_ids[path * len(token_ids) // NUM_PATHS]))


class SerialisedTokenizer:
    """The part of a tokenizer that grammar libraries may use; runs on the tokenizers library."""

    chat_template = None

    def __init__(self, backend: Any) -> None:
        self.backend_tokenizer = backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Convert text to ids."""
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
        """Convert ids to text."""
        assert not clean_up_tokenization_spaces
        text: str = self.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )
        return text


def _named(target: str) -> Any:
    module, _, name = target.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
