"""Which registered guide makes the grammars of guided requests."""

from __future__ import annotations

from enginebay.config import EngineConfig
from enginebay.constraint import Guide, MakeGuide, Vocabulary, forms_of
from enginebay.errors import UnsupportedError
from enginebay.registry import Registry
from enginebay.types import SamplingParams


def choose_guide(registry: Registry, config: EngineConfig) -> MakeGuide:
    """That of the highest priority, a built-in one of equals; one that refuses guided requests when
    no plugin registers one. ConfigError for wrong options.
    """
    able = registry.ready("guide")
    make: MakeGuide = registry.run(able[0], registry, config) if able else NoGuide
    return make


class NoGuide(Guide):
    """Refuses guided requests, where no plugin makes grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """`vocabulary` is unused: nothing is guided."""

    def grammar(self, params: SamplingParams) -> None:
        """None; UnsupportedError for a request that asks for a structure."""
        asked = forms_of(params)
        if asked:
            raise UnsupportedError(
                f"a request with {next(iter(asked))}, and no guide is installed",
                "a plugin that registers a guide",
                "Install one, or leave the structure out.",
            )

    def close(self) -> None:
        """Nothing to end."""
