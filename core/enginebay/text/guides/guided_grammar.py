"""Grammars by llguidance: compiled from schemas, regular expressions, choices and Lark texts, and
followed token by token.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from enginebay.contracts.constraint import GrammarLibrary, Vocabulary, num_words
from enginebay.contracts.text import Tokenizer
from enginebay.errors import RequestError, UnsupportedError
from enginebay.grammar import Constraint, Grammar, Structure
from enginebay.text.guides.guided_schema import (
    NUMERIC,
    add_short_numbers,
    move_bounds,
    why_not_enforced,
)

ALLOWED = {
    "json_schema": "a schema with the keywords in docs/guided.md that some value satisfies",
    "json_object": "true",
    "regex": "an expression of Rust's regex crate without look-around",
    "choice": "a list of different texts",
    "grammar": "a grammar in llguidance's variant of Lark that begins with start",
}


_NAME = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//.*|#.*|(<[^<>\s]+>)')
"""Strings, regular expressions and comments of a Lark grammar, in which < names no token, and as
the only group the name of a token.
"""


_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token of one byte."""


class LlguidanceOptions(BaseModel):
    """Limits of llguidance on a grammar and on each step of a request. A request that exceeds a
    limit fails.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_grammar_size: int = Field(
        default=500_000, ge=1, description="max symbols in all productions of a grammar"
    )
    initial_lexer_fuel: int = Field(
        default=1_000_000,
        ge=1,
        description="max work of the lexer, in llguidance's fuel units, to compile a grammar",
    )
    step_lexer_fuel: int = Field(
        default=200_000,
        ge=1,
        description="max work of the lexer on regexes for one mask, in llguidance's fuel units",
    )
    step_max_items: int = Field(
        default=50_000, ge=1, description="max items of the Earley parser for one mask"
    )
    max_items_in_row: int = Field(
        default=2_000, ge=1, description="max items of the Earley parser for one byte of text"
    )
    max_lexer_states: int = Field(
        default=250_000, ge=1, description="max lexer states, 1 to 2 kB each"
    )

    def limits(self) -> llguidance.LLParserLimits:
        """Return the limits in llguidance's own record."""
        return llguidance.LLParserLimits(**self.model_dump(), verbose_errors=False)


DEFAULT_OPTIONS = LlguidanceOptions()

SIGNS = {
    "number of symbols": ("max_grammar_size",),
    "initial lexer configuration": ("initial_lexer_fuel",),
    "checking relevance": ("initial_lexer_fuel",),
    "expressions constructed": ("initial_lexer_fuel", "step_lexer_fuel"),
    "Too many items": ("step_max_items",),
    "items; max is": ("max_items_in_row",),
    "too many states": ("max_lexer_states",),
}
"""Messages of llguidance about exceeded limits, and the options that may set each limit."""


MAX_REASON = 1000
"""Max characters of llguidance's reason in an error: the reason may quote a line of the grammar."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Words:
    """The library's tokenizer, and the bits that a mask may set."""

    tokenizer: llguidance.LLTokenizer
    usable: np.ndarray
    """uint32 [words of the model's vocabulary]."""
    options: LlguidanceOptions

    def named(self, reason: str) -> str:
        """Return a reason of llguidance with the options of the limit that it names."""
        names = next((names for sign, names in SIGNS.items() if sign in reason), ())
        values = " or ".join(f"{name} = {getattr(self.options, name)}" for name in names)
        return f"{reason} (limited by {values})" if names else reason


class Llguidance(GrammarLibrary):
    """llguidance for one tokenizer. Whitespace in JSON is compact, unless a schema says
    otherwise.
    """

    options_model = LlguidanceOptions

    def __init__(
        self, vocabulary: Vocabulary, options: LlguidanceOptions = DEFAULT_OPTIONS
    ) -> None:
        self._vocabulary, self._options = vocabulary, options
        given, self._ids = without_names(_serialised(vocabulary.tokenizer))
        self._words = self._words_of(given)

    def _words_of(self, given: str) -> _Words:
        vocabulary = self._vocabulary
        ends = list(vocabulary.eos_token_ids) or None
        try:
            tokenizer = llguidance.LLTokenizer(given, eos_token=ends)
        except ValueError as error:
            raise UnsupportedError(
                "guided decoding with a tokenizer that llguidance cannot read: "
                f"{_one_line(str(error))}",
                "a tokenizer whose tokens are bytes or strings",
                "Leave the structure out of the request, or use another model.",
            ) from None
        known = np.zeros(num_words(vocabulary.size) * 32, np.uint8)
        known[: min(vocabulary.size, tokenizer.vocab_size)] = 1
        known[[i for i in (*vocabulary.eos_token_ids, *tokenizer.eos_tokens) if i < len(known)]] = 0
        usable = np.packbits(known, bitorder="little").view(np.uint32)
        return _Words(tokenizer, usable, self._options)

    def compile(self, structure: Structure) -> Grammar:
        """Compile a structure. RequestError with llguidance's reason, and for schemas it would only
        partly enforce.
        """
        words = self._words
        try:
            definition = _definition(structure, self._ids)
            matcher = llguidance.LLMatcher(
                words.tokenizer, definition, log_level=0, limits=words.options.limits()
            )
        except (ValueError, RecursionError) as error:
            if isinstance(error, RequestError):
                raise
            raise _refusal(structure, str(error)) from None
        if matcher.is_error():
            raise _refusal(structure, words.named(_first_part(matcher.get_error())))
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise _refusal(structure, "; ".join(warnings))
        first = LlguidanceConstraint(matcher, words)
        try:
            is_empty = first.is_done
            first.try_step()
        except RequestError as error:
            raise _refusal(structure, str(error).partition(". Allowed:")[0]) from None
        if is_empty:
            raise _refusal(structure, "only the empty text matches it")
        return LlguidanceGrammar(first)


class LlguidanceGrammar(Grammar):
    """A matcher at the start of the text, which is copied for each completion."""

    def __init__(self, first: LlguidanceConstraint) -> None:
        self._first = first

    def start(self) -> Constraint:
        """Return a copy of the matcher."""
        return self._first.copy()


class LlguidanceConstraint(Constraint):
    """A matcher, and the mask of its next token once it was requested."""

    def __init__(
        self, matcher: llguidance.LLMatcher, words: _Words, bits: np.ndarray | None = None
    ) -> None:
        self._matcher = matcher
        self._words = words
        self._bits = bits

    def copy(self) -> LlguidanceConstraint:
        """Return an independent copy at the same place of the text."""
        return LlguidanceConstraint(self._matcher.deep_copy(), self._words, self._bits)

    def try_step(self) -> None:
        """Raise RequestError if the first mask, or a step after it, exceeds a limit."""
        tokens = np.flatnonzero(np.unpackbits(self.bits().view(np.uint8), bitorder="little"))
        if len(tokens):
            tried = self.copy()
            tried.accept(int(tokens[0]))
            _ = tried.is_done

    def bits(self) -> np.ndarray:
        """Return the mask; it is computed once per token."""
        if self._bits is None:
            self._bits = self._mask()
        return self._bits

    def accept(self, token_id: int) -> None:
        """Accept a token."""
        self._bits = None
        if not self._matcher.consume_token(token_id):
            raise self._failed(f"disallowed token {token_id}")

    @property
    def may_end(self) -> bool:
        """Whether the text so far matches the grammar."""
        return self._matcher.is_accepting()

    def _mask(self) -> np.ndarray:
        tokenizer, usable = self._words.tokenizer, self._words.usable
        mask = np.zeros((1, num_words(tokenizer.vocab_size)), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, mask)
        if self._matcher.is_error():
            raise self._failed("this text")
        bits = np.zeros_like(usable)
        num = min(len(bits), mask.shape[1])
        bits[:num] = mask[0, :num].view(np.uint32)
        bits &= usable
        if not bits.any() and not self.may_end:
            raise self._failed("a text that no token can continue")
        return bits

    def _failed(self, given: str) -> RequestError:
        reason = self._words.named(_first_part(self._matcher.get_error()))
        return RequestError(
            f"{given} under the grammar of the request" + (f": {reason}" if reason else ""),
            "tokens that the grammar allows, within llguidance's limits",
            "Simplify the grammar, or leave out other options that ban tokens.",
        )


def _definition(structure: Structure, ids: Mapping[str, int]) -> str:
    """Return the grammar in llguidance's format, with `ids` in place of the names of added tokens.
    RequestError for a text that llguidance would misread or only partly enforce.
    """
    text = structure.text
    if structure.form in {"json_schema", "json_object"}:
        schema = json.loads(text)
        reason = why_not_enforced(schema)
        if reason:
            raise _refusal(structure, reason)
        if any(name in text for name in NUMERIC):
            move_bounds(schema)
            add_short_numbers(schema)
            text = json.dumps(schema)
        return llguidance.LLMatcher.grammar_from_json_schema(
            text, {"whitespace_flexible": False}, {"lenient": False, "coerce_one_of": False}
        )
    if structure.form == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if structure.form == "choice":
        # One terminal of all texts: as rules they would be an item of the parser each.
        text = "start: TEXT\nTEXT: " + " | ".join(json.dumps(one) for one in json.loads(text))
    elif text.lstrip().startswith("{"):
        raise _refusal(
            structure, "it is not a Lark text"
        )  # llguidance would read it as a list of grammars
    else:
        text = _NAME.sub(lambda m: f"<[{ids[m[1]]}]>" if m[1] in ids else m[0], text)
    return llguidance.LLMatcher.grammar_from_lark(text)


def _refusal(structure: Structure, reason: str) -> RequestError:
    form, shown = structure.form, _one_line(structure.text)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return RequestError(
        f"{form} = {shown}: {_one_line(reason)[:MAX_REASON]}",
        ALLOWED[form],
        f"Pass a valid {form}, or leave it out.",
    )


def _first_part(error: str) -> str:
    """Return a message of llguidance without the state of its parser."""
    return _one_line(error.partition("<state>")[0].partition("<non-verbose/>")[0])


def _one_line(text: str) -> str:
    return " ".join(text.encode(errors="backslashreplace").decode().split())


def without_names(serialised: str) -> tuple[str, dict[str, int]]:
    """Return a tokenizer whose added tokens with a name, such as <think>, are found in no text, and
    the ids of these tokens by name. A grammar names them by their ids.

    llguidance takes a token as special if it is declared so or is written in <>, and then refuses
    it as text, but still finds it in a text that the grammar forces. With other names, the text is
    spelled by ordinary tokens. Ids do not change.
    """
    settings = json.loads(serialised)
    vocab, ids = settings["model"].get("vocab"), dict[str, int]()
    for token in settings["added_tokens"]:
        old = token["content"]
        is_named = token["special"] or (old.startswith("<") and old.endswith(">"))
        if not is_named or _BYTE.fullmatch(old):
            continue
        ids[old] = token["id"]
        token["content"] = new = f"<\ue000{token['id']}\ue001>"
        if isinstance(vocab, dict) and old in vocab:
            vocab[new] = vocab.pop(old)
        elif isinstance(vocab, list):  # of Unigram: pairs of text and score, by id
            vocab[:] = [[new, pair[1]] if pair[0] == old else pair for pair in vocab]
        if settings["model"].get("unk_token") == old:
            settings["model"]["unk_token"] = new
    return json.dumps(settings), ids


def _serialised(tokenizer: Tokenizer) -> str:
    """Return a fast tokenizer as JSON of the tokenizers library, without truncation and padding."""
    backend: Any = getattr(tokenizer.inner, "backend_tokenizer", None)
    if not hasattr(backend, "to_str"):
        raise UnsupportedError(
            f"guided decoding with a tokenizer of type {type(tokenizer.inner).__name__}",
            "a fast tokenizer of the tokenizers library",
            "Leave the structure out of the request, or use a model with tokenizer.json.",
        )
    return json.dumps(json.loads(backend.to_str()) | {"truncation": None, "padding": None})
