"""The errors of the vInference API: enginebay's own, which are also the built-in ones that its
users catch.
"""

from __future__ import annotations

from enginebay.errors import ConfigError, InputError, RequestError


class PromptTypeError(RequestError, TypeError):
    """A prompt, or sampling parameters, of a type that cannot be served."""


class MissingSettingError(ConfigError, AssertionError):
    """A setting that neither the configuration, the model nor the tokenizer has."""


class SpentStateError(InputError, RuntimeError):
    """A state whose arrays went into the step after it."""


class SavedInferenceError(InputError):
    """A saved inference that is damaged, or of another model."""


class InferenceWarning(UserWarning):
    """The prompt was cut, or programs are compiled that precompile() could have made ready."""
