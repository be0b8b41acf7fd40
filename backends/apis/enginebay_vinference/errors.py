"""Errors of the vInference API. Each also derives from the built-in error that its users catch."""

from __future__ import annotations

from enginebay.errors import ConfigError, InputError, RequestError


class PromptTypeError(RequestError, TypeError):
    """A prompt, or sampling parameters, of an unsupported type."""


class MissingSettingError(ConfigError, AssertionError):
    """A required setting that is missing in the configuration, the model and the tokenizer."""


class SpentStateError(InputError, RuntimeError):
    """A state whose arrays were donated to the step after it."""


class SavedInferenceError(InputError):
    """A saved inference that is damaged, or belongs to another model."""


class InferenceWarning(UserWarning):
    """A prompt was truncated, or programs are being compiled that precompile() could have compiled
    earlier.
    """
