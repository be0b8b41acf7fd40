"""Bodies of requests: the fields that every way to generate text has, and what is done with
fields that are unknown.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from enginebay.errors import nearest, shown
from enginebay.types import SamplingParams
from enginebay_server.errors import ApiError
from enginebay_server.settings import ServerSettings

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields of OpenAI's API that change nothing here, and are accepted."""

IGNORED_HEADER = "x-enginebay-ignored"
TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """A body that keeps unknown fields, so that `check_unknown` can refuse them by name."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


def check_unknown(body: Body, settings: ServerSettings) -> dict[str, str]:
    """The headers that name the fields of a body that are ignored. ApiError for an unknown field,
    unless the server ignores those.
    """
    unknown = sorted((body.model_extra or {}).keys() - IGNORED)
    if not unknown:
        return {}
    if settings.unknown_fields == "refuse":
        near = nearest(unknown[0], type(body).model_fields)
        raise ApiError(
            400,
            f"unknown field {shown(unknown[0])}. "
            + (f"Did you mean {near!r}?" if near else "Leave it out."),
            param=unknown[0],
            code="unknown_parameter",
        )
    names = [name for name in unknown if name.isascii() and name.isprintable()]
    return {IGNORED_HEADER: ", ".join(names)[:1000]}


class StreamOptions(BaseModel):
    """What a stream has besides its text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(BaseModel):
    """The schema of a response_format."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """The form that an answer must have."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Body):
    """What chats and completions have in common. A field that is left out or null has the model's
    default.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1)
    guided_regex: str | None = None
    guided_grammar: str | None = None
    user: str | None = None
    """Who the request is charged to, for schedulers that share between tenants."""
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def has_form(self) -> bool:
        """Whether the output must have a form."""
        form = self.response_format
        guided = (self.guided_json, self.guided_choice, self.guided_regex, self.guided_grammar)
        return any(one is not None for one in guided) or (form is not None and form.type != "text")

    @property
    def turn(self) -> dict[str, Any]:
        """What the scheduler and the prefix cache need to know of the request."""
        return {
            "priority": self.priority or 0,
            "tenant": self.user or None,
            "cache_salt": self.cache_salt or None,
        }


SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
)
"""Fields that SamplingParams has under the same name."""


def sampling_params(
    body: GenerationBody,
    settings: ServerSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    **others: Any,
) -> SamplingParams:
    """How the tokens of a body are chosen. RequestError or ApiError for a value that is refused.

    `logprobs`: how many best tokens are returned with each new one; None: no log-probabilities.
    `others`: further fields of SamplingParams.
    """
    _check_limits(body, settings, logprobs)
    given = {name: getattr(body, name) for name in SAME_NAME if getattr(body, name) is not None}
    if body.seed is not None:
        given["seed"] = body.seed % 2**63
    if body.logit_bias:
        given["logit_bias"] = _bias(body.logit_bias)
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, **given, **_structure(body), **others
    )


def check_stream(body: GenerationBody) -> None:
    """ApiError for stream_options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400,
            "stream_options without stream. Allowed: both, or neither. Pass stream = true.",
            param="stream_options",
        )


def _check_limits(body: GenerationBody, settings: ServerSettings, logprobs: int | None) -> None:
    for name, value, limit in (
        ("n", body.n, settings.max_n),
        ("logprobs", logprobs, settings.max_logprobs),
    ):
        if value is not None and value > limit:
            raise ApiError(
                400, f"{name} = {value}. Allowed: at most {limit}. Ask for less.", param=name
            )


def _bias(given: dict[str, float]) -> dict[int, float]:
    wrong = next((key for key in given if not re.fullmatch("[0-9]{1,9}", key)), None)
    if wrong is not None:
        raise ApiError(
            400,
            f"logit_bias for {shown(wrong)}. Allowed: token ids. Use /tokenize to find them.",
            param="logit_bias",
        )
    return {int(key): value for key, value in given.items()}


def _structure(body: GenerationBody) -> dict[str, Any]:
    """The fields of SamplingParams that say what the output must be; the core refuses two."""
    found: dict[str, Any] = {}
    form = body.response_format
    if form is not None and form.type == "json_object":
        found["json_object"] = True
    if form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ApiError(
                400,
                'response_format of type "json_schema" without a schema. Allowed: '
                '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}. '
                "Pass the schema.",
                param="response_format.json_schema",
            )
        found["json_schema"] = form.json_schema.schema_
    for name, value in (
        ("json_schema", body.guided_json),
        ("choice", body.guided_choice),
        ("regex", body.guided_regex),
        ("grammar", body.guided_grammar),
    ):
        if value is not None:
            if found:
                raise ApiError(
                    400,
                    f"{' and '.join(found)} and {name} for one request. Allowed: one form of "
                    "the output. Leave the others out.",
                    param=f"guided_{name}",
                )
            found[name] = value
    return found
