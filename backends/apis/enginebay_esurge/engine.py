"""The engine "esurge": the paged engine with eSurge's options."""

from __future__ import annotations

from enginebay.contracts.engine import AttentionProblem
from enginebay.contracts.executor import EngineParts
from enginebay_esurge.engine_options import ESurgeOptions
from enginebay_paged import engine as paged


def make_engine(parts: EngineParts, options: ESurgeOptions) -> paged.PagedEngine:
    """Make a paged engine from these parts. ConfigError or UnsupportedError when the cache has no
    room for a page.
    """
    return paged.make_engine(parts, options.paged())


def attention_problems(parts: EngineParts, options: ESurgeOptions) -> list[AttentionProblem]:
    """Return the attention problems of this engine's steps."""
    return paged.attention_problems(parts, options.paged())
