"""Reads the JSON bodies of requests. FastAPI's own layers take 200 us of CPU per request, and work
on whole bodies on the event loop.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from enginebay.errors import EnginebayError, shown_text
from enginebay_server.bodies import IGNORED_HEADER
from enginebay_server.errors import ApiError
from enginebay_server.ingress import App, Receive, Send
from enginebay_server.lanes import IS_LARGE, LARGE_BYTES
from enginebay_server.state import AppState

Handler = Callable[..., Awaitable[Response]]
OnError = Callable[[Request, Exception], Awaitable[Response]]

UNION_BRANCH = re.compile(r"(str|int|float|bool|dict|list|constrained-\w+|function-\w+)(\[|$)")
"""Path parts that pydantic adds for a field that may have several types."""

OPENS = np.frombuffer(b",[{", np.uint8)
QUOTE = 34

DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
LONG_INTEGER = b"0" * 19

TOO_LONG = ("too_long", "string_too_long")


class Route(typing.NamedTuple):
    """A handler, the class of its body, and whether it also takes the request."""

    kind: type[BaseModel]
    handler: Handler
    takes_request: bool


class JsonBodies:
    """Pure ASGI middleware after Door, which has read the whole body.

    A POST to one of `routes` gets its body counted, parsed and validated, a large one on the lane
    of large requests, and calls the route's handler. Other requests go to `app`.
    """

    def __init__(
        self, app: App, routes: Mapping[str, Route], state: AppState, on_error: OnError
    ) -> None:
        self._app, self._routes, self._state, self._on_error = app, routes, state, on_error

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(scope["path"]) if is_post else None
        if route is None:
            await self._app(scope, receive, send)
            return
        data = (await receive()).get("body", b"")
        scope[IS_LARGE] = len(data) > LARGE_BYTES
        request = Request(scope, receive)
        read = functools.partial(read_body, route.kind, data, self._state.settings.max_body_values)
        try:
            body = await self._state.lanes.read(scope, read)
            del data, read  # a large body is kept once
            args = (body, request) if route.takes_request else (body,)
            response = await route.handler(*args)
            if IGNORED_HEADER in response.headers:
                names = response.headers[IGNORED_HEADER].split(", ")
                self._state.metrics.count_ignored(scope["path"], names)
        except ValidationError as error:  # of the chat that a body becomes
            response = await self._on_error(request, wrong_field(found_by(error)))
        except (ApiError, EnginebayError) as error:
            response = await self._on_error(request, error)
        await response(scope, receive, send)


def read_body(kind: type[BaseModel], data: bytes, max_values: int) -> BaseModel:
    """Return a body; ApiError 400 for one that has too many values, is no JSON, or is wrong."""
    check_values(data, max_values)
    try:
        return kind.model_validate(orjson.loads(data))
    except orjson.JSONDecodeError:
        pass  # halves of UTF-16 pairs, which the standard library reads
    except ValidationError as error:
        if not has_long_integer(data):  # which orjson makes a float
            raise wrong_field(found_by(error)) from None
    try:
        return kind.model_validate(json.loads(data.decode()))
    except ValidationError as error:
        raise wrong_field(found_by(error)) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:
        what = shown_text(str(error))
        raise ApiError(400, f"the body is not valid JSON: {what}") from None


def check_values(data: bytes, max_values: int) -> None:
    """Raise ApiError 400 for a body of more than `max_values` numbers, texts, lists and objects."""
    if len(data) <= max_values:
        return
    # Each value but the first follows one of these bytes, which texts may have too.
    if 1 + sum(data.count(byte) for byte in (b",", b"[", b"{")) <= max_values:
        return
    count = num_values(data)
    if count > max_values:
        raise ApiError(
            400,
            f"a body of about {count} JSON values. Allowed: at most {max_values}. Send less, or "
            "raise --max-body-values.",
            code="request_too_large",
        )


def has_long_integer(data: bytes) -> bool:
    """Return whether bytes have as many digits in a row as an integer of more than 64 bits."""
    return LONG_INTEGER in data.translate(DIGITS_AS_ZEROS)


def num_values(data: bytes) -> int:
    """Return at least how many values a JSON text has, without making one of them."""
    if b"\\" in data:  # an escaped quotation mark ends no text
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    read = np.frombuffer(data, np.uint8)
    in_text = np.logical_xor.accumulate(read == QUOTE)
    return 1 + int(np.count_nonzero(np.isin(read, OPENS) & ~in_text))


def found_by(error: ValidationError) -> Sequence[Mapping[str, Any]]:
    """Return the findings of pydantic, without the values that they are about."""
    return error.errors(include_url=False, include_input=False)


def wrong_field(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error of a body that does not match its schema. It names the first wrong field."""
    first = next((one for one in errors if one["type"] in TOO_LONG), errors[0])
    path = [str(part) for part in first["loc"] if not UNION_BRANCH.match(str(part))]
    field = ".".join(path)[:200]
    message = f"{field or 'the body'}: {first['msg']}. See /openapi.json for what is allowed."
    return ApiError(400, message, param=field or None)


def body_routes(routers: Iterable[APIRouter]) -> dict[str, Route]:
    """Return the routes of `routers` that have a body, by path."""
    found = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and "POST" in (route.methods or ()):
                hints = typing.get_type_hints(route.endpoint)
                takes_request = "request" in inspect.signature(route.endpoint).parameters
                found[route.path] = Route(hints["body"], route.endpoint, takes_request)
    return found
