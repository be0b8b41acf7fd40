"""Chooses the logits processors of an engine, and makes the values of a request's row for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from enginebay.config import EngineConfig, Reason
from enginebay.config_sections import AUTO
from enginebay.contracts.processor import (
    LogitsProcessor,
    Processors,
    RowFacts,
    RowValues,
    row_values,
)
from enginebay.errors import ConfigError, RequestError, unknown_name
from enginebay.plugins.registry import Entry, Registry

LAST = 1000
"""The order of a processor that declares no `order`: after all that declare one."""


@dataclasses.dataclass(frozen=True)
class ChosenProcessors:
    """The logits processors of an engine, in the order in which they are applied."""

    registry: Registry
    entries: Mapping[str, Entry]
    processors: Processors
    reason: Reason

    def rows(
        self, wanted: Mapping[str, Mapping[str, Any]], facts: RowFacts
    ) -> tuple[RowValues, ...]:
        """Return the values of a request's row. `wanted`: processor -> options of the request.

        RequestError for a processor that the engine does not have, for wrong options, and for a
        request that a processor refuses.
        """
        missing = [name for name in wanted if name not in self.entries]
        if missing:
            raise self._missing(missing[0])
        made = []
        for name, processor in self.processors:
            if name in wanted:
                try:
                    options = self.registry.options(self.entries[name], wanted[name])
                except ConfigError as error:
                    raise RequestError(str(error)) from None
                made.append(row_values(name, processor, options, facts))
        return tuple(made)

    def _missing(self, name: str) -> RequestError:
        known = self.registry.names("processor")
        if name not in known:
            return RequestError(str(unknown_name("logits processor", name, list(self.entries))))
        return RequestError(
            f"logits processor {name!r}, which the engine was made without",
            ", ".join(self.entries) or "none",
            "Add it to the setting processors, or leave it out of the request.",
        )

    def reads_tokens(self, values: tuple[RowValues, ...]) -> bool:
        """Return whether one of these processors reads the row's tokens."""
        used = {value.name for value in values}
        return True in [one.reads_tokens for name, one in self.processors if name in used]

    def changes_best(self, values: tuple[RowValues, ...]) -> bool:
        """Return whether one of these processors may change which token has the highest logit."""
        used = {value.name for value in values}
        return False in [one.keeps_argmax for name, one in self.processors if name in used]


def choose_processors(registry: Registry, config: EngineConfig) -> ChosenProcessors:
    """Make the processors that the configuration names or, with `auto`, those that declare
    `default`.
    """
    if config.processors == AUTO:
        entries = [e for e in registry.ready("processor") if e.capability("default")]
        why = "those that plugins declare as default"
    else:
        entries = [registry.find("processor", name) for name in config.processors]
        why = "chosen by name"
    entries = sorted(
        {e.name: e for e in entries}.values(), key=lambda e: (e.capability("order", LAST), e.name)
    )
    made: list[tuple[str, LogitsProcessor]] = [(e.name, registry.load(e)()) for e in entries]
    chosen = ", ".join(name for name, _ in made) or "none"
    return ChosenProcessors(
        registry, {e.name: e for e in entries}, tuple(made), Reason("processors", chosen, why)
    )
