"""Sampling parameters of the documented APIs."""

from __future__ import annotations

from enginebay.types import SamplingParams


def with_length(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """Return `params` with `max_tokens`, unless they set max_tokens already (None counts
    as set).
    """
    return (
        params
        if "max_tokens" in params.model_fields_set
        else params.model_copy(update={"max_tokens": max_tokens})
    )
