"""How a vocabulary of type gpt2 cuts a text into words: the name in `tokenizer.ggml.pre`, and the
patterns that it stands for in llama.cpp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_words(digits: str, contraction: str = f"{_CONTRACTION}|") -> str:
    """Return the pattern of Llama 3 and of those like it, which differ in the digits of a word."""
    return (
        rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"
    )


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """The patterns, each of which cuts the pieces of the one before.

    ignore_merges: a word that is a token is not merged from parts. adds_bos: a begin-of-sequence
    token is added unless `tokenizer.ggml.add_bos_token` decides.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = PreTokenizer((_by_words(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_by_words(r"\p{N}"),))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_WORDS = PreTokenizer((_GPT2,))
_UPPER, _LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer(_LLAMA3.patterns)),
    "glm4": PreTokenizer(_LLAMA3.patterns, ignore_merges=True),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open",
         "grok-2"),
        _QWEN2,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _SINGLE_DIGITS,
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat", "mellum"),
        _WORDS,
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
    ),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
}  # fmt: skip
"""Name -> pre-tokenizer, of those that the served architectures have."""
