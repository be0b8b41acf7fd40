"""Sampling parameters of the documented APIs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from enginebay.types import SamplingParams


def unapplied(params: object, applied: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of each field of SamplingParams outside `applied` that
    `params` sets to another value than its default. A field that `params` lacks is not set.

    An API lists the fields that it applies and refuses the others, new ones included.
    """
    for name, field in SamplingParams.model_fields.items():
        default = field.get_default(call_default_factory=True)
        value = getattr(params, name, default)
        if name not in applied and value is not None and value != default:
            yield name, value, default


def with_length(params: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """Return `params` with `max_tokens`, unless they set max_tokens already (None counts
    as set).
    """
    return (
        params
        if "max_tokens" in params.model_fields_set
        else params.model_copy(update={"max_tokens": max_tokens})
    )
