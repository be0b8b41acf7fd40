"""Chooses the library that compiles the grammars of guided requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from enginebay.config import EngineConfig
from enginebay.config_sections import AUTO, GuidedLimits
from enginebay.contracts.constraint import GrammarLibrary, Vocabulary
from enginebay.errors import ConfigError, unknown_name
from enginebay.plugins.registry import import_target
from enginebay.text.guides.guarded import GuardedLibrary
from enginebay.text.guides.guide import Guides
from enginebay.validation import describe_validation

LIBRARIES = {"llguidance": "enginebay.text.guides.guided_grammar:Llguidance"}
"""The built-in libraries; `auto` is the first. Others are named by import path."""


@dataclasses.dataclass(frozen=True)
class ChosenGrammars:
    """A library, made on first use, with its import path, its options, and the limits of the worker
    processes.
    """

    target: str
    library: type[GrammarLibrary]
    options: BaseModel | None = None
    limits: GuidedLimits = dataclasses.field(default_factory=GuidedLimits)

    def __call__(self, vocabulary: Vocabulary) -> Guides:
        """Return the guide of an engine for a vocabulary."""
        return Guides(lambda: self.make(vocabulary), self.limits)

    def make(self, vocabulary: Vocabulary) -> GrammarLibrary:
        """Make the library for a vocabulary; UnsupportedError when it does not support the
        vocabulary.

        It is made and runs in worker processes, unless the tokenizer cannot be sent to another
        process: for a large vocabulary it is made for seconds, and holds the GIL meanwhile.
        """
        serialised = _serialised(vocabulary)
        if serialised is None:
            make_library: Any = self.library
            more = () if self.options is None else (self.options,)
            library: GrammarLibrary = make_library(vocabulary, *more)
            return library
        settings = {
            "library": self.target,
            "options": None if self.options is None else self.options.model_dump(mode="json"),
            "tokenizer": serialised,
            "size": vocabulary.size,
            "eos_token_ids": [int(i) for i in vocabulary.eos_token_ids],
        }
        return GuardedLibrary(settings, self.limits)


def choose_grammars(config: EngineConfig) -> ChosenGrammars:
    """Return the library that the configuration names, or with `auto` the first built-in one.
    UnknownNameError for an unknown name, PluginError for an import path that cannot be imported,
    ConfigError for one that names no library and for wrong options.
    """
    name = next(iter(LIBRARIES)) if config.grammars.name == AUTO else config.grammars.name
    if name not in LIBRARIES and ":" not in name:
        todo = 'Name a library of your own by its import path, "module:attribute".'
        raise unknown_name("grammar", name, LIBRARIES, todo)
    target = LIBRARIES.get(name, name)
    library = import_target(target, f"grammar {name!r}")
    if not (isinstance(library, type) and issubclass(library, GrammarLibrary)):
        raise ConfigError(
            f"grammars = {name!r}, which is no grammar library",
            "a subclass of enginebay.contracts.constraint.GrammarLibrary",
            "Correct the import path.",
        )
    options = _options(library, name, config.grammars.options)
    return ChosenGrammars(target, library, options, config.guided_limits)


def _options(
    library: type[GrammarLibrary], name: str, values: Mapping[str, Any]
) -> BaseModel | None:
    model, what = library.options_model, f"grammar {name!r}"
    if model is None:
        if values:
            given = f"options {', '.join(values)} for {what}"
            todo = "Leave these options out."
            raise ConfigError(given, "no options: this library has none", todo)
        return None
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(f"{what}: {describe_validation(error, model)}") from None


def _serialised(vocabulary: Vocabulary) -> str | None:
    """Return the tokenizer as JSON of the tokenizers library; None for another kind of tokenizer.
    The worker processes remove truncation and padding.
    """
    backend: Any = getattr(vocabulary.tokenizer.inner, "backend_tokenizer", None)
    return str(backend.to_str()) if hasattr(backend, "to_str") else None
