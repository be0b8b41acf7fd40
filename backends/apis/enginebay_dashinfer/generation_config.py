"""ASGenerationConfigBuilder, which collects how one request generates its tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Self

from enginebay.errors import RequestError, shown
from enginebay_dashinfer.multimedia import MultiMediaInfo

MAX_SEED = 2**31 - 1
"""Largest seed that a builder draws by itself."""

FROM_TRANSFORMERS = (
    "do_sample",
    "early_stopping",
    "eos_token_id",
    "length_penalty",
    "min_length",
    "no_repeat_ngram_size",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)
"""Fields of transformers' GenerationConfig that a builder takes over."""


class GenerationConfig(dict[str, Any]):
    """The fields of a request's generation that are set, by name."""


class ASGenerationConfigBuilder:
    """Collects the fields of a request's generation. Each method sets one field and returns the
    builder. The engine checks the values when a request starts (`sampling.to_sampling`).
    """

    def __init__(
        self, hf_gen_config: Any = None, seed: int | None = None, eos_token_id: int | None = None
    ) -> None:
        """Begin with the fields of a transformers GenerationConfig (or of a mapping with the same
        names). Sampling and early stopping are always on at first. `seed`: None draws one.
        """
        self._fields: dict[str, Any] = {
            "do_sample": True,
            "early_stopping": True,
            "seed": 1 + secrets.randbelow(MAX_SEED) if seed is None else seed,
        }
        if hf_gen_config is not None:
            self._take_over(hf_gen_config)
        if eos_token_id is not None:
            self._fields["eos_token_id"] = eos_token_id

    def _take_over(self, given: Any) -> None:
        if not isinstance(given, Mapping) and not callable(getattr(given, "to_dict", None)):
            text = f"a generation configuration of type {type(given).__name__}"
            todo = "Pass GenerationConfig.from_pretrained(folder), for example."
            raise RequestError(text, "transformers' GenerationConfig or a mapping", todo)
        values = given if isinstance(given, Mapping) else given.to_dict()
        if values.get("num_return_sequences", 1) not in (None, 1):
            text = f"num_return_sequences = {shown(values['num_return_sequences'])}"
            raise RequestError(text, "1", "Start a request for each sequence.")
        known = {name: values[name] for name in FROM_TRANSFORMERS if values.get(name) is not None}
        ids = known.pop("eos_token_id", None)
        if isinstance(ids, Sequence):
            known |= {"eos_token_id": ids[0], "stop_words_ids": [[one] for one in ids[1:]]}
        elif ids is not None:
            known["eos_token_id"] = ids
        self._fields |= known | {"do_sample": True, "early_stopping": True}

    def build(self) -> GenerationConfig:
        """Return the fields that are set, by name. The builder does not change the result."""
        return GenerationConfig(self._fields)

    def update(self, update_fields: Mapping[str, Any]) -> Self:
        """Set several fields by name. RequestError (a ValueError) for anything but a mapping."""
        if not isinstance(update_fields, Mapping):
            given = f"fields of type {type(update_fields).__name__}"
            raise RequestError(given, "a mapping", "Pass names and values.")
        self._fields |= update_fields
        return self

    def do_sample(self, flag: bool = True) -> Self:
        """Sample tokens; False always takes the most likely token."""
        return self.update({"do_sample": flag})

    def temperature(self, temperature: float) -> Self:
        """Set the temperature; 0 always takes the most likely token."""
        return self.update({"temperature": temperature})

    def top_k(self, top_k: int) -> Self:
        """Sample from the k most likely tokens; 0: from all."""
        return self.update({"top_k": top_k})

    def top_p(self, top_p: float) -> Self:
        """Sample from the most likely tokens with this total probability, 0 to 1."""
        return self.update({"top_p": top_p})

    def seed(self, seed: int) -> Self:
        """Set the seed of sampling, a 64-bit number. Equal seeds give equal tokens."""
        return self.update({"seed": seed})

    def max_length(self, max_length: int) -> Self:
        """Set the max tokens of prompt and output together."""
        return self.update({"max_length": max_length})

    def min_length(self, min_length: int) -> Self:
        """Set the number of tokens that are generated at least; 0: no such number."""
        return self.update({"min_length": min_length})

    def early_stopping(self, flag: bool = True) -> Self:
        """End the output at the end-of-sequence token."""
        return self.update({"early_stopping": flag})

    def eos_token_id(self, eos_token_id: int) -> Self:
        """Set the end-of-sequence token."""
        return self.update({"eos_token_id": eos_token_id})

    def stop_words_ids(self, stop_words_ids: Sequence[Sequence[int]]) -> Self:
        """End the output after any of these sequences of token ids."""
        return self.update({"stop_words_ids": stop_words_ids})

    def no_repeat_ngram_size(self, size: int) -> Self:
        """Let no sequence of `size` tokens occur twice in prompt and output; 0: no limit."""
        return self.update({"no_repeat_ngram_size": size})

    def repetition_penalty(self, penalty: float) -> Self:
        """Divide positive logits of tokens that occurred by this number, and multiply negative
        ones; 1: no penalty.
        """
        return self.update({"repetition_penalty": penalty})

    def presence_penalty(self, penalty: float) -> Self:
        """Subtract this number from the logits of tokens that were generated."""
        return self.update({"presence_penalty": penalty})

    def frequency_penalty(self, penalty: float) -> Self:
        """Subtract this number from the logit of a token for each time that it was generated."""
        return self.update({"frequency_penalty": penalty})

    def length_penalty(self, penalty: float) -> Self:
        """Set the penalty of long sequences in a beam search. Sampling does not use it."""
        return self.update({"length_penalty": penalty})

    def suppress_repetition_in_generation(self, flag: bool = True) -> Self:
        """Let repetition_penalty count generated tokens only, and no tokens of the prompt."""
        return self.update({"suppress_repetition_in_generation": flag})

    def logprobs(self, flag: bool = True) -> Self:
        """Return the log-probability of each token."""
        return self.update({"logprobs": flag})

    def top_logprobs(self, num: int) -> Self:
        """Return the log-probabilities of the `num` most likely tokens too. Requires logprobs."""
        return self.update({"top_logprobs": num})

    def log_probs(self, enable_logprobs: bool, top_logprobs: int) -> Self:
        """Call logprobs() and top_logprobs()."""
        return self.logprobs(enable_logprobs).top_logprobs(top_logprobs)

    def lora_name(self, name: str) -> Self:
        """Set the name of the adapter; "": none."""
        return self.update({"lora_name": name})

    def mm_info(self, info: MultiMediaInfo | None) -> Self:
        """Set the embeddings that replace placeholders of the prompt."""
        return self.update({"mm_info": info})

    def with_mm_info(self, info: MultiMediaInfo | None) -> Self:
        """The same as mm_info()."""
        return self.mm_info(info)

    def response_format(self, response_format: Mapping[str, str]) -> Self:
        """Set {"type": "json_object"}, with "json_schema" (text) or without: the output is JSON."""
        return self.update({"response_format": response_format})
