"""Prompts as a caller gives them: texts or lists of token ids, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from enginebay.errors import RequestError
from enginebay.llm.priority import is_list

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """A list of prompts from one text, one list of token ids, or a list of either. RequestError for
    anything else.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise _no_prompt(prompts)
    if len(prompts) and all(isinstance(p, int | np.integer) for p in prompts):
        return [cast("Sequence[int]", prompts)]
    for prompt in prompts:
        check_prompt(prompt)
    return cast("list[Prompt]", list(prompts))


def check_prompt(prompt: object) -> None:
    """RequestError unless this is a text or a list of token ids."""
    is_ids = is_list(prompt) and all(isinstance(t, int | np.integer) for t in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise _no_prompt(prompt)


def _no_prompt(value: object) -> RequestError:
    given = f"a prompt of type {type(value).__name__}"
    if is_list(value):
        given += " that holds other things than token ids"
    return RequestError(given, "text, or a list of token ids", "Convert it first.")
