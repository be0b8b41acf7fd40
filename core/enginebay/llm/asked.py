"""Which logits processors a request asks for, by fields of their own and by name, and with which options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.types import SamplingParams


def asked_processors(params: SamplingParams) -> dict[str, Mapping[str, Any]]:
    """Options by processor."""
    return dict(params.processors)
