"""Conversion of sampling parameters to checked requests, row columns and random keys, as in LLM."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from enginebay.compose.plan import Plan
from enginebay.contracts.constraint import forms_of
from enginebay.contracts.text import Tokenizer
from enginebay.errors import InputError, RequestError
from enginebay.serving.abilities import Abilities
from enginebay.serving.prepare import Preparer
from enginebay.types import ROW_VALUES, Request, SamplingParams
from enginebay_shared.params import unapplied, with_length
from enginebay_vinference.errors import InferenceWarning
from enginebay_vinference.inference_config import vInferenceConfig
from enginebay_vinference.inputs import real_rows
from enginebay_vinference.loaded_model import LoadedModel
from enginebay_vinference.precompile import plain_int
from enginebay_vinference.prompts import as_params
from enginebay_vinference.state import SampleState
from enginebay_vinference.stepping import sampling_columns


def check_seed(seed: Any) -> int | None:
    """Return the seed of an inference as int. InputError for another type, or a negative seed."""
    found = plain_int(seed)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
        allowed = "an integer of at least 0, or None"
        raise InputError(f"seed = {seed!r}", allowed, "Pass seed=0, for example.")
    return found


log = logging.getLogger("enginebay.vinference")

APPLIED = frozenset(
    {
        *ROW_VALUES,
        "max_tokens",
        "seed",
        "n",
        "best_of",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
    }
)
"""The fields of SamplingParams that reach a state, or the text that is read from it. `n` and
`best_of` must be 1.
"""
REASON = (
    "states do not store the fields of logits processors, do not store log-probabilities, and end "
    "rows at single token ids"
)
"""Why the other fields are refused."""


def _abilities(plan: Plan) -> Abilities:
    """The plan's abilities, without the checkpoint's defaults for unsupported fields and
    max_tokens.
    """
    found = Abilities.of(plan)
    lost = [name for name in found.defaults.values if name not in APPLIED]
    if lost:
        log.warning("%s of generation_config.json is not applied: %s", ", ".join(lost), REASON)
    left = {n: v for n, v in found.defaults.values.items() if n not in (*lost, "max_tokens")}
    return dataclasses.replace(found, defaults=dataclasses.replace(found.defaults, values=left))


class RequestMaker:
    """Makes the requests of one inference. Thread-safe."""

    def __init__(
        self, loaded: LoadedModel, config: vInferenceConfig, tokenizer: Tokenizer, seed: int | None
    ) -> None:
        plan = loaded.plan
        assert isinstance(config.sampling_params, SamplingParams), "made with the configuration"
        self.default = with_length(config.sampling_params, config.max_new_tokens)
        self._lock = threading.Lock()
        self._seeds = np.random.default_rng(secrets.randbits(64) if seed is None else seed)
        self._preparer = Preparer(
            tokenizer,
            dataclasses.replace(plan.checkpoint.token_info, eos_token_ids=config.eos_token_ids),
            plan.model.info.vocab_size,
            loaded.longest_sequence(),
            abilities=_abilities(plan),
            seed=0,
        )
        self._max_new_tokens = config.max_new_tokens

    def params(self, given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """Return a request's parameters, by default those of the configuration. TypeError for
        another type; RequestError for unsupported values.
        """
        params = as_params(given, self.default)
        if params.n != 1:
            raise RequestError(
                f"n = {params.n}", "n = 1", "Set num_return_sequences in vInferenceConfig."
            )
        if params.best_of not in (None, 1):
            raise RequestError(
                f"best_of = {params.best_of}",
                "1: states do not store log-probabilities, which rank the completions",
                "Omit best_of, or use LLM or eSurge.",
            )
        for form in forms_of(params):
            raise RequestError(
                f"{form} in the vInference API",
                "none: decode chunks run on the device, and token masks come from the host",
                "Omit it, or use LLM or eSurge.",
            )
        for name, value, default in unapplied(params, APPLIED):
            raise RequestError(
                f"{name} = {value}",
                f"{default}: {REASON}",
                f"Omit {name}, or use LLM or eSurge.",
            )
        return params

    def of_tokens(self, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
        """Return a checked request for each prompt of token ids. Warns when max_tokens exceeds
        max_new_tokens.
        """
        most = self._max_new_tokens
        if params.max_tokens is not None and params.max_tokens > most:
            text = (
                f"max_tokens = {params.max_tokens} is reduced to {most}, "
                "the max_new_tokens of this inference"
            )
            warnings.warn(
                f"{text}. Raise max_new_tokens in vInferenceConfig, "
                f"or pass max_tokens of at most {most}.",
                InferenceWarning,
                stacklevel=4,
            )
        if params.stop:
            raise RequestError(
                "stop texts for prompts of token ids",
                "stop_token_ids",
                "Pass stop_token_ids, or use process_prompt.",
            )
        return self._prepare(prompts, params)

    def of_text(self, prompt: list[int], params: SamplingParams) -> Request:
        """Return the checked request of one prompt whose answer is read as text."""
        return self._prepare([prompt], params)[0]

    def _prepare(self, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
        with self._lock:
            return [one.requests[0] for one in self._preparer.prepare([*prompts], params)]

    def columns(self, state: SampleState, params: SamplingParams) -> dict[str, np.ndarray]:
        """Return the sampling columns of a state's rows for other parameters."""
        padded = int(state.padded_length)
        mask = np.asarray(state.model_kwargs["attention_mask"])[:, :padded]
        prompts = list(real_rows(np.asarray(state.sequences)[:, :padded], mask))
        num_real = max((row + 1 for row, ids in enumerate(prompts) if ids), default=0)
        requests = self.of_tokens(prompts[:num_real], params)
        return sampling_columns(requests, len(prompts), state.sequences.shape[1] - padded)

    def seed(self, params: SamplingParams) -> int:
        """Return the request's seed, or a random one."""
        if params.seed is not None:
            return params.seed
        with self._lock:
            return int(self._seeds.integers(0, 2**63))
