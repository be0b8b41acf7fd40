"""How few tokens a text can have, which is known without tokenising it."""

from __future__ import annotations

import json
from typing import Any, Final

from enginebay.text.token_bytes import Part, pipeline_of

NFC_CHARS: Final = 4
"""Max characters that the normalisation NFC makes one character of."""

KEEPING: Final = frozenset({"ByteLevel", "Digits", "Metaspace"})
"""Pre-tokenizers of the tokenizers library that drop no character."""


def max_chars_per_token(settings: Part) -> int | None:
    """Return the number of characters of a text that one token covers at most; None if that is not
    known, as for a tokenizer that drops characters.

    `settings` are the content of a tokenizer.json. Known are tokenizers of the kind BPE whose
    tokens cover every byte.
    """
    model, added = settings["model"], settings["added_tokens"]
    keeps_all = (
        model["type"] == "BPE"
        and settings["truncation"] is None
        and covers_bytes(model, settings["pre_tokenizer"])
        and keeps_text(settings["pre_tokenizer"])
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    factor = chars_normalised(settings["normalizer"]) if keeps_all else None
    if factor is None:
        return None
    # A token of bytes has a character for each byte, and a character of the text has bytes.
    return factor * max(map(len, (*model["vocab"], *(token["content"] for token in added))))


def covers_bytes(model: Part, splitter: Part | None) -> bool:
    """Whether each byte of a text that no longer token covers becomes a token of its own."""
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    from tokenizers.pre_tokenizers import ByteLevel

    is_bytes = any(part["type"] == "ByteLevel" for part in pipeline_of(splitter, "pretokenizers"))
    return is_bytes and all(char in model["vocab"] for char in ByteLevel.alphabet())


def keeps_text(splitter: Part | None) -> bool:
    """Whether a pre-tokenizer drops no character."""
    return all(
        part["type"] in KEEPING or (part["type"] == "Split" and part["behavior"] != "Removed")
        for part in pipeline_of(splitter, "pretokenizers")
    )


def chars_normalised(normaliser: Part | None) -> int | None:
    """Return how many characters of a text the normaliser makes one of, at most; None if it may
    drop text.
    """
    factor = 1
    for part in pipeline_of(normaliser, "normalizers"):
        if part["type"] == "NFC":
            factor *= NFC_CHARS
        elif part["type"] == "Replace":
            replaced = part["pattern"].get("String")
            if replaced is None or len(part["content"]) < len(replaced):
                return None
        elif part["type"] != "Prepend":
            return None
    return factor


def settings_of(backend: Any) -> Part:
    """Return the content of tokenizer.json for a tokenizer of the tokenizers library."""
    settings: Part = json.loads(backend.to_str())
    return settings
