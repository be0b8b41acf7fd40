"""Sampling parameters of the documented APIs."""

from __future__ import annotations

from enginebay.types import SamplingParams


def with_length(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """`params` with `max_tokens`, unless the caller set max_tokens (None counts as set)."""
    return (
        params
        if "max_tokens" in params.model_fields_set
        else params.model_copy(update={"max_tokens": max_tokens})
    )
