"""The errors of the eSurge API that its users catch as RuntimeError."""

from __future__ import annotations

from enginebay.errors import EnginebayError, StoppedError, UnsupportedError


class NotRunningError(StoppedError, RuntimeError):
    """A request for an engine that was not initiated, or is paused."""


class BusyError(EnginebayError, RuntimeError):
    """Something that needs an idle engine was asked of one with requests, or a profile of one that is being profiled."""


class NoTemplateError(UnsupportedError, RuntimeError):
    """A chat with a tokenizer that has no chat template."""
