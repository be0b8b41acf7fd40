"""transformers on torch as the reference: loading a folder, its logits and its greedy tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def load_reference(folder: Path, dtype: str) -> Any:
    """The model of a folder in `dtype`, attention written out in the open."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval()


def logits_of(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """f32 [tokens, vocab]."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([list(token_ids)])).logits[0]
    result: np.ndarray = logits.float().numpy()
    return result


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The best token after each prefix, by the model's own cache; one pass over everything must
    agree with it.
    """
    import torch
    from transformers import DynamicCache

    # The argument has this name from transformers 5.24 on.
    is_new = "cache" in inspect.signature(model.forward).parameters
    cache = {"cache" if is_new else "past_key_values": DynamicCache(config=model.config)}
    token_ids, new = list(prompt), list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            out = model(torch.tensor([new]), use_cache=True, **cache)
            new = [int(out.logits[0, -1].argmax())]
            token_ids += new
    continuation = token_ids[len(prompt) :]
    at_once = logits_of(model, token_ids)[len(prompt) - 1 : -1].argmax(axis=1)
    assert at_once.tolist() == continuation, (
        "the reference disagrees with itself: two scores are too close"
    )
    return continuation


def hidden_of(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """f32 [tokens, hidden_size], `last_hidden_state`: after the final norm."""
    import torch

    with torch.no_grad():
        hidden = model.base_model(torch.tensor([list(token_ids)])).last_hidden_state[0]
    result: np.ndarray = hidden.float().numpy()
    return result


def embeds_of(model: Any, token_ids: Sequence[int]) -> np.ndarray:
    """f32 [tokens, hidden_size], what the first layer is given of these tokens."""
    import torch

    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.tensor(list(token_ids)))
    result: np.ndarray = embeds.float().numpy()
    return result
