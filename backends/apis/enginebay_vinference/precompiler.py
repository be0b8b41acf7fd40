"""Precompiler: the shapes that an inference is compiled for, and the limits of these shapes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from enginebay.errors import EnginebayError, InputError, UnsupportedError
from enginebay_vinference.inference_config import vInferenceConfig
from enginebay_vinference.inputs import FitTarget
from enginebay_vinference.loaded_model import LoadedModel
from enginebay_vinference.precompile import vInferencePreCompileConfig
from enginebay_vinference.state import row_keys
from enginebay_vinference.state_steps import InferenceShape
from enginebay_vinference.stepping import Stepper

log = logging.getLogger("enginebay.vinference")


class Precompiler:
    """Keeps the compiled standalone configurations. Thread-safe."""

    def __init__(self, loaded: LoadedModel, config: vInferenceConfig, stepper: Stepper) -> None:
        self.loaded = loaded
        self.config = config
        self.stepper = stepper
        self._lock = threading.Lock()
        self._done: dict[int, vInferencePreCompileConfig] = {}

    @property
    def done(self) -> dict[int, vInferencePreCompileConfig]:
        """The compiled standalone configurations by hash."""
        with self._lock:
            return dict(self._done)

    def restore(self, done: Mapping[int, vInferencePreCompileConfig]) -> None:
        """Set the compiled configurations back to `done`, a former value of the property."""
        with self._lock:
            self._done = dict(done)

    @property
    def fit(self) -> FitTarget:
        """The shapes that inputs can be fitted to now."""
        return FitTarget(
            tuple(self.done.values()), self.max_prefill_length, self.stepper.pad_token_id
        )

    @property
    def max_prefill_length(self) -> int:
        """Tokens of the longest prompt that leaves room for max_new_tokens. ValueError below 1."""
        longest = self.loaded.longest_sequence()
        new = self.config.max_new_tokens
        if new >= longest:
            raise InputError(
                f"max_new_tokens = {new}",
                f"at most {longest - 1}, which leaves one of {longest} tokens for the prompt",
                "Lower max_new_tokens.",
            )
        return longest - new

    def precompile(self, config: vInferencePreCompileConfig) -> bool:
        """Compile every standalone configuration of `config`. Returns False, and logs the reason,
        when that fails.
        """
        if not isinstance(config, vInferencePreCompileConfig):
            given = f"a configuration of type {type(config).__name__}"
            raise InputError(
                given,
                "a vInferencePreCompileConfig",
                "Pass vInferencePreCompileConfig(batch_size=1), for example.",
            )
        standalones = [self.resolve(one) for one in config.get_standalones()]
        try:
            for one in standalones:
                self.make_ready(one)
        except EnginebayError:
            raise
        except Exception:  # any error of XLA: the caller gets False, and may retry
            log.exception("compiling %s failed", config)
            return False
        return True

    def resolve(self, one: vInferencePreCompileConfig) -> vInferencePreCompileConfig:
        """Return a standalone configuration with its prefill length set. UnsupportedError or
        InputError when this inference cannot serve it.
        """
        if one.vision_included:
            raise UnsupportedError(
                "vision_included = True", "False: no model has vision yet", "Omit vision_included."
            )
        longest = self.max_prefill_length
        if one.prefill_length is None:
            return one.replace(prefill_length=longest)
        assert isinstance(one.prefill_length, int), "standalone"
        if one.prefill_length > longest:
            raise InputError(
                f"prefill_length = {one.prefill_length}",
                f"at most {longest}, which leaves {self.config.max_new_tokens} tokens to generate",
                "Lower prefill_length or max_new_tokens.",
            )
        return one

    def make_ready(self, one: vInferencePreCompileConfig) -> None:
        """Compile every program that a resolved configuration needs."""
        shape = self.shape_for(one)
        self.stepper.programs.get(shape, ahead=True)
        row_keys(self.stepper.make_key(0), shape.num_rows)  # compiles it, too
        with self._lock:
            self._done[one.get_default_hash()] = one

    def shape_for(self, one: vInferencePreCompileConfig) -> InferenceShape:
        """Return the shape of a resolved configuration's functions."""
        assert isinstance(one.batch_size, int), "standalone"
        assert isinstance(one.prefill_length, int), "resolved"
        num_rows = one.batch_size * self.sequences_for(one)
        return self.stepper.shape(
            num_rows, one.prefill_length, one.prefill_length + self.config.max_new_tokens
        )

    def sequences_for(self, one: vInferencePreCompileConfig) -> int:
        """Return the number of completions per row. The hash of a configuration without a prefill
        length applies to the longest length.
        """
        counts = self.config.num_return_sequences
        if isinstance(counts, int | None) or one.get_default_hash() in counts:
            return self.config.sequences_for(one)
        is_longest = one.prefill_length == self.max_prefill_length
        return self.config.sequences_for(one.replace(prefill_length=None) if is_longest else one)
