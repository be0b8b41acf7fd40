"""Reads the vocabulary of a GGUF file: its tokens, their types, and the special ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from enginebay.contracts.model import TokenInfo
from enginebay.errors import CheckpointError, unknown_name
from enginebay_models.gguf.metadata import Metadata
from enginebay_models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

BYTE_PAIRS, BY_SCORES = "gpt2", "llama"
"""The types of vocabularies: merges by rank over bytes, and by the score of the merged token."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Types of tokens."""
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>",
    "<EOT>", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
"""Tokens that end a text in every model that has them, whatever their type says."""
PREFIX = "tokenizer.ggml."


ENDS = ("eos", "eot", "eom")
"""Roles of the tokens that end a text or a turn."""


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of special tokens, None where a file has none, and which of them begin and end a text."""

    bos: int | None
    eos: int | None
    unknown: int | None
    pad: int | None
    adds_bos: bool
    adds_eos: bool


@dataclasses.dataclass(frozen=True)
class GgufVocabulary:
    """The tokens of a file, their types, and the special ones."""

    metadata: Metadata
    model: str
    tokens: Sequence[str]
    types: np.ndarray
    special: SpecialIds

    @property
    def num_token_ids(self) -> int:
        """The number of tokens without padding at the end: llama.cpp's converter names an id of the
        padding [PAD7], and says that it is unused.
        """
        number = len(self.tokens)
        while (
            number
            and self.types[number - 1] == UNUSED
            and self.tokens[number - 1] == f"[PAD{number - 1}]"
        ):
            number -= 1
        return number

    @property
    def token_info(self) -> TokenInfo:
        """The tokens that end a text: those that the file names, and those that always do."""
        found = [self.metadata.get(f"{PREFIX}{role}_token_id") for role in ENDS]
        ids = [one for one in found if isinstance(one, int)]
        if self.special.eos is not None:
            ids.insert(0, self.special.eos)
        ids += [number for number, token in enumerate(self.tokens) if token in _ENDS]
        return TokenInfo(tuple(dict.fromkeys(ids)), self.special.bos, self.special.pad)

    def roles(self) -> dict[str, str]:
        """Return the special tokens by role, as chat templates name them."""
        ids = {"bos": self.special.bos, "eos": self.special.eos, "unk": self.special.unknown,
               "pad": self.special.pad}  # fmt: skip
        return {f"{role}_token": self.tokens[i] for role, i in ids.items() if i is not None}


def read_vocabulary(metadata: Metadata) -> GgufVocabulary:
    """Read the vocabulary of a file. CheckpointError for one that is malformed or of an unsupported
    type.
    """
    model = metadata.text(f"{PREFIX}model")
    if model not in (BYTE_PAIRS, BY_SCORES):
        raise metadata.refused(f"{PREFIX}model", f"{BYTE_PAIRS} or {BY_SCORES}")
    listed = metadata.texts(f"{PREFIX}tokens")
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(listed)]
    if not tokens or len(set(tokens)) < len(tokens):
        raise metadata.refused(f"{PREFIX}tokens", "tokens, each once")
    types = metadata.numbers(f"{PREFIX}token_type", len(tokens))
    types = np.full(len(tokens), NORMAL) if types is None else types.copy()
    for number, token in enumerate(tokens):
        if token in _ENDS:
            types[number] = CONTROL
    return GgufVocabulary(
        metadata, model, tokens, types, _special_ids(metadata, model, len(tokens))
    )


def _special_ids(metadata: Metadata, model: str, size: int) -> SpecialIds:
    usual = {"bos": 1, "eos": 2, "unknown": 0} if model == BY_SCORES else {}

    def read(role: str) -> int | None:
        key = f"{PREFIX}{role}_token_id"
        if metadata.get(key) is None and role not in usual:
            return None
        number = metadata.whole(key, usual.get(role), least=0)
        return number if number < size else None

    for role in ENDS:
        number = metadata.get(f"{PREFIX}{role}_token_id")
        if number is not None and not (isinstance(number, int) and 0 <= number < size):
            allowed = f"0 to {size - 1}, the file's tokens"
            raise metadata.refused(f"{PREFIX}{role}_token_id", allowed)
    by_default = model == BY_SCORES or pre_tokenizer_of(metadata).adds_bos
    special = SpecialIds(
        bos=read("bos"),
        eos=read("eos"),
        unknown=read("unknown"),
        pad=read("padding"),
        adds_bos=metadata.flag(f"{PREFIX}add_bos_token", default=by_default),
        adds_eos=metadata.flag(f"{PREFIX}add_eos_token", default=False),
    )
    for role, number in (("bos", special.bos), ("eos", special.eos)):
        adds_it = special.adds_bos if role == "bos" else special.adds_eos
        if adds_it and number is None:
            raise metadata.refused(f"{PREFIX}{role}_token_id", "the token that it says is added")
    return special


def pre_tokenizer_of(metadata: Metadata) -> PreTokenizer:
    """Return the pre-tokenizer that a file names; CheckpointError for an unsupported one."""
    name = metadata.text(f"{PREFIX}pre", "default")
    if name not in PRE_TOKENIZERS:
        todo = "Choose a file with one of these, or the checkpoint in safetensors."
        raise CheckpointError(
            str(unknown_name(f"pre-tokenizer in {PREFIX}pre:", name, PRE_TOKENIZERS, todo))
        )
    return PRE_TOKENIZERS[name]
