"""Makes the tokenizer of a GGUF file. It gives the token ids that llama.cpp gives with special
tokens of a text parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from enginebay.errors import CheckpointError, shown_text
from enginebay_models.gguf.vocabulary import (
    BYTE_PAIRS,
    CONTROL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    GgufVocabulary,
    pre_tokenizer_of,
)

_SPACE = "▁"
_IS_SPECIAL: Mapping[int, bool] = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
"""Types of tokens that are found in a text before words are, and whether decoding can skip them."""


class GgufTokenizer:
    """The tokenizer of a file. It has the methods of a fast tokenizer of transformers that
    `enginebay.text.tokenizer.TextTokenizer` calls.
    """

    def __init__(self, vocabulary: GgufVocabulary) -> None:
        self.backend_tokenizer = build_tokenizer(vocabulary)
        template = vocabulary.metadata.text("tokenizer.chat_template", "")
        self.chat_template: str | None = template or None
        self.special_tokens_map = vocabulary.roles()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Other threads run meanwhile."""
        # `encode` would hold the GIL for the whole text.
        encode = self.backend_tokenizer.encode_batch_fast
        [found] = encode([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Return the text of token ids. Spaces are never cleaned up."""
        assert not clean_up_tokenization_spaces, "TextTokenizer keeps spaces"
        # `decode` would hold the GIL for the whole text.
        decode = self.backend_tokenizer.decode_batch
        [text] = decode([list(token_ids)], skip_special_tokens=skip_special_tokens)
        found: str = text
        return found


def build_tokenizer(vocabulary: GgufVocabulary) -> Any:
    """Return a Tokenizer of the tokenizers library; CheckpointError for a vocabulary that the
    library refuses.
    """
    try:
        made = _byte_pairs(vocabulary) if vocabulary.model == BYTE_PAIRS else _by_scores(vocabulary)
        made.add_tokens(
            [
                AddedToken(token, special=_IS_SPECIAL[kind], normalized=False)
                for token, kind in zip(vocabulary.tokens, vocabulary.types.tolist(), strict=True)
                if kind in _IS_SPECIAL
            ]
        )
    except CheckpointError:
        raise
    except Exception as error:
        given = f"the vocabulary in {PREFIX}tokens is refused: {shown_text(str(error))}"
        raise CheckpointError(
            given, "tokens and merges that belong together", "Choose another file."
        ) from error
    _add_special_tokens(made, vocabulary)
    return made


def _byte_pairs(vocabulary: GgufVocabulary) -> Any:
    """Return a tokenizer that merges bytes in the order of the file's merges."""
    merges = []
    for line in vocabulary.metadata.texts(f"{PREFIX}merges"):
        at = line.find(" ", 1)
        if at < 0:
            raise vocabulary.metadata.refused(f"{PREFIX}merges", "pairs with a space between them")
        merges.append((line[:at], line[at + 1 :]))
    found = pre_tokenizer_of(vocabulary.metadata)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    model = models.BPE(vocab=ids, merges=merges, ignore_merges=found.ignore_merges)
    made: Any = tokenizers.Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in found.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return made


def _by_scores(vocabulary: GgufVocabulary) -> Any:
    """Return a tokenizer that first merges the pair whose merged token has the highest score."""
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.special.unknown
    model = models.BPE(
        vocab=ids,
        merges=_merges_by_score(vocabulary, ids),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in ids for byte in range(256)),
    )
    prefix = vocabulary.metadata.flag(f"{PREFIX}add_space_prefix", default=True)
    made: Any = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return made


def _merges_by_score(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens whose texts join to a token, the highest score first."""
    scores = vocabulary.metadata.numbers(f"{PREFIX}scores", len(vocabulary.tokens))
    if scores is None:
        raise vocabulary.metadata.refused(f"{PREFIX}scores", "a score for each token")
    found = vocabulary.types.tolist()
    ranked = np.argsort(-scores.astype(np.float64), kind="stable").tolist()
    return [
        (token[:at], token[at:])
        for token in (vocabulary.tokens[n] for n in ranked if found[n] not in (CONTROL, UNKNOWN))
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]


def _add_special_tokens(made: Any, vocabulary: GgufVocabulary) -> None:
    """Let encoding add the begin-of-sequence and end-of-sequence tokens that the file asks for."""
    special = vocabulary.special
    around = [
        {"id": name, "ids": [number], "tokens": [vocabulary.tokens[number]]}
        for name, number, is_added in (
            ("begin", special.bos, special.adds_bos),
            ("end", special.eos, special.adds_eos),
        )
        if is_added and number is not None
    ]
    if not around:
        return
    names = [one["id"] for one in around]
    template = ["$A"]
    if "begin" in names:
        template.insert(0, "begin")
    if "end" in names:
        template.append("end")
    made.post_processor = processors.TemplateProcessing(
        single=template, pair=[*template, "$B"], special_tokens=around
    )
