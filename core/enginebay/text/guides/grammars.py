"""Chooses the library that compiles the grammars of guided requests."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel

from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO, GuidedLimits
from enginebay.contracts.constraint import GrammarLibrary, Vocabulary
from enginebay.errors import ConfigError, UnsupportedError
from enginebay.plugins.registry import Entry, Registry
from enginebay.text.guides.guarded import GuardedLibrary
from enginebay.text.guides.guide import Guides


@dataclasses.dataclass(frozen=True)
class ChosenGrammars:
    """A registered library, made on first use; None means that no library is installed."""

    registry: Registry
    entry: Entry | None
    options: BaseModel | None = None
    limits: GuidedLimits = dataclasses.field(default_factory=GuidedLimits)

    def __call__(self, vocabulary: Vocabulary) -> Guides:
        """Return the guide of an engine for a vocabulary."""
        return Guides(lambda: self.make(vocabulary), self.limits)

    def make(self, vocabulary: Vocabulary) -> GrammarLibrary:
        """Make the library for a vocabulary; UnsupportedError when none is installed or it does not
        support the vocabulary.

        It is made and runs in worker processes, unless the tokenizer cannot be sent to another
        process: for a large vocabulary it is made for seconds, and holds the GIL meanwhile.
        """
        if self.entry is None:
            raise UnsupportedError(
                "a guided request, but no grammar library is installed",
                "a plugin that registers a library",
                "Install one, or leave the structure out of the request.",
            )
        make_library = self.registry.load(self.entry)
        serialised = _serialised(vocabulary)
        if serialised is None:
            more = () if self.options is None else (self.options,)
            library: GrammarLibrary = make_library(vocabulary, *more)
            return library
        declared = self.entry.declaration
        assert declared is not None, "find() returns declared parts only"
        settings = {
            "library": declared.target,
            "options_model": declared.options,
            "options": None if self.options is None else self.options.model_dump(mode="json"),
            "tokenizer": serialised,
            "size": vocabulary.size,
            "eos_token_ids": [int(i) for i in vocabulary.eos_token_ids],
        }
        return GuardedLibrary(settings, self.limits)


def choose_grammars(registry: Registry, config: EngineConfig) -> ChosenGrammars:
    """The one that the configuration names, or with `auto` that of the highest priority.
    ConfigError for wrong options.
    """
    name, options = config.grammars.name, config.grammars.options
    if name != AUTO:
        entry = registry.find("grammar", name)
    else:
        able = [e for e in registry.entries if e.kind == "grammar" and e.state == "ready"]
        able.sort(key=lambda e: (-e.priority, e.name))
        if not able:
            if options:
                given = f"grammars with options {', '.join(options)}, and no library of grammars"
                raise ConfigError(
                    given, "an installed library", "Install a plugin with a grammar library."
                )
            return ChosenGrammars(registry, None)
        entry = able[0]
    return ChosenGrammars(registry, entry, registry.options(entry, options), config.guided_limits)


def _serialised(vocabulary: Vocabulary) -> str | None:
    """Return the tokenizer as JSON of the tokenizers library; None for another kind of tokenizer.
    The worker processes remove truncation and padding.
    """
    backend: Any = getattr(vocabulary.tokenizer.inner, "backend_tokenizer", None)
    return str(backend.to_str()) if hasattr(backend, "to_str") else None
