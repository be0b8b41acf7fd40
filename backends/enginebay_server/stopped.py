"""Finds the stop text or stop token that ended a completion."""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.text import StopChecker
from enginebay.types import FinishReason, SamplingParams
from enginebay_server.served import ServedModel


def stop_reason(
    model: ServedModel,
    params: SamplingParams,
    token_ids: Sequence[int],
    finish_reason: FinishReason | None,
) -> str | int | None:
    """Return the stop text, or the id among stop_token_ids, that ended a completion.

    Returns None if an end-of-sequence token or the length ended it.
    """
    if finish_reason != "stop" or not token_ids:
        return None
    if token_ids[-1] in params.stop_token_ids:
        return token_ids[-1]
    if not params.stop:
        return None
    text = model.llm.tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
    checker = StopChecker(params.stop)
    checker.push(text)
    return checker.met
