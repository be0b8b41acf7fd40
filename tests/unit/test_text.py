"""Text given out part by part is the text of the whole; stop texts are found wherever tokens
end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from enginebay.contracts.text import StopChecker, Tokenizer
from enginebay.errors import RequestError, UnsupportedError
from enginebay.text.detokenizer import IncrementalDetokenizer
from enginebay.text.tokenizer import TextTokenizer

CORPUS = [
    "Once upon a time there was a fox.",
    "The fox said hello to the bear, and the bear said hello.",
    "naïve café, 日本語 text 👩‍👩‍👧 end",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no "
    "such role') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% "
    "endif %}"
)
HARD_TEXTS = [
    "plain words, and a fox",
    "  two  spaces\nand lines\n\n",
    "emoji 👩‍👩‍👧‍👦 🇯🇵 👍🏽 and text",
    "combining é ạ̈ नमस्ते",
    "日本語のテキスト",
    "a real replacement mark \ufffd here, and last \ufffd",
    "",
]


@functools.cache
def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer of 300 tokens: most characters beyond ASCII take several."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_special_tokens(
        [AddedToken("<|user|>", special=True), AddedToken("<|assistant|>", special=True)]
    )
    return TextTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>", chat_template=TEMPLATE)
    )


@functools.cache
def byte_fallback() -> Tokenizer:
    """Like SentencePiece's: words begin with a mark for the space, unknown characters are byte
    tokens, the first space is dropped.
    """
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [
        "<end>",
        "▁",
        *"abcdefghijklmnopqrstuvwxyz,.",
        "é",
    ]
    fast = FastTokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    fast.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="always", split=False
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    inner = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>")
    return TextTokenizer(inner)


def in_parts(
    tokenizer: Tokenizer, token_ids: Sequence[int], sizes: Sequence[int], *, skip: bool = True
) -> list[str]:
    """What is given out when `token_ids` come in parts of `sizes`, one by one after those."""
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    parts, start = [], 0
    for size in [*sizes, *[1] * len(token_ids)]:
        parts.append(stream.push(token_ids[start : start + size]))
        start += size
    return [*parts, stream.flush()]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_parts_join_to_the_whole(make: Any, text: str) -> None:
    tokenizer = make()
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(token_ids)
    for sizes in ([], [2] * len(token_ids), [3, 1, 4], [len(token_ids)]):
        parts = in_parts(tokenizer, token_ids, sizes)
        assert "".join(parts) == whole
        assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=20), sizes=st.lists(st.integers(0, 5), max_size=12))
def test_any_text_streams_to_the_same_text(make: Any, text: str, sizes: list[int]) -> None:
    tokenizer = make()
    token_ids = tokenizer.encode(text)
    assert "".join(in_parts(tokenizer, token_ids, sizes)) == tokenizer.decode(token_ids)


@settings(deadline=None, max_examples=100)
@given(
    token_ids=st.lists(st.integers(0, 299), max_size=40),
    sizes=st.lists(st.integers(0, 5), max_size=12),
    skip=st.booleans(),
)
def test_any_byte_level_tokens_stream_to_the_same_text(
    token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    """Valid UTF-8 or not, special tokens skipped or shown."""
    whole = byte_level().decode(token_ids, skip_special_tokens=skip)
    assert "".join(in_parts(byte_level(), token_ids, sizes, skip=skip)) == whole


class CountingTokenizer(TextTokenizer):
    """Counts the tokens that are decoded."""

    def __init__(self) -> None:
        super().__init__(byte_level().inner)
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["words", "broken bytes", "special"])
def test_work_per_token_is_bounded(kind: str) -> None:
    broken = byte_level().encode("é")[0]
    special = byte_level().encode("<end>")[0]
    token_ids = {
        "words": byte_level().encode(" fox bear" * 100),
        "broken bytes": [broken] * 600,
        "special": [special] * 600,
    }[kind]
    tokenizer = CountingTokenizer()
    in_parts(tokenizer, token_ids, [])
    assert (
        tokenizer.num_decoded
        < len(token_ids) * {"words": 5, "broken bytes": 120, "special": 12}[kind]
    )


def test_text_is_not_held_longer_than_needed() -> None:
    stream = IncrementalDetokenizer(byte_level())
    token_ids = byte_level().encode("a fox")
    assert [bool(stream.push([t])) for t in token_ids] == [True] * len(token_ids)
    both = [*byte_level().encode("fox "), *byte_level().encode("🦊")[:-1]]
    assert stream.push(both) == "fox "
    assert stream.push(byte_level().encode("🦊")[-1:]) == "🦊"


def one_shot(text: str, stop: Sequence[str], *, include: bool) -> tuple[str, str | None]:
    """The first stop text that a reader of one character after the other notices."""
    for end in range(1, len(text) + 1):
        met = [s for s in stop if text[:end].endswith(s)]
        if met:
            longest = max(met, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(st.text(alphabet="ab\n", max_size=4), max_size=10),
    stop=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_texts_are_found_wherever_the_stream_is_cut(
    parts: list[str], stop: list[str], include: bool
) -> None:
    checker = StopChecker(stop, include_stop_str_in_output=include)
    wanted, met = one_shot("".join(parts), stop, include=include)
    shown = ""
    for part in parts:
        shown += checker.push(part)
        assert wanted.startswith(shown), "text was shown that the stop text cuts"
    assert (shown + checker.flush(), checker.met) == (wanted, met)


@pytest.mark.parametrize(("include", "wanted"), [(False, "Hello"), (True, "Hello\n\nUser")])
def test_stop_text_over_three_tokens(include: bool, wanted: str) -> None:
    checker = StopChecker(["\n\nUser", "never"], include_stop_str_in_output=include)
    parts = [checker.push(text) for text in ("Hello", "\n", "\nUs", "er: hi", " more")]
    assert parts[:3] == ["Hello", "", ""]
    assert "".join(parts) == wanted
    assert (checker.stopped, checker.met) == (True, "\n\nUser")
    assert checker.flush() == ""


def test_half_a_stop_text_is_shown_at_the_end() -> None:
    checker = StopChecker(["stop"])
    assert checker.push("go sto") == "go "
    assert checker.flush() == "sto"
    assert not checker.stopped


def test_without_stop_texts_nothing_is_held() -> None:
    assert StopChecker([]).push("text") == "text"


def test_chat_template_gives_token_ids() -> None:
    token_ids = byte_level().apply_chat_template([{"role": "user", "content": "hello"}])
    assert byte_level().decode(token_ids, skip_special_tokens=False) == "<|user|>hello<|assistant|>"
    assert byte_level().decode(token_ids) == "hello"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "no messages"),
        ("hello", "messages of type str"),
        (["hello"], "message 0 of type str"),
        ([{"content": "x"}], "role None"),
        ([{"role": "user"}], "message 0 .user. without"),
        ([{"role": "user", "content": 3}], "without a text or list"),
        ([{"role": "robot", "content": "x"}], "refuses: no such role"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        byte_level().apply_chat_template(messages)


def test_missing_chat_template_is_said() -> None:
    assert not byte_fallback().has_chat_template
    with pytest.raises(UnsupportedError, match="without a chat template"):
        byte_fallback().apply_chat_template([{"role": "user", "content": "hello"}])
    own = byte_fallback().apply_chat_template(
        [{"role": "user", "content": "hello"}], chat_template="{{ messages[0].content }}"
    )
    assert byte_fallback().decode(own) == "hello"


@pytest.mark.parametrize("text", [b"bytes", None, "half \ud800 pair"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(RequestError):
        byte_level().encode(text)
