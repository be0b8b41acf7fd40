"""Errors of the eSurge API that its users catch as RuntimeError."""

from __future__ import annotations

from enginebay.errors import EnginebayError, StoppedError, UnsupportedError


class NotRunningError(StoppedError, RuntimeError):
    """A request to an engine that is stopped or paused."""


class BusyError(EnginebayError, RuntimeError):
    """An operation that requires an idle engine while there are requests, or a second profile at
    once.
    """


class NoTemplateError(UnsupportedError, RuntimeError):
    """A chat with a tokenizer without a chat template."""


def no_template() -> NoTemplateError:
    """Make the error for a chat without a chat template."""
    given = "a chat with a tokenizer without a chat template"
    allowed = "a tokenizer with a chat template"
    return NoTemplateError(given, allowed, "Pass chat_template, or use generate().")
