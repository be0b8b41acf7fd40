"""From sampling parameters to checked requests, rows' columns and random keys: the same preparation
as for LLM.
"""

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
from enginebay.constraint import forms_of
from enginebay.errors import InputError, RequestError
from enginebay.llm.abilities import Abilities
from enginebay.llm.prepare import Preparer
from enginebay.text import Tokenizer
from enginebay.types import Request, SamplingParams
from enginebay_faces.params import with_length
from enginebay_vinference.errors import InferenceWarning
from enginebay_vinference.inference_config import vInferenceConfig
from enginebay_vinference.inputs import real_rows
from enginebay_vinference.precompile import plain_int
from enginebay_vinference.prompts import as_params
from enginebay_vinference.state import SampleState
from enginebay_vinference.stepping import sampling_columns
from enginebay_vinference.subject import LoadedModel


def check_seed(seed: Any) -> int | None:
    """The seed of an inference as int; InputError for another type, or a negative one."""
    found = plain_int(seed)
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
        raise InputError(f"seed = {seed!r}", "an integer of at least 0, or None", "Correct it.")
    return found


log = logging.getLogger("enginebay.vinference")

NO_PLACE = "states and their outputs have no place for log-probabilities"
NO_FIELDS = "states have no place for the fields of logits processors"
REFUSED: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("best_of", (None, 1), NO_PLACE),
    ("logprobs", (None,), NO_PLACE),
    ("prompt_logprobs", (None,), NO_PLACE),
    ("stop_words_ids", ((),), "states end by single token ids, on the device"),
    ("suppress_repetition_in_generation", (False,), NO_FIELDS),
    ("no_repeat_ngram_size", (0,), NO_FIELDS),
    ("min_tokens", (0,), NO_FIELDS),
    ("logit_bias", ({},), NO_FIELDS),
    ("allowed_token_ids", (None,), NO_FIELDS),
    ("bad_words", ((),), NO_FIELDS),
    ("typical_p", (1.0,), NO_FIELDS),
    ("processors", ({},), NO_FIELDS),
)
"""Fields of SamplingParams that this API cannot do, the values with which they ask for nothing, and
why not.
"""


def _abilities(plan: Plan) -> Abilities:
    """Those of a plan, without the checkpoint's values for fields that states cannot carry or that
    this API sets.
    """
    found = Abilities.of(plan)
    lost = [name for name, _, _ in REFUSED if name in found.defaults.values]
    if lost:
        log.warning("%s of generation_config.json not applied: %s", ", ".join(lost), NO_FIELDS)
    return dataclasses.replace(found, defaults=found.defaults.without([*lost, "max_tokens"]))


class RequestMaker:
    """Makes requests of one inference. Safe from several threads."""

    def __init__(
        self, subject: LoadedModel, config: vInferenceConfig, tokenizer: Tokenizer, seed: int | None
    ) -> None:
        plan = subject.plan
        assert isinstance(config.sampling_params, SamplingParams), "made with the configuration"
        self.default = with_length(config.sampling_params, config.max_new_tokens)
        self._lock = threading.Lock()
        self._seeds = np.random.default_rng(secrets.randbits(64) if seed is None else seed)
        self._preparer = Preparer(
            tokenizer,
            dataclasses.replace(plan.checkpoint.token_info, eos_token_ids=config.eos_token_ids),
            plan.model.info.vocab_size,
            subject.longest_sequence(),
            abilities=_abilities(plan),
            seed=0,
        )
        self._max_new_tokens = config.max_new_tokens

    def params(self, given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
        """The parameters of a request, by default the configuration's. TypeError for another
        type.
        """
        params = as_params(given, self.default)
        if params.n != 1:
            raise RequestError(
                f"n = {params.n}", "n = 1", "Set num_return_sequences in vInferenceConfig instead."
            )
        for form in forms_of(params):
            raise RequestError(
                f"{form} in the vInference API",
                "none: a generation between two states runs on the device alone, "
                "and masks come from the host",
                "Leave it out, or use LLM or eSurge.",
            )
        for field, neutral, why in REFUSED:
            value = getattr(params, field)
            if value not in neutral:
                raise RequestError(
                    f"{field} = {value}",
                    f"{neutral[0]}: {why}",
                    "Leave it out, or use LLM or eSurge.",
                )
        return params

    def of_tokens(self, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
        """A checked request of each prompt, for tokens without text. Warns where max_tokens exceeds
        max_new_tokens.
        """
        most = self._max_new_tokens
        if params.max_tokens is not None and params.max_tokens > most:
            text = (
                f"max_tokens = {params.max_tokens} is cut to {most}, "
                "the max_new_tokens of this inference"
            )
            warnings.warn(
                f"{text}: its states have no room for more. Raise max_new_tokens in "
                f"vInferenceConfig, or pass max_tokens of at most {most}.",
                InferenceWarning,
                stacklevel=4,
            )
        if params.stop:
            raise RequestError(
                "stop texts in a generation of token ids",
                "stop_token_ids",
                "Or use process_prompt.",
            )
        return self._prepare(prompts, params)

    def of_text(self, prompt: list[int], params: SamplingParams) -> Request:
        """The checked request of one prompt whose answer is read as text."""
        return self._prepare([prompt], params)[0]

    def _prepare(self, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
        with self._lock:
            return [one.requests[0] for one in self._preparer.prepare([*prompts], params)]

    def columns(self, state: SampleState, params: SamplingParams) -> dict[str, np.ndarray]:
        """The sampling columns of a state's rows under other parameters."""
        padded = int(state.padded_length)
        mask = np.asarray(state.model_kwargs["attention_mask"])[:, :padded]
        prompts = list(real_rows(np.asarray(state.sequences)[:, :padded], mask))
        num_real = max((row + 1 for row, ids in enumerate(prompts) if ids), default=0)
        requests = self.of_tokens(prompts[:num_real], params)
        return sampling_columns(requests, len(prompts), state.sequences.shape[1] - padded)

    def seed(self, params: SamplingParams) -> int:
        """The seed of a request, or one drawn here."""
        if params.seed is not None:
            return params.seed
        with self._lock:
            return int(self._seeds.integers(0, 2**63))
