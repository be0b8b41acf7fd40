"""Chooses the registered guide, which makes the grammars of guided requests."""

from __future__ import annotations

from enginebay.config import EngineConfig
from enginebay.contracts.constraint import Guide, MakeGuide, Vocabulary, forms_of
from enginebay.errors import UnsupportedError
from enginebay.plugins.registry import Registry
from enginebay.types import SamplingParams


def choose_guide(registry: Registry, config: EngineConfig) -> MakeGuide:
    """Return the guide with the highest priority; NoGuide when no plugin registers one.
    ConfigError for wrong options.
    """
    able = registry.ready("guide")
    make: MakeGuide = registry.run(able[0], registry, config) if able else NoGuide
    return make


class NoGuide(Guide):
    """Refuses guided requests. It is used when no plugin registers a guide."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """`vocabulary` is unused."""

    def grammar(self, params: SamplingParams) -> None:
        """Return None. UnsupportedError for a guided request."""
        asked = forms_of(params)
        if asked:
            raise UnsupportedError(
                f"a request with {next(iter(asked))}, but no guide is installed",
                "a plugin that registers a guide",
                f"Install one, or leave {next(iter(asked))} out.",
            )

    def close(self) -> None:
        """Do nothing: there are no worker processes."""
