"""vInferenceApiServer: the server's application over inferences, with defaults of its own.

Nothing else of this package imports the server, and this module is imported at first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from enginebay.errors import ConfigError, InputError, UnsupportedError
from enginebay_server.app import create_app
from enginebay_server.bodies import Body, check_unknown
from enginebay_server.chat import ChatBody
from enginebay_server.completions import CompletionBody, check_text_lengths
from enginebay_server.field_limits import Name, Objects
from enginebay_server.metrics import Metrics, check_installed
from enginebay_server.routes_generate import as_json
from enginebay_server.routes_info import model_record, probe
from enginebay_server.served import ServedModel
from enginebay_server.serving import Address, run_until_drained
from enginebay_server.settings import ServerSettings
from enginebay_server.state import AppState
from enginebay_vinference.errors import MissingSettingError
from enginebay_vinference.in_process import InProcess
from enginebay_vinference.inference import vInference

log = logging.getLogger("enginebay.server")

HOST, PORT = "0.0.0.0", 11556  # the documented default
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


class ConversationBody(Body):
    """A text or a conversation whose tokens are counted."""

    model: Name | None = None
    conversation: str | Objects


ChatCompletionRequest = ChatBody
CompletionRequest = CompletionBody
CountTokenRequest = ConversationBody
RequestFields = BaseModel | Mapping[str, Any]
"""A request: an object of its class, or a mapping of its fields."""


class vInferenceApiServer:  # noqa: N801  # the name its users know
    """Serves inferences over HTTP, by the routes of `enginebay serve`. Two servers of one process
    share nothing, unless they are given the same LLM.

    Pass `inference_map`, {name: vInference} or one vInference, or else `inference_init_call`, which
    returns either. The model of each inference is an LLM with the engine vinference, which answers
    the requests; its owner closes it. `app` is the ASGI application.

    The async methods answer as the routes do, by the same rules and without a socket. They return
    Starlette's JSONResponse, also for wrong fields, and a StreamingResponse for `stream`, which an
    application of the caller's may return. InputError for a request that is no mapping and no
    object of pydantic. While fire() runs they may be awaited on any event loop; without it, on one
    loop at a time.

    `allow_parallel_workload`: requests run together, at most `max_workers` at a time; without it
    they run one after the other. Others wait. `oai_like_processor`: contents of a counted
    conversation may be lists of parts, as in OpenAI's API.

    AssertionError without inferences, and for a value that is no vInference. UnsupportedError for
    an inference whose model is not an LLM.
    """

    def __init__(
        self,
        inference_map: Mapping[str, vInference] | vInference | None = None,
        inference_init_call: Callable[[], Mapping[str, vInference] | vInference] | None = None,
        max_workers: int = 10,
        allow_parallel_workload: bool = False,  # noqa: FBT001, FBT002  # the documented signature
        oai_like_processor: bool = True,  # noqa: FBT001, FBT002
    ) -> None:
        if inference_map is None and inference_init_call is not None:
            inference_map = inference_init_call()
        self.inference_map = checked_inferences(inference_map)
        if max_workers < 1:
            raise ConfigError(f"max_workers = {max_workers}", "1 or more", "Pass a larger value.")
        self.max_workers = max_workers
        self.allow_parallel_workload = allow_parallel_workload
        self.oai_like_processor = oai_like_processor
        models = [served_model(name, one) for name, one in self.inference_map.items()]
        settings = ServerSettings(
            max_concurrency=max_workers if allow_parallel_workload else 1,
            warmup="lazy",
            usage_times=True,
        )
        self.app = create_app(models, settings, self._routes)
        self._state: AppState = self.app.state.server
        self._calls = InProcess(self.app)
        self._server: uvicorn.Server | None = None

    def fire(
        self,
        host: str = HOST,
        port: int = PORT,
        metrics_port: int | None = None,
        log_level: str = "info",
        ssl_keyfile: str | None = None,
        ssl_certfile: str | None = None,
    ) -> None:
        """Answer requests until SIGTERM, Ctrl-C or stop(). May run on any thread; signals come to
        the main one.

        `port` 0 is any free port. `metrics_port`: where Prometheus reads /metrics over HTTP. None:
        the port after `port`; -1: nowhere. HTTPS needs both files. ConfigError and InputError for
        wrong values, before anything is answered.
        """
        address = checked_address(host, port, ssl_keyfile, ssl_certfile)
        if log_level not in LOG_LEVELS:
            raise ConfigError(
                f"log_level = {log_level!r}", ", ".join(LOG_LEVELS), "Pass one of these."
            )
        with contextlib.ExitStack() as opened:
            at = opened.enter_context(address.open())
            url = address.url(at)
            config = address.config(self.app, log_level)
            self._server = uvicorn.Server(config)
            where = f"serving {', '.join(self.inference_map)} at {url}/v1"
            if metrics_port != -1:
                following = at.getsockname()[1] + 1
                serve_figures(opened, self._state.metrics, host, metrics_port or following)
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                self._calls.loop = runner.get_loop()
                opened.callback(setattr, self._calls, "loop", None)
                runner.run(run_until_drained(self._server, at, self._state, where))

    def stop(self) -> None:
        """End fire(), from any thread."""
        if self._server is not None:
            self._server.should_exit = True

    async def available_inference(self) -> Response:
        """Return the list of models, as GET /v1/models."""
        return await self._calls.get("/v1/models")

    async def chat_completions(self, request: RequestFields) -> Response:
        """Answer a chat (ChatCompletionRequest), as POST /v1/chat/completions."""
        return await self._calls.post("/v1/chat/completions", request)

    async def completions(self, request: RequestFields) -> Response:
        """Complete prompts (CompletionRequest), as POST /v1/completions."""
        return await self._calls.post("/v1/completions", request)

    async def count_tokens(self, request: RequestFields) -> Response:
        """Count the tokens of a conversation (CountTokenRequest), as POST /v1/count_tokens."""
        return await self._calls.post("/v1/count_tokens", request)

    async def liveness(self) -> Response:
        """Return whether the process answers, as GET /liveness."""
        return await self._calls.get("/liveness")

    async def readiness(self) -> Response:
        """Return whether requests are answered, as GET /readiness; status 503 if not."""
        return await self._calls.get("/readiness")

    def _routes(self, state: AppState) -> APIRouter:
        """The routes whose answers have a documented form of their own."""
        router = APIRouter()

        @router.post("/v1/count_tokens")
        async def count_conversation(body: ConversationBody, request: Request) -> Response:
            def answer() -> Response:
                headers = check_unknown(body, state.settings)
                model = state.models.find(body.model)
                whole = "".join(texts_of(body.conversation))
                check_text_lengths([whole], model, "conversation")
                count = self.inference_map[model.name].count_tokens(
                    body.conversation, self.oai_like_processor
                )
                return as_json({"model": model.name, "count": count}, headers)

            return await state.lanes.of(request.scope).run(answer)

        @router.get("/v1/models")
        async def inferences() -> Response:
            data = [{**model_record(one), "permission": []} for one in state.models]
            return as_json({"object": "list", "data": data})

        @router.get("/readiness")
        async def ready() -> Response:
            if state.is_ready:
                return as_json({"status": "ready"})
            return probe(False, {"models": {one.name: one.status for one in state.models}})

        return router


def texts_of(conversation: str | Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of a conversation, as contents and in their parts."""
    if isinstance(conversation, str):
        yield conversation
        return
    for message in conversation:
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def checked_inferences(
    given: Mapping[str, vInference] | vInference | None,
) -> dict[str, vInference]:
    """The inferences by name. AssertionError for none, and for a value of another type."""
    if isinstance(given, vInference):
        return {given.inference_name: given}
    if not given:
        raise MissingSettingError(
            "no inference",
            "inference_map or inference_init_call",
            "Pass a vInference, or {name: vInference}.",
        )
    for name, one in given.items():
        if not isinstance(one, vInference):
            raise MissingSettingError(
                f"inference_map[{name!r}] of type {type(one).__name__}",
                "a vInference",
                "Pass {name: vInference}.",
            )
    return dict(given)


def served_model(name: str, inference: vInference) -> ServedModel:
    """An inference's LLM under a name. UnsupportedError without one."""
    if inference.llm is None:
        raise UnsupportedError(
            f"the inference {name!r}, whose model is not an LLM",
            "vInference(llm, ...) with an LLM of engine 'vinference'",
            "Make it with vInference(LLM(..., engine='vinference'), processor).",
        )
    model = ServedModel(name, inference.llm)
    model.warmup = "lazy"
    return model


def checked_address(
    host: str, port: int, ssl_keyfile: str | None, ssl_certfile: str | None
) -> Address:
    """Where a server listens. ConfigError for one of the two files without the other."""
    if (ssl_keyfile is None) != (ssl_certfile is None):
        given = "ssl_certfile" if ssl_keyfile is None else "ssl_keyfile"
        raise ConfigError(
            f"{given} alone", "ssl_keyfile and ssl_certfile, or neither", "Pass both."
        )
    address = Address(host, port, tls_cert=ssl_certfile, tls_key=ssl_keyfile)
    address.check_tls()
    return address


def serve_figures(opened: contextlib.ExitStack, figures: Metrics, host: str, port: int) -> None:
    """Serve the figures until `opened` closes; a warning without prometheus_client.

    They have no pages: the caches of these engines are contiguous.
    """
    try:
        check_installed()
    except UnsupportedError as error:
        log.warning("%s", error)
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(figures)
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"metrics_port = {port}, which cannot be opened at {host} ({error})",
            "a free port, or -1 for none",
            "Pass another metrics_port.",
        ) from None
    opened.callback(thread.join)
    opened.callback(server.server_close)
    opened.callback(server.shutdown)
