"""Calls of the tokenizers library that release the GIL, so that long texts hold up no thread.

`encode` and `decode` hold it for the whole text; their forms for batches do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode_released(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text."""
    [found] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = found.ids
    return ids


def decode_released(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of token ids."""
    [text] = tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
    found: str = text
    return found
