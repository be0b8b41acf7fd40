"""/v1/completions: its body, its answer and its stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import orjson
from pydantic import Field

from enginebay.errors import shown
from enginebay.outputs import CompletionOutput, RequestOutput, StreamChunk
from enginebay.types import SamplingParams
from enginebay_server.api_fields import COMPLETION_FIELDS
from enginebay_server.bodies import GenerationBody, PromptField, check_limit, sampling_params
from enginebay_server.errors import ApiError
from enginebay_server.frames import Frames
from enginebay_server.generation import Generation, PromptJob
from enginebay_server.logprobs import CompletionLogprobs
from enginebay_server.sampling_fields import sampling_field
from enginebay_server.served import ServedModel
from enginebay_server.settings import ServerSettings
from enginebay_server.sse import DONE, StreamWriter
from enginebay_server.stopped import stop_reason
from enginebay_server.usage import Usage

DEFAULT_MAX_TOKENS = 16
"""The default of OpenAI's API."""


class CompletionBody(GenerationBody):
    """A prompt to continue, or several."""

    api_fields = COMPLETION_FIELDS

    prompt: PromptField
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0)
    echo: bool | None = None
    best_of: int | None = sampling_field("best_of")
    suffix: str | None = None
    prompt_logprobs: int | None = sampling_field("prompt_logprobs")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts; each is a text or a list of token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [given]
        return cast("list[str | list[int]]", given)


def check_prompts(prompts: Sequence[str | list[int]], settings: ServerSettings, param: str) -> None:
    """Raise ApiError for no prompt, or more than max_prompts."""
    if not 1 <= len(prompts) <= settings.max_prompts:
        raise ApiError(
            400,
            f"{len(prompts)} prompts in {param}. Allowed: 1 to {settings.max_prompts}. Send "
            "several requests.",
            param=param,
        )


def check_text_lengths(texts: Iterable[str | list[int]], model: ServedModel, param: str) -> None:
    """Raise ApiError for a text that is longer than the model's limit on characters."""
    longest = max((len(one) for one in texts if isinstance(one, str)), default=0)
    if longest > model.max_text_chars:
        raise ApiError(
            400,
            f"a text of {longest} characters in {param}. Allowed: at most {model.max_text_chars}, "
            "because of the model's context. The prompt is too long.",
            param=param,
            code="context_length_exceeded",
        )


def completion_params(body: CompletionBody, settings: ServerSettings) -> SamplingParams:
    """Return the SamplingParams of a body; ApiError for a field that is not supported."""
    check_prompts(body.prompts, settings, "prompt")
    if body.suffix:
        raise ApiError(
            400,
            f"suffix = {shown(body.suffix)}. Allowed: none, because no model here fills a gap in a "
            "text. Leave it out.",
            param="suffix",
            code="unsupported_parameter",
        )
    check_limit("best_of", body.best_of, settings.max_n)
    check_limit("prompt_logprobs", body.prompt_logprobs, settings.max_logprobs)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens = 0 without echo. Allowed: 1 or more. Pass max_tokens = 1.",
            param="max_tokens",
        )  # fmt: skip
    others: dict[str, Any] = {} if body.best_of is None else {"best_of": body.best_of}
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = body.logprobs
    if prompt_logprobs is not None:
        others["prompt_logprobs"] = prompt_logprobs
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if prompt_logprobs is None:
        # Without scores the engine makes one token, which the answer leaves out.
        max_tokens = max(max_tokens, 1)
    return sampling_params(body, settings, max_tokens=max_tokens, logprobs=body.logprobs, **others)


def completion_jobs(body: CompletionBody, params: SamplingParams) -> list[PromptJob]:
    """Return a job for each prompt. With a seed in the body, each prompt has its own seed."""
    return [PromptJob(prompt, params, body.turn) for prompt in body.prompts]


class Echo:
    """The prompts' texts, which `echo` puts before their completions."""

    def __init__(self, model: ServedModel, body: CompletionBody) -> None:
        self._model = model
        self._prompts = body.prompts if body.echo else []

    def text(self, place: int) -> str:
        """Return the text of the prompt at a place; "" without echo."""
        if not self._prompts:
            return ""
        prompt = self._prompts[place]
        return prompt if isinstance(prompt, str) else self._model.llm.tokenizer.decode(prompt)


class CompletionAnswer:
    """Builds the answer of a completion that is not streamed."""

    def __init__(
        self, generation: Generation, body: CompletionBody, params: SamplingParams
    ) -> None:
        self._generation = generation
        self._model = generation.model
        self._body = body
        self._params = params
        self._echo = Echo(self._model, body)

    def record(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the body of the answer."""
        usage = Usage(since_s=self._generation.usage_since_s)
        choices: list[dict[str, Any]] = []
        for place, output in enumerate(outputs):
            usage.add_output(output)
            first = len(choices)
            choices += [self._choice(first + i, place, output, one)
                        for i, one in enumerate(output.outputs)]  # fmt: skip
        if self._body.max_tokens == 0:
            usage.num_new = 0
        return {
            "id": self._generation.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model.name,
            "choices": choices,
            "usage": usage.record,
        }

    def _choice(
        self, index: int, place: int, output: RequestOutput, one: CompletionOutput
    ) -> dict[str, Any]:
        is_prompt_only = self._body.max_tokens == 0
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo.text(place) + ("" if is_prompt_only else one.text),
            "logprobs": self._logprobs(output, one, is_prompt_only=is_prompt_only),
            "finish_reason": "length" if is_prompt_only else one.finish_reason,
            "stop_reason": stop_reason(
                self._model,
                self._params,
                one.token_ids,
                one.finish_reason,
                output.prompt_token_ids,
            ),
        }
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_record(output.prompt_logprobs)
        return choice

    def _logprobs(
        self, output: RequestOutput, one: CompletionOutput, *, is_prompt_only: bool
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        token_ids: list[int] = []
        told: list[dict[int, float] | None] = []
        if self._body.echo and output.prompt_logprobs is not None:
            token_ids += output.prompt_token_ids
            told += output.prompt_logprobs
        if not is_prompt_only:
            token_ids += one.token_ids
            told += one.logprobs or []
        return completion_logprobs(self._model, self._body, self._params).record(token_ids, told)


def completion_logprobs(
    model: ServedModel, body: CompletionBody, params: SamplingParams
) -> CompletionLogprobs:
    """Return the log-probabilities of one choice, whose tokens begin with the prompt's with
    `echo`.
    """
    return CompletionLogprobs(
        body.logprobs or 0,
        model.words,
        begins_text=bool(body.echo),
        skips_special=params.skip_special_tokens,
    )


def prompt_record(told: Sequence[dict[int, float] | None] | None) -> list[Any]:
    """Return a prompt's log-probabilities by token id, as JSON."""
    return [
        None if best is None else {str(token_id): max(v, -9999.0) for token_id, v in best.items()}
        for best in told or ()
    ]


class CompletionStream(StreamWriter):
    """Writes the events of a stream. The index of a choice counts over all prompts."""

    def __init__(
        self, generation: Generation, body: CompletionBody, params: SamplingParams
    ) -> None:
        self._model = generation.model
        self._body = body
        self._params = params
        self._usage = Usage(generation.num_prompt_tokens, since_s=generation.usage_since_s)
        head = {
            "id": generation.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model.name,
        }
        self._frames = Frames(head, body.stream_options, self._usage)
        self._num_each = generation.handles[0].num_completions
        count = len(generation.handles) * self._num_each
        self._prefixes = [self._frames.text_prefix(i, b'"text":') for i in range(count)]
        self._token_ids: list[list[int]] = [[] for _ in range(count)]
        self._echo = Echo(self._model, body)
        self._prompts = [handle.prompt_token_ids for handle in generation.handles]
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_told: dict[int, Sequence[dict[int, float] | None]] = {}

    def begin(self) -> bytes:
        if not self._body.echo or self._body.logprobs is not None:
            return b""  # with log-probabilities the prompt comes with its first tokens
        return b"".join(
            self._frames.text(prefix, self._echo.text(index // self._num_each), b"")
            for index, prefix in enumerate(self._prefixes)
        )

    def write(self, place: int, chunk: StreamChunk) -> bytes:
        self._usage.add(chunk)
        index = place * self._num_each + chunk.index
        if self._params.stop or self._params.stop_token_ids:
            self._token_ids[index] += chunk.delta_token_ids
        found = b""
        if self._body.logprobs is not None and chunk.logprobs is not None:
            found = self._with_logprobs(place, index, chunk)
        elif chunk.delta_text:
            found = self._frames.text(self._prefixes[index], chunk.delta_text, b"")
        if chunk.finish_reason is not None:
            found += self._last(index, chunk)
        return found

    def _with_logprobs(self, place: int, index: int, chunk: StreamChunk) -> bytes:
        """Return an event with the text and log-probabilities of a chunk.

        With `echo` the prompt's log-probabilities come before those of the first chunk.
        """
        if chunk.prompt_logprobs is not None:
            self._prompt_told[place] = chunk.prompt_logprobs
        text, token_ids = chunk.delta_text, list(chunk.delta_token_ids)
        told: list[dict[int, float] | None] = list(chunk.logprobs or ())
        if index not in self._logprobs:
            self._logprobs[index] = completion_logprobs(self._model, self._body, self._params)
            if self._body.echo:
                text = self._echo.text(place) + text
                token_ids = [*self._prompts[place], *token_ids]
                unknown: list[dict[int, float] | None] = [None] * len(self._prompts[place])
                told = [*self._prompt_told.get(place, unknown), *told]
        record = self._logprobs[index].record(token_ids, told)
        return self._frames.choice(
            {"index": index, "text": text, "logprobs": record, "finish_reason": None}
        )

    def _last(self, index: int, chunk: StreamChunk) -> bytes:
        if chunk.finish_reason in ("abort", "error"):
            raise ApiError(503, "the server ended the request", code="request_aborted")
        token_ids = self._token_ids[index]
        return self._frames.choice(
            {
                "index": index,
                "text": "",
                "logprobs": None,
                "finish_reason": chunk.finish_reason,
                "stop_reason": stop_reason(
                    self._model,
                    self._params,
                    token_ids,
                    chunk.finish_reason,
                    self._prompts[index // self._num_each],
                ),
            }
        )

    async def end(self) -> bytes:
        return self._frames.last() + DONE

    def fail(self, error: ApiError) -> bytes:
        return b"data: " + orjson.dumps(error.body) + b"\n\n"
