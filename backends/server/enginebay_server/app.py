"""Builds the FastAPI application: the routes of the server's APIs, without global state."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from enginebay.errors import EnginebayError
from enginebay_server.document import openapi_document
from enginebay_server.errors import ApiError, api_error, error_body
from enginebay_server.ingress import (
    PROBES,
    App,
    AsgiMessage,
    IngressMiddleware,
    Receive,
    Send,
    is_page,
)
from enginebay_server.json_bodies import JsonBodies, body_routes
from enginebay_server.limits import ConcurrencyLimit
from enginebay_server.metrics import Metrics
from enginebay_server.request_span import SPAN_KEY, RequestSpan
from enginebay_server.response_store import open_store
from enginebay_server.routes_adapters import adapter_routes
from enginebay_server.routes_anthropic import anthropic_routes
from enginebay_server.routes_generate import generate_routes
from enginebay_server.routes_info import inform_routes
from enginebay_server.routes_page import page_routes
from enginebay_server.routes_responses import response_routes
from enginebay_server.routes_tokens import token_routes
from enginebay_server.served import ServedModel, ServedModels
from enginebay_server.settings import ServerSettings
from enginebay_server.state import AppState
from enginebay_server.tracer import Tracer

MakeRoutes = Callable[[AppState], APIRouter]


def create_app(
    models: Sequence[ServedModel],
    settings: ServerSettings | None = None,
    own_routes: MakeRoutes | None = None,
) -> FastAPI:
    """Return an application that serves `models`. `own_routes` makes routes that replace those of
    the same paths.

    The caller closes the LLMs of the models, and `app.state.server`, the application's AppState,
    when the application has ended. Two applications of one process
    share nothing, unless they are given the same models.
    """
    settings = settings or ServerSettings()
    limit = ConcurrencyLimit(settings.max_concurrency, settings.max_queue, settings.retry_after_s)
    kept = open_store(settings)
    tracer = None if settings.traces_url is None else Tracer(settings.traces_url)
    state = AppState(ServedModels(models), settings, limit, Metrics(models, limit), kept, tracer)
    # The pages of the document need scripts from other hosts.
    app = FastAPI(docs_url=None, redoc_url=None)
    has_slots = any(model.llm.plan.adapters is not None for model in models)
    names = () if has_slots else tuple(state.models.by_name)
    document = functools.cache(lambda: openapi_document(app.routes, names, settings))
    app.openapi = document  # type: ignore[method-assign]
    app.state.server = state
    generating = generate_routes(state)
    app.include_router(generating)
    own = own_routes(state) if own_routes else APIRouter()
    app.include_router(own)
    made = [own, generating]
    taken = {getattr(route, "path", None) for route in own.routes}
    others = (response_routes, anthropic_routes, token_routes, adapter_routes, inform_routes)
    for make in (*others, page_routes):
        router = make(state)
        router.routes[:] = [one for one in router.routes if getattr(one, "path", None) not in taken]
        app.include_router(router)
        made.append(router)
    handlers: dict[Any, Any] = {
        ApiError: _on_error,
        EnginebayError: _on_error,
        HTTPException: _on_http,
        Exception: _on_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(JsonBodies, routes=body_routes(made), state=state, on_error=_on_error)
    app.add_middleware(
        IngressMiddleware, state=state, takes_json=json_paths(app)
    )  # requests pass the middleware that is added last first
    if tracer is not None:
        app.add_middleware(Tracing, tracer=tracer)
    if settings.cors_origins:
        app.add_middleware(CORSMiddleware, **cors_of(settings))
    return app


def json_paths(app: FastAPI) -> frozenset[str]:
    """Return the paths that take a POST."""
    return frozenset(path for path, methods in app.openapi()["paths"].items() if "post" in methods)


def methods_of(app: FastAPI, path: str) -> set[str]:
    """Return the methods that a path of the document takes."""
    return {
        method.upper()
        for template, methods in app.openapi()["paths"].items()
        if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path)
        for method in methods
    }


def cors_of(settings: ServerSettings) -> dict[str, Any]:
    """Return the options of CORSMiddleware."""
    return {
        "allow_origins": list(settings.cors_origins),
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": ["*"],
    }


def as_response(request: Request, error: ApiError) -> Response:
    """Return the HTTP response for an error, in the format of the API that the path belongs to."""
    body = error_body(request.url.path, error)
    return Response(body, error.status, headers=error.headers, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    answer = api_error(error)
    answer.name_prompt_field(request.url.path)
    return as_response(request, answer)


async def _on_http(request: Request, error: HTTPException) -> Response:
    """Answer an HTTP error of the framework: an unknown path or a wrong method."""
    what = f"{request.method} {request.url.path}"
    message = {
        404: f"{what}: this path does not exist. /openapi.json lists all paths.",
        405: f"{what}: this path needs another method. /openapi.json lists the methods.",
    }.get(error.status_code, str(error.detail))
    response = as_response(request, ApiError(error.status_code, message))
    if error.status_code == 405:
        response.headers["allow"] = ", ".join(sorted(methods_of(request.app, request.url.path)))
    return response


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
