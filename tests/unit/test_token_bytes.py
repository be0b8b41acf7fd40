"""The bytes of tokens, joined, are the bytes of the text: also of tokens within a character, and
of first spaces.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from enginebay.contracts.text import Tokenizer
from enginebay.text.token_bytes import TokenBytes, shown_bytes
from enginebay.text.tokenizer import TextTokenizer
from enginebay_server.logprobs import CompletionLogprobs, chat_logprobs
from tests.unit.test_continuations import sentencepiece_like
from tests.unit.test_text import HARD_TEXTS, byte_fallback, byte_level


def llama_2() -> Tokenizer:
    return TextTokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=sentencepiece_like(), eos_token="</s>", bos_token="<s>"
        )
    )


def word_pieces() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["[UNK]", "a", "fox", "##es", "run"])}
    fast = FastTokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece(cleanup=False)
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


TEXTS = [(make, text) for make in (byte_level, byte_fallback, llama_2) for text in HARD_TEXTS]


@pytest.mark.parametrize(("make", "text"), [*TEXTS, (word_pieces, "a fox runes foxes")])
def test_joined_bytes_are_the_text(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    each = TokenBytes(tokenizer).of_each(ids, begins_text=True)
    assert b"".join(found for found, _ in each).decode() == tokenizer.decode(
        ids, skip_special_tokens=False
    )


def test_a_token_within_a_character_has_its_own_bytes() -> None:
    tokenizer, text = byte_level(), "客 🫠"
    ids = tokenizer.encode(text)
    told = [{token_id: -1.0, 0: -2.0} for token_id in ids]
    entries = chat_logprobs(ids, told, 1, TokenBytes(tokenizer))
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
    assert entries[0]["token"] == r"\xe5"
    assert entries[0]["bytes"] == entries[0]["top_logprobs"][0]["bytes"] == [0xE5]
    record = CompletionLogprobs(1, TokenBytes(tokenizer)).record(ids, told)
    assert record["tokens"][:3] == [r"bytes:\xe5", r"bytes:\xae", r"bytes:\xa2"]
    assert record["text_offset"][:4] == [0, 0, 0, 1]
    assert max(record["text_offset"]) < len(text)


def test_different_tokens_of_one_text_are_not_merged() -> None:
    tokenizer = byte_fallback()
    letter, byte = (tokenizer.inner.convert_tokens_to_ids(name) for name in ("a", "<0x61>"))
    told = [{letter: -1.0, byte: -2.0}]
    record = CompletionLogprobs(2, TokenBytes(tokenizer)).record([letter], told)
    assert record["top_logprobs"] == [{"a": -1.0, f"token_id:{byte}": -2.0}]
    within = [tokenizer.inner.convert_tokens_to_ids(f"<0x{b}>") for b in ("E5", "E6")]
    told = [dict.fromkeys(within, -1.0)]
    record = CompletionLogprobs(2, TokenBytes(tokenizer)).record(within[:1], told)
    assert record["top_logprobs"] == [{r"bytes:\xe5": -1.0, r"bytes:\xe6": -1.0}]


def test_special_tokens_have_no_place_in_the_text() -> None:
    tokenizer = llama_2()
    ids = [1, *tokenizer.encode("hi", add_special_tokens=False), 2]
    told = [{token_id: -1.0} for token_id in ids]
    record = CompletionLogprobs(0, TokenBytes(tokenizer), begins_text=True).record(ids, told)
    assert record["tokens"] == ["<s>", "", "h", "i", "</s>"]
    assert record["text_offset"] == [0, 0, 0, 1, 2]
    shown = CompletionLogprobs(0, TokenBytes(tokenizer), begins_text=True, skips_special=False)
    assert shown.record(ids, told)["text_offset"] == [0, 3, 3, 4, 5]


def test_the_first_space_is_that_of_a_continuation() -> None:
    tokenizer = llama_2()
    ids = [sentencepiece_like().token_to_id("▁wo")]
    told = [{ids[0]: -1.0}]
    for begins, right in ((True, "wo"), (False, " wo")):
        entries = chat_logprobs(ids, told, 0, TokenBytes(tokenizer), begins_text=begins)
        assert entries[0]["token"] == right
        assert bytes(entries[0]["bytes"]).decode() == right


def test_ids_without_a_token_have_no_bytes() -> None:
    assert TokenBytes(byte_level()).of(10**6) == b""
    assert shown_bytes(b" \xe5a") == r" \xe5a"
