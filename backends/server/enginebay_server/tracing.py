"""Tracing: the middleware that makes a span of each request."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from enginebay_server.door import PROBES, App, AsgiMessage, Receive, Send, is_page
from enginebay_server.errors import api_error
from enginebay_server.request_span import SPAN_KEY, RequestSpan
from enginebay_server.tracer import Tracer


class Tracing:
    """Pure ASGI middleware around Door: makes a span of every request but those of probes, scrapes
    and the page.
    """

    def __init__(self, app: App, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_traced(scope["path"]):
            await self._app(scope, receive, send)
            return
        span = self._tracer.start(scope)
        facts = scope[SPAN_KEY] = RequestSpan(scope["method"], scope["path"])
        status = 0

        async def send_seen(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except BaseException as error:
            facts.error = api_error(error)
            raise
        finally:
            self._tracer.end(span, facts, status)


def _is_traced(path: str) -> bool:
    return path not in PROBES and path not in ("/metrics", "/ui/data") and not is_page(path)
