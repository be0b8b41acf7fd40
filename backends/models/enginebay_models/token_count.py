"""Counts the ids of a tokenizer from its files. Loading the tokenizer may take seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from enginebay.errors import CheckpointError
from enginebay_models.checkpoint import read_json


def count_token_ids(folder: Path) -> int | None:
    """Return one more than the largest id of the tokenizer in `folder`, added tokens included. None
    for a folder without a tokenizer.json, and for a file that cannot be read: loading the tokenizer
    then tells why.
    """
    try:
        found = list(_ids(folder))
    except (CheckpointError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return 1 + max(found) if found else None


def _ids(folder: Path) -> Iterator[int]:
    if not (folder / "tokenizer.json").is_file():
        return
    whole = read_json(folder / "tokenizer.json")
    vocab: Any = whole["model"]["vocab"]
    # A dict from tokens to ids, or Unigram's list of tokens and scores in the order of ids.
    yield _largest(vocab.values()) if isinstance(vocab, dict) else len(vocab) - 1
    yield _largest(token["id"] for token in whole.get("added_tokens") or ())
    settings = folder / "tokenizer_config.json"
    added = read_json(settings).get("added_tokens_decoder") if settings.is_file() else None
    yield _largest(map(int, added or ()))


def _largest(ids: Iterable[Any]) -> int:
    """Return the largest id, or -1. ValueError for a value that is no id."""
    found = list(ids)
    if not all(isinstance(one, int) for one in found):
        raise ValueError("an id that is no whole number")
    return max(found, default=-1)
