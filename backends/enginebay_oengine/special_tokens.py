"""Special tokens as a processor and a model name them together."""

from __future__ import annotations

from typing import Any

from enginebay.errors import ConfigError, explain
from enginebay.text import Tokenizer
from enginebay_oengine.opened_model import OpenedModel


def find_tokenizer(processor: Any) -> Any:
    """The tokenizer of transformers in a processor, in our own Tokenizer, or that it is."""
    inner = getattr(processor, "tokenizer", processor)
    return inner.inner if isinstance(inner, Tokenizer) else inner


def find_pad_token_id(processor: Any, model: OpenedModel) -> int | None:
    """The tokenizer's, else the model's, or None."""
    own: int | None = getattr(find_tokenizer(processor), "pad_token_id", None)
    return model.plan.checkpoint.token_info.pad_token_id if own is None else own


def find_eos_token_ids(processor: Any, model: OpenedModel) -> list[int]:
    """The tokenizer's and the generation configuration's, each once, in this order."""
    own = getattr(find_tokenizer(processor), "eos_token_id", None)
    return list(dict.fromkeys([*_as_ids(own), *_as_ids(model.generation_config.eos_token_id)]))


def _as_ids(value: Any) -> list[int]:
    """Token ids of one, several or None. ConfigError (a ValueError) for anything else."""
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in values):
        raise ConfigError(
            explain(
                f"eos_token_id = {value!r}", "a token id, a list of them, or None", "Correct it."
            )
        )
    return values
