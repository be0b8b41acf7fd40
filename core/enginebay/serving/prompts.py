"""Prompts as callers pass them: text, token ids or Segments, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from enginebay.errors import RequestError
from enginebay.serving.priority import is_list
from enginebay.serving.segments import Segments, as_segments

Prompt = str | Sequence[int] | Segments
Prompts = Prompt | Sequence[Prompt]


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """A list of prompts, made from one text, one list of token ids, one Segments, or a list of
    these. RequestError for anything else.
    """
    if isinstance(prompts, str | Segments):
        return [prompts]
    if not is_list(prompts):
        raise _no_prompt(prompts)
    if len(prompts) and all(isinstance(p, int | np.integer) for p in prompts):
        return [cast("Sequence[int]", prompts)]
    for prompt in prompts:
        check_prompt(prompt)
    return cast("list[Prompt]", list(prompts))


def prompts_of(prompts: Prompts | None, prompt_embeds: object) -> Prompts:
    """`prompts`, or `prompt_embeds` as Segments. RequestError when both are given."""
    if prompt_embeds is None:
        return cast("Prompts", prompts)  # None is refused later, like every other invalid prompt
    if prompts is not None:
        given = "both prompts and prompt_embeds"
        raise RequestError(given, "one of the two", "Pass the embeddings as Segments in prompts.")
    return as_segments(prompt_embeds)


def check_prompt(prompt: object) -> None:
    """RequestError unless this is a text, a list of token ids, or Segments."""
    is_ids = is_list(prompt) and all(isinstance(t, int | np.integer) for t in prompt)
    if not isinstance(prompt, str | Segments) and not is_ids:
        raise _no_prompt(prompt)


def _no_prompt(value: object) -> RequestError:
    given = f"a prompt of type {type(value).__name__}"
    if is_list(value):
        given += " with items that are not token ids"
    return RequestError(
        given, "text, a list of token ids, or Segments", "Convert the prompt to text."
    )
