"""Which library compiles the grammars of guided requests."""

from __future__ import annotations

import dataclasses

from enginebay.config import AUTO, EngineConfig
from enginebay.constraint import GrammarLibrary, Vocabulary
from enginebay.errors import UnsupportedError, explain
from enginebay.registry import Entry, Registry


@dataclasses.dataclass(frozen=True)
class ChosenGrammars:
    """A registered library, made when it is needed; None: there is none to choose."""

    registry: Registry
    entry: Entry | None

    def make(self, vocabulary: Vocabulary) -> GrammarLibrary:
        """The library over a vocabulary; UnsupportedError when there is none, or it cannot be made for this one."""
        if self.entry is None:
            raise UnsupportedError(
                explain(
                    "a guided request without a library of grammars",
                    "a plugin that registers one",
                    "Install one, or leave the structure out.",
                )
            )
        library: GrammarLibrary = self.registry.load(self.entry)(vocabulary)
        return library


def choose_grammars(registry: Registry, config: EngineConfig) -> ChosenGrammars:
    """The one that the configuration names, or with `auto` that of the highest priority."""
    if config.grammars != AUTO:
        return ChosenGrammars(registry, registry.find("grammar", config.grammars))
    able = [e for e in registry.entries if e.kind == "grammar" and e.state == "ready"]
    able.sort(key=lambda e: (-e.priority, not e.built_in, e.name))
    return ChosenGrammars(registry, able[0] if able else None)
