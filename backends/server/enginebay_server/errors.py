"""Errors as clients see them: a status, and a body in the format of OpenAI's API."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from enginebay.contracts.adapters import (
    AdapterCountError,
    AdapterInUseError,
    AdapterLoadedError,
    AdapterNotFoundError,
    AdapterRankError,
)
from enginebay.errors import (
    CompilationError,
    EnginebayError,
    InputError,
    NonFiniteError,
    StoppedError,
    UnsupportedError,
    error_line,
)
from enginebay_server.sampling_fields import HTTP_NAMES

INVALID = "invalid_request_error"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""The `type` of an error by its status. Other statuses below 500 have INVALID, statuses from 500 on
`server_error`.
"""

ADAPTER_ERRORS: dict[type[BaseException], tuple[int, str]] = {
    AdapterNotFoundError: (404, "adapter_not_found"),
    AdapterLoadedError: (409, "adapter_already_loaded"),
    AdapterInUseError: (409, "adapter_in_use"),
    AdapterCountError: (409, "adapter_count_exceeded"),
    AdapterRankError: (400, "adapter_rank_exceeded"),
}
"""Status and code of the errors of adapters."""

ANTHROPIC_TYPES = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An error answer. `param` names the wrong field of the request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def name_prompt_field(self, path: str) -> None:
        """Set the wrong field of an error about a prompt or about token ids, which the engine does
        not name: fields have other names in the API at `path`.
        """
        if self.param is None and self.status == 400:
            ids = OTHER_IDS.match(self.message)
            if ABOUT_PROMPT.match(self.message):
                self.param = PROMPT_FIELDS.get(path)
            elif ids is not None:
                self.param = ids["field"] or ("stop_token_ids" if ids["stop"] else "bad_words")

    @property
    def type(self) -> str:
        """The value of `error.type` in the body, such as "rate_limit_error"."""
        return TYPES.get(self.status, INVALID if self.status < 500 else "server_error")

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, which is also the data of an error event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in the format of Anthropic's API."""
        kind = ANTHROPIC_TYPES.get(self.status, self.type if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    @property
    def headers(self) -> dict[str, str]:
        """Extra headers of the answer, such as retry-after."""
        found = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


FIELD = re.compile(r"([\w.]+) = ")
REQUEST_NAMES = {field: name for field, name in HTTP_NAMES.items() if field != "json_schema"}
"""Field of SamplingParams -> its name in a request. A JSON schema may be in response_format too."""
TOO_LONG = re.compile(r"a prompt of (?:at least )?\d+ tokens(?:\. Allowed: at most (?P<most>\d+))?")
"""Matches the errors of a prompt that is longer than the context or the cache."""


def api_error(error: BaseException) -> ApiError:
    """Return the answer for an exception. An exception that is not an EnginebayError or ApiError is
    reported as status 500, "the server failed".
    """
    if isinstance(error, ApiError):
        return error
    message = " ".join(str(error).split())
    if type(error) in ADAPTER_ERRORS:
        status, code = ADAPTER_ERRORS[type(error)]
        return ApiError(status, message, code=code)
    if isinstance(error, InputError | UnsupportedError) and not isinstance(error, CompilationError):
        named, too_long = FIELD.match(message), TOO_LONG.match(message)
        if too_long is None:
            param = REQUEST_NAMES.get(named[1], named[1]) if named else None
            return ApiError(400, message, param=param)
        message += " The prompt is too long."  # clients look for these sentences
        if too_long["most"]:
            context = int(too_long["most"]) + ("leaves room" in message)
            message += f" This model's maximum context length is {context} tokens."
        return ApiError(400, message, code="context_length_exceeded")
    if isinstance(error, NonFiniteError):
        return ApiError(500, message, code="non_finite_logits")
    if isinstance(error, StoppedError):
        return ApiError(503, message, code="engine_stopped")
    if isinstance(error, EnginebayError):
        return ApiError(500, message, code="engine_error")
    return ApiError(500, f"the server failed: {error_line(error)}", code="internal_error")


PROMPT_FIELDS = {
    "/v1/completions": "prompt",
    "/tokenize": "prompt",
    "/v1/count_tokens": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
}
"""The field of each path that has the prompt."""
ABOUT_PROMPT = re.compile(r"a prompt (?:of|with) |an empty prompt|token id -?\d|the lone surrogate")
OTHER_IDS = re.compile(
    r"(?P<field>\w+): token id |(?P<stop>stop token id )|(?:a|\d+) bad words?\b|bad_words with "
)


def error_body(path: str, error: ApiError) -> bytes:
    """Return the bytes of an error in the format of the API that a path belongs to."""
    is_anthropic = path.startswith("/v1/messages")
    return to_json(error.anthropic_body if is_anthropic else error.body)


def to_json(record: dict[str, Any]) -> bytes:
    """Return a record as JSON.

    Texts with half of a UTF-16 pair and integers of more than 64 bits are allowed: clients send
    them.
    """
    try:
        return orjson.dumps(record)
    except TypeError:
        return json.dumps(record).encode()
