"""The engine "esurge": the paged engine, made with eSurge's options."""

from __future__ import annotations

from enginebay.runner.parts import EngineParts
from enginebay_esurge.engine_options import ESurgeOptions
from enginebay_oengine.engine import PagedEngine


def make_engine(parts: EngineParts, options: ESurgeOptions) -> PagedEngine:
    """A paged engine over these parts. ConfigError or UnsupportedError when there is no room for a page."""
    return PagedEngine(parts, options.paged())
