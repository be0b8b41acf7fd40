"""A lower bound of the tokens of a text: it holds, and a text beyond a limit is not tokenised."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from enginebay.errors import RequestError
from enginebay.text.token_lengths import max_chars_per_token, settings_of
from enginebay.text.tokenizer import TextTokenizer
from enginebay_models.checkpoint import find_folder
from enginebay_models.tokenizer import PlainTokenizer, load_tokenizer

LETTERS = pre_tokenizers.ByteLevel.alphabet()
SPACES = "\u0120" * 8


def byte_level(**parts: Any) -> tokenizers.Tokenizer:
    """A tokenizer of single bytes and of runs of two, four and eight spaces."""
    vocab = {letter: place for place, letter in enumerate(sorted(LETTERS))}
    merges = []
    for size in (1, 2, 4):
        merges.append((SPACES[:size], SPACES[:size]))
        vocab[SPACES[: 2 * size]] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    for name, value in parts.items():
        setattr(made, name, value)
    return made


def byte_fallback(num_bytes: int = 256) -> tokenizers.Tokenizer:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(num_bytes)), "\u2581", "a"]
    vocab = {name: place for place, name in enumerate(names)}
    model = models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made


KNOWN = {
    "bytes": (byte_level(), 8),
    "bytes, composed": (byte_level(normalizer=normalizers.NFC()), 32),
    "fallback": (byte_fallback(), 6),
}
UNKNOWN = {
    "lower case": byte_level(normalizer=normalizers.Lowercase()),
    "a shorter text": byte_level(normalizer=normalizers.Replace("  ", " ")),
    "no spaces": byte_level(pre_tokenizer=pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )),
    "bytes without a token": byte_fallback(200),
    "words": tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
@given(text=st.one_of(st.text(), st.text(" \u0301e\u1100\u1161\u11a8\u03b1\u0345\u0313a")))
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer, most = KNOWN[name]
    assert max_chars_per_token(settings_of(tokenizer)) == most
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert num_tokens * most >= len(text)


def test_a_run_of_spaces_reaches_the_bound() -> None:
    tokenizer, most = KNOWN["bytes"]
    assert len(tokenizer.encode(" " * 8).ids) * most == 8


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tokenizer_that_may_drop_text_has_no_bound(name: str) -> None:
    assert max_chars_per_token(settings_of(UNKNOWN[name])) is None


def test_an_added_token_that_takes_the_spaces_beside_it_has_no_bound() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert max_chars_per_token(settings_of(tokenizer)) is None


class Untouched(PlainTokenizer):
    """The tokenizer of the demo model, which must not tokenise."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        raise AssertionError("tokenised")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    folder = find_folder("demo")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = TextTokenizer(Untouched(folder, config))
    most = max_chars_per_token(settings_of(tokenizer.inner.backend_tokenizer))
    assert most is not None
    text = "a" * (10 * most + 1)
    with pytest.raises(RequestError, match=r"a prompt of at least 11 tokens\. Allowed: at most 10"):
        tokenizer.encode(text, max_prompt_tokens=10)
    with pytest.raises(RequestError, match="at least 1"):
        tokenizer.apply_chat_template([{"role": "user", "content": text}], max_prompt_tokens=10)
    tokenizer.close()
    with pytest.raises(AssertionError, match="tokenised"):
        tokenizer.encode(text[:-1], max_prompt_tokens=10)


def test_a_text_that_may_fit_is_tokenised() -> None:
    tokenizer = load_tokenizer(find_folder("demo"))
    assert len(tokenizer.encode("a b c d", max_prompt_tokens=3)) > 3
