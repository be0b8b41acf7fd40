"""The errors of the eSurge API that its users catch as RuntimeError."""

from __future__ import annotations

from enginebay.errors import EnginebayError, StoppedError, UnsupportedError


class NotRunningError(StoppedError, RuntimeError):
    """A request for an engine that was not initiated, or is paused."""


class BusyError(EnginebayError, RuntimeError):
    """Something that needs an idle engine was asked of one with requests, or a profile of one that
    is being profiled.
    """


class NoTemplateError(UnsupportedError, RuntimeError):
    """A chat with a tokenizer that has no chat template."""


def no_template() -> NoTemplateError:
    """The error of a chat for which there is no chat template."""
    given = "a chat with a tokenizer without a chat template"
    return NoTemplateError(given, "one that has it", "Give chat_template, or use generate.")
