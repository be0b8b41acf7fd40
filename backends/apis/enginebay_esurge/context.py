"""Fitting of a prompt and its new tokens to the context: pure functions of lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

from enginebay.errors import ConfigError, RequestError

TruncateMode = Literal["left", "right", "middle"]


@dataclasses.dataclass(frozen=True, slots=True)
class ContextRules:
    """The rules for a prompt and new tokens that exceed the context.

    `reserve_tokens` are never used; None is a tenth of max_model_len.
    """

    max_model_len: int
    reserve_tokens: int | None = None
    auto_truncate_prompt: bool = True
    auto_cap_new_tokens: bool = True
    strict_context: bool = False
    truncate_mode: TruncateMode = "left"
    prefer_preserve_prompt: bool = True

    def __post_init__(self) -> None:
        if self.truncate_mode not in get_args(TruncateMode):
            raise ConfigError(
                f"truncate_mode = {self.truncate_mode!r}",
                "left, right or middle",
                "Pass one of these.",
            )
        if self.reserve < 0 or self.budget < 2:
            raise ConfigError(
                f"reserve_tokens = {self.reserve} with max_model_len = {self.max_model_len}",
                f"0 to {self.max_model_len - 2}, which leaves room for a prompt and a new token",
                "Lower reserve_tokens, or raise max_model_len.",
            )

    @property
    def reserve(self) -> int:
        """Tokens of the context that are never used."""
        return self.max_model_len // 10 if self.reserve_tokens is None else self.reserve_tokens

    @property
    def budget(self) -> int:
        """Max tokens of a prompt and its completion together."""
        return self.max_model_len - self.reserve


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt, and max tokens of its completion."""

    num_prompt: int
    num_new: int


def fit_lengths(num_prompt: int, num_new: int | None, rules: ContextRules) -> Lengths:
    """Return the lengths of a prompt and of its new tokens, so that both fit the budget.

    num_new None requests as many new tokens as fit. A prompt that exceeds the budget by itself is
    truncated to the budget less num_new (less 1 for None). Otherwise the new tokens are capped
    first under prefer_preserve_prompt, and the prompt is truncated first without it; the second cut
    happens only if the first one is not enough. Each keeps at least one token.

    A cut that auto_cap_new_tokens or auto_truncate_prompt forbids happens only if no other cut
    helps. With strict_context it raises RequestError (a ValueError) instead, and without
    auto_cap_new_tokens every excess raises it.
    """
    budget = rules.budget
    prompt = num_prompt
    new = max(1, budget - num_prompt) if num_new is None else num_new
    if prompt + new > budget and rules.strict_context and not rules.auto_cap_new_tokens:
        raise _does_not_fit(num_prompt, num_new, rules)
    for cut in _cuts(num_prompt, rules):
        if prompt + new <= budget:
            break
        if cut == "cap":
            new = max(1, budget - prompt)
            continue
        if rules.strict_context and not rules.auto_truncate_prompt:
            raise _does_not_fit(num_prompt, num_new, rules)
        prompt = max(1, budget - new)
    return Lengths(prompt, new)


def _cuts(num_prompt: int, rules: ContextRules) -> list[str]:
    """The order of the two cuts: "cap" shortens the new tokens, "truncate" shortens the prompt."""
    if num_prompt > rules.budget:
        return ["truncate", "cap"]
    order = ["cap", "truncate"] if rules.prefer_preserve_prompt else ["truncate", "cap"]
    allowed = {"cap": rules.auto_cap_new_tokens, "truncate": rules.auto_truncate_prompt}
    return sorted(order, key=lambda cut: not allowed[cut])


def truncate(token_ids: Sequence[int], num_tokens: int, mode: TruncateMode) -> list[int]:
    """Return `num_tokens` of token_ids. Mode "left" drops the beginning, "right" the end, "middle"
    the middle.

    With "middle" the first part is the longer one, if they differ.
    """
    if num_tokens >= len(token_ids):
        return list(token_ids)
    if mode == "right":
        return list(token_ids[:num_tokens])
    head = 0 if mode == "left" else -(-num_tokens // 2)
    return [*token_ids[:head], *token_ids[len(token_ids) - (num_tokens - head) :]]


def _does_not_fit(num_prompt: int, num_new: int | None, rules: ContextRules) -> RequestError:
    requested = "any number of" if num_new is None else f"up to {num_new}"
    return RequestError(
        f"a prompt of {num_prompt} tokens and {requested} new tokens, with strict_context",
        f"{rules.budget} tokens together, which is max_model_len less reserve_tokens",
        "Shorten the prompt, lower max_tokens, or allow auto_truncate_prompt and "
        "auto_cap_new_tokens.",
    )
