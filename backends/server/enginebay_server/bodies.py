"""Request bodies: the fields that chats and completions share, and the check for unknown fields."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, create_model

from enginebay.errors import nearest, shown
from enginebay.grammar import Form
from enginebay.types import MAX_ITEMS, SamplingParams
from enginebay_server.api_fields import OTHER_FIELDS, UNREAD_NAMES, ApiFields
from enginebay_server.errors import ApiError
from enginebay_server.field_limits import AtMost, Name, TokenId
from enginebay_server.sampling_fields import HTTP_NAMES, json_fields, json_type, sampling_field
from enginebay_server.settings import ServerSettings

IGNORED_HEADER = "x-enginebay-ignored"
MAX_IGNORED = 100
"""Max fields that the header names."""
MAX_TOKEN_IDS = 2**20
"""Max token ids of a list; a prompt has fewer, as the model's context says."""

TokenIdList = Annotated[list[TokenId], AtMost(MAX_TOKEN_IDS)]


def _prompt_kind(given: Any) -> str:
    """Return the kind of a prompt by its first item, so that a long list is read once."""
    if not isinstance(given, list):
        return "str"
    first = given[0] if given else ""
    if isinstance(first, list):
        return "list[list[int]]"
    return "list[int]" if isinstance(first, int) else "list[str]"


PromptField = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[list[str], AtMost(MAX_TOKEN_IDS), Tag("list[str]")]
    | Annotated[TokenIdList, Tag("list[int]")]
    | Annotated[list[TokenIdList], AtMost(MAX_TOKEN_IDS), Tag("list[list[int]]")],
    Discriminator(_prompt_kind),
]
"""A text, several texts, a list of token ids, or several lists."""


FORM_NAMES = {form: HTTP_NAMES[form] for form in sorted(get_args(Form)) if form in HTTP_NAMES}
"""Field of SamplingParams that constrains the output -> its name in chats and completions."""


class Body(BaseModel):
    """A body that keeps unknown fields, so that `check_unknown` can refuse them by name."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    api_fields: ClassVar[ApiFields] = OTHER_FIELDS


def check_unknown(
    body: Body, settings: ServerSettings, parts: Iterable[str] = ()
) -> dict[str, str]:
    """Return headers that name the ignored fields of a body, and drop them. `parts` are ignored
    parts of its other fields, such as "text.verbosity".

    Raises ApiError for a field that is refused or unknown, unless the setting `unknown_fields` is
    "ignore".
    """
    extra, api = body.model_extra or {}, body.api_fields
    ignored, wrong = list(parts), list[str]()
    for name, value in extra.items():
        known = api.ignored.get(name) or api.refused.get(name)
        if known is None and name in UNREAD_NAMES and value is None:
            continue
        if known is not None and not known.asks(value):
            continue
        (ignored if name in api.ignored else wrong).append(name)
    first = min(wrong, default="")
    given = shown(extra[first]) if first else ""
    extra.clear()  # they may be large, and nothing reads them
    if wrong and settings.unknown_fields == "refuse":
        raise _unread(type(body), first, given)
    first_names = heapq.nsmallest(MAX_IGNORED, {*ignored, *wrong})
    names = [name[:100] for name in first_names if name.isascii() and name.isprintable()]
    return {IGNORED_HEADER: ", ".join(names)[:1000]} if names else {}


def _unread(kind: type[Body], name: str, given: str) -> ApiError:
    """Return the error of a field that is refused or unknown, for its shown value."""
    known = kind.api_fields.refused.get(name)
    if known is None:
        near = nearest(name, kind.model_fields)
        hint = f"Did you mean {near!r}?" if near else "Leave it out."
        message = f"unknown field {shown(name)}. {hint}"
        return ApiError(400, message, param=name[:200], code="unknown_parameter")
    neutral = " or ".join(["null", *map(json.dumps, known.neutral)])
    return ApiError(
        400,
        f"{name} = {given}. Allowed: {neutral}, because it is not supported here: {known.why}. "
        "Leave it out.",
        param=name,
        code="unsupported_parameter",
    )


class StreamOptions(BaseModel):
    """Whether the events of a stream have token counts."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def asks_for_usage(self) -> bool:
        """Whether the stream has token counts."""
        return bool(self.include_usage or self.continuous_usage_stats)


class JsonSchema(BaseModel):
    """The schema of a response_format."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(BaseModel):
    """The output format that an answer must have."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


if TYPE_CHECKING:

    class SamplingBody(Body):
        """A body with the fields of HTTP_NAMES, of which other code names these."""

        temperature: float | None = None
        top_p: float | None = None
        presence_penalty: float | None = None
        frequency_penalty: float | None = None

    Stops = list[str]
else:
    SamplingBody = create_model("SamplingBody", __base__=Body, **json_fields())
    Stops = json_type(SamplingParams.model_fields["stop"].annotation, MAX_ITEMS["stop"])


class GenerationBody(SamplingBody):
    """Fields that chats and completions share. A missing or null field has the model's default."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    """Any integer, of which the lowest 63 bits count."""
    stop: str | Stops | None = sampling_field("stop")
    response_format: ResponseFormat | None = None
    user: Name | None = None
    """Tenant that the request is charged to, for schedulers that use tenants."""
    priority: int | None = None
    cache_salt: Name | None = None

    @property
    def has_form(self) -> bool:
        """Whether the request constrains the output format."""
        form = self.response_format
        guided = any(getattr(self, name) is not None for name in FORM_NAMES.values())
        return guided or (form is not None and form.type != "text")

    @property
    def turn(self) -> dict[str, Any]:
        """Keyword arguments of LLM.submit for the scheduler and the prefix cache."""
        return {
            "priority": self.priority or 0,
            "tenant": self.user or None,
            "cache_salt": self.cache_salt or None,
        }


def sampling_params(
    body: GenerationBody,
    settings: ServerSettings,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    **others: Any,
) -> SamplingParams:
    """Return the SamplingParams of a body. Raises RequestError or ApiError for a wrong value.

    `logprobs` is the number of top tokens to return with each new token, or None for no
    log-probabilities. `others` are further fields of SamplingParams.
    """
    given = {
        field: _from_json(name, value)
        for field, name in HTTP_NAMES.items()
        if field not in FORM_NAMES and (value := getattr(body, name)) is not None
    }
    check_limit("n", given.get("n"), settings.max_n)
    check_limit("logprobs", logprobs, settings.max_logprobs)
    if body.seed is not None:
        given["seed"] = body.seed % 2**63
    return SamplingParams(
        max_tokens=max_tokens, logprobs=logprobs, **given, **_structure(body), **others
    )


def check_stream(body: GenerationBody) -> None:
    """Raise ApiError for stream_options that ask for something without a stream."""
    options = body.stream_options
    if options is not None and options.asks_for_usage and not body.stream:
        raise ApiError(
            400,
            "stream_options is set without stream. Allowed: both, or neither. Pass stream = true.",
            param="stream_options",
        )


def check_limit(name: str, value: int | None, limit: int) -> None:
    """Raise ApiError for a field whose value is above its limit."""
    if value is not None and value > limit:
        raise ApiError(
            400, f"{name} = {value}. Allowed: at most {limit}. Pass a smaller value.", param=name
        )


def _from_json(name: str, value: Any) -> Any:
    """Return a value for SamplingParams. The keys of a mapping are token ids, which JSON has as
    texts. ApiError for another key.
    """
    if not isinstance(value, dict):
        return value
    wrong = next((key for key in value if not re.fullmatch("[0-9]{1,9}", key)), None)
    if wrong is not None:
        raise ApiError(
            400,
            f"{name} has the key {shown(wrong)}. Allowed: token ids. /tokenize returns them.",
            param=name,
        )
    return {int(key): one for key, one in value.items()}


def _structure(body: GenerationBody) -> dict[str, Any]:
    """Return the fields of SamplingParams for the output format. ApiError for two formats."""
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
    for form_field, name in FORM_NAMES.items():
        value = getattr(body, name)
        if value is not None:
            if found:
                raise ApiError(
                    400,
                    f"{' and '.join(found)} and {form_field} are set in one request. Allowed: one "
                    "output format. Leave the others out.",
                    param=name,
                )
            found[form_field] = value
    return found
