"""Which logits processors a request asks for, by fields of their own and by name, and with which options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.constraint import GUIDED
from enginebay.llm.guide import structure_of
from enginebay.types import SamplingParams


def asked_processors(params: SamplingParams) -> dict[str, Mapping[str, Any]]:
    """Options by processor."""
    asked: dict[str, Mapping[str, Any]] = dict(params.processors)
    if structure_of(params) is not None:
        asked[GUIDED] = {}
    return asked
