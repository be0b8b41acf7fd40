"""Finds the stop text or stop token that ended a completion."""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.contracts.text import StopChecker
from enginebay.serving.assemble import MAX_CONTEXT
from enginebay.types import FinishReason, SamplingParams
from enginebay_server.served import ServedModel


def stop_reason(
    model: ServedModel,
    params: SamplingParams,
    token_ids: Sequence[int],
    finish_reason: FinishReason | None,
    after: Sequence[int] = (),
) -> str | int | None:
    """Return the stop text, or the id among stop_token_ids, that ended a completion.

    `after` is the prompt that the completion continues; empty for an answer in a chat. Returns None
    if an end-of-sequence token or the length ended it.
    """
    if finish_reason != "stop" or not token_ids:
        return None
    if token_ids[-1] in params.stop_token_ids:
        return token_ids[-1]
    if not params.stop:
        return None
    decoder = model.llm.tokenizer.decoder(
        skip_special_tokens=params.skip_special_tokens, after=after[-MAX_CONTEXT:]
    )
    checker = StopChecker(params.stop)
    checker.push(decoder.push(token_ids) + decoder.flush())
    return checker.met
