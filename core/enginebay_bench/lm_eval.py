"""An adapter for lm-eval (extra `eval`): runs its tasks on an LLM. No other module imports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict, Field

from enginebay.errors import EnginebayError, RequestError, UnsupportedError
from enginebay.serving import LLM
from enginebay.types import SamplingParams
from enginebay.validation import Validated
from enginebay_bench.scoring import Scorer, scoring
from enginebay_testing.engine_logprobs import log_softmax

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise UnsupportedError(
        "lm_eval is not installed",
        "the lm-eval package",
        'Install the extra "eval": pip install "enginebay[eval]"',
    ) from error

MAX_NEW_TOKENS = 256
"""Number of generated tokens where a task sets none."""


class TaskArguments(Validated):
    """The arguments of a generation task, by lm-eval's names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    refusal: ClassVar[type[EnginebayError]] = RequestError

    until: str | list[str] | tuple[str, ...] | None = None
    max_gen_toks: int = Field(default=MAX_NEW_TOKENS, ge=1)
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)
    do_sample: bool = Field(default=True, strict=False)


class EnginebayLM(LM):
    """lm-eval's model on an LLM, which the caller must close.

    Likelihoods come from the engine's own steps, one sequence at a time; generation runs in the
    engine's batches.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.llm = llm

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return, for each (context, continuation), the continuation's log-probability in nats and
        whether greedy decoding gives it.

        A context that is too long is cut at its start. RequestError for a continuation longer than
        the model's context.
        """
        pairs = [self._encoded(*request.args) for request in requests]
        with scoring(self.llm) as scorer:
            return [_likelihood(scorer, context, continuation) for context, continuation in pairs]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return, for each (text,), the log-probability in nats of all its tokens, each with as
        much context as its window has.

        Every token is scored once: windows follow one another, and the last window begins earlier
        to have a full context.
        """
        results = []
        with scoring(self.llm) as scorer:
            for request in requests:
                token_ids = self._encode(request.args[0])
                results.append(
                    sum(
                        _likelihood(scorer, *window)[0]
                        for window in self._windows(token_ids, scorer)
                    )
                )
        return results

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return, for each (context, arguments), the completion without and up to the first text of
        `until`.

        The arguments are those of TaskArguments; `do_sample` False means temperature 0.
        RequestError for other arguments and for wrong values. A context that is too long is cut at
        its start.
        """
        params = [_params(request.args[1]) for request in requests]
        prompts = [
            self._shortened(request.args[0], one)
            for request, one in zip(requests, params, strict=True)
        ]
        outputs = self.llm.generate(prompts, params) if prompts else []
        return [output.outputs[0].text for output in outputs]

    def _encode(self, text: str) -> list[int]:
        """Encode without special tokens, because they occur only at the start of a text."""
        token_ids: list[int] = self.llm.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def _first(self) -> int:
        """Return the token before the start of a text: beginning of sequence, else an end of
        sequence.
        """
        info = self.llm.plan.checkpoint.token_info
        known = [t for t in (info.bos_token_id, *info.eos_token_ids) if t is not None]
        if not known:
            raise UnsupportedError(
                "a model without special tokens",
                "a beginning- or end-of-sequence token, as context of the first token",
                "Set bos_token_id or eos_token_id in generation_config.json.",
            )
        return known[0]

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode both together; spaces between them belong to the continuation."""
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            return [self._first()], self._encode(continuation)
        special = self.llm.tokenizer.encode("")
        before = self._encode(stripped)
        return [*special, *before], self._encode(stripped + continuation)[len(before) :]

    def _windows(self, token_ids: list[int], scorer: Scorer) -> list[tuple[list[int], list[int]]]:
        """Return (context, tokens to score) for all tokens."""
        length = scorer.max_model_len - 2
        before = [self._first(), *token_ids]
        windows = []
        for start in range(0, len(token_ids), length):
            end = min(start + length, len(token_ids))
            first = (
                start if start == 0 else max(0, end - length)
            )  # the last window is as long as the others
            windows.append((before[first : start + 1], token_ids[start:end]))
        return windows

    def _shortened(self, context: str, params: SamplingParams) -> list[int]:
        """Return the last tokens of a context, as many as fit with the tokens to generate."""
        token_ids: list[int] = self.llm.tokenizer.encode(context) or [self._first()]
        most = (self.llm.config.max_model_len or 0) - (params.max_tokens or 0)
        if most < 1:
            raise RequestError(
                f"max_gen_toks = {params.max_tokens}",
                f"fewer tokens than the context of {self.llm.config.max_model_len}",
                "Lower max_gen_toks, or raise max_model_len.",
            )
        return token_ids[-most:]


def _likelihood(
    scorer: Scorer, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    if not continuation:
        return 0.0, True
    most = scorer.max_model_len - 1 - len(continuation)
    if most < 1:
        raise RequestError(
            f"a continuation of {len(continuation)} tokens",
            f"at most {scorer.max_model_len - 2}",
            "Raise max_model_len.",
        )
    known = list(context)[-most:]
    logits = scorer.score([*known, *continuation]).logits[len(known) - 1 : -1]
    logprobs = log_softmax(logits)[np.arange(len(continuation)), continuation]
    return float(logprobs.sum()), bool((logits.argmax(axis=-1) == np.asarray(continuation)).all())


def _params(given: Any) -> SamplingParams:
    try:
        task = TaskArguments.model_validate(given)
    except RequestError as error:
        raise RequestError(f"gen_kwargs: {error}") from None
    own: Any = (
        SamplingParams().model_dump()
    )  # every field is set, so that the checkpoint's sampling defaults do not apply
    chosen = {
        "max_tokens": task.max_gen_toks,
        "temperature": task.temperature if task.do_sample else 0.0,
        "top_p": task.top_p,
        "top_k": task.top_k,
        "stop": task.until,
    }
    return SamplingParams(**(own | chosen))
