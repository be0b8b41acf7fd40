"""The short way of valid requests: the same answers as by FastAPI's routes, and every other request
goes to these with its whole body.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from enginebay_server.errors import ApiError
from enginebay_server.short_way import ShortWay, routes_of
from tests.server.asking import Asker


class Body(BaseModel):
    number: int


def router() -> APIRouter:
    made = APIRouter()

    @made.post("/short")
    async def short(body: Body, request: Request) -> Response:
        if body.number < 0:
            raise ApiError(400, "below 0")
        return PlainTextResponse(f"short {body.number} {request.url.path}")

    @made.post("/long")
    async def long(body: Body) -> Response:
        return PlainTextResponse("never called")

    return made


async def fastapi(scope: Any, receive: Any, send: Any) -> None:
    """Stands for the application behind: its answer is the body that it gets."""
    await Response((await receive())["body"], 299)(scope, receive, send)


async def on_error(request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 400)


def ask(path: str, data: bytes, method: str = "POST") -> tuple[int, bytes]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    scope |= {"server": ("h", 1), "scheme": "http"}
    asyncio.run(ShortWay(fastapi, routes_of(router(), ["/short"]), on_error)(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


def test_a_valid_body_takes_the_short_way() -> None:
    assert ask("/short", b'{"number": 3}') == (200, b"short 3 /short")


def test_an_error_of_the_endpoint_is_answered() -> None:
    assert ask("/short", b'{"number": -1}') == (400, b"below 0")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"number": "x"}', b'{"number": NaN}', b"\xff"]
)
def test_any_other_body_goes_the_long_way_whole(data: bytes) -> None:
    assert ask("/short", data) == (299, data)


def test_other_paths_and_methods_go_the_long_way() -> None:
    assert ask("/long", b'{"number": 3}')[0] == 299
    assert ask("/short", b'{"number": 3}', "PUT")[0] == 299


def test_both_ways_of_the_application_answer_the_same(asker: Asker) -> None:
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    short = asker.ok("/v1/completions", **body)
    router_ = next(one for one in asker.app.user_middleware if one.cls is ShortWay)
    router_.kwargs["routes"] = {}
    asker.app.middleware_stack = None  # made again by the next request
    long = asker.ok("/v1/completions", **body)
    assert short["choices"] == long["choices"]
    assert short["usage"] == long["usage"]
