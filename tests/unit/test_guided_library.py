"""The library of grammars is made in worker processes only: reading a large vocabulary takes
seconds, in which no other thread of this process would run.
"""

from __future__ import annotations

import pytest
import tokenizers

from enginebay import SamplingParams
from enginebay.config import make_config
from enginebay.contracts.constraint import Vocabulary
from enginebay.errors import UnsupportedError
from enginebay.text.guides.grammar_child import SerialisedTokenizer
from enginebay.text.guides.grammars import choose_grammars
from enginebay.text.guides.guide import Guides
from enginebay.text.guides.guided_grammar import Llguidance
from enginebay.text.tokenizer import TextTokenizer
from enginebay.text.worker.process import LimitedWorker


def guides_of(backend: tokenizers.Tokenizer) -> Guides:
    """The guide of an engine with this tokenizer."""
    size = backend.get_vocab_size()
    tokenizer = TextTokenizer(SerialisedTokenizer(backend))
    chosen = choose_grammars(make_config({}))
    return chosen(Vocabulary(tokenizer, size, (size - 1,)))


def byte_level() -> tokenizers.Tokenizer:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def test_this_process_makes_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the library was made in the process of the server")

    monkeypatch.setattr(Llguidance, "__init__", refuse)
    backend = byte_level()
    backend.enable_truncation(4)  # of inputs, which no worker may take over
    backend.enable_padding(length=4)
    guides = guides_of(backend)
    try:
        grammar = guides.grammar(SamplingParams(regex="[ab]{4}"))
        assert grammar is not None
        constraint = grammar.start()
        for token_id in backend.encode("abba").ids:
            constraint.accept(token_id)
        assert constraint.is_done
    finally:
        guides.close()


def test_a_tokenizer_that_the_library_cannot_read_is_refused_in_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guides = guides_of(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")))
    says = "guided decoding with a tokenizer that llguidance cannot read: .*Allowed: a tokenizer"
    try:
        with pytest.raises(UnsupportedError, match=says):
            guides.grammar(SamplingParams(regex="a"))
        monkeypatch.setattr(LimitedWorker, "_replace", lambda _: pytest.fail("a second process"))
        with pytest.raises(UnsupportedError, match=says):
            guides.grammar(SamplingParams(regex="b"))
    finally:
        guides.close()
