"""The application in front of the replicas: checks keys, and passes requests and answers on.

Answers pass as they arrive. Nothing is repeated after the first byte of an answer. Before it, a
request is repeated once, and only if its replica ended at once: the request may be what ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import typing
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import orjson
from starlette.middleware.cors import CORSMiddleware

from enginebay.errors import shown
from enginebay_server.anthropic import event
from enginebay_server.app import cors_of
from enginebay_server.errors import ApiError, to_json
from enginebay_server.generation import client_left, gone
from enginebay_server.ingress import PROBES, App, IngressMiddleware, Receive, Send
from enginebay_server.json_bodies import check_values
from enginebay_server.lanes import LARGE_BYTES, Lanes, Result
from enginebay_server.replicas.adapters import LOAD, UNLOAD, SharedAdapters, names_adapter
from enginebay_server.replicas.exchange import BrokenError, Headers
from enginebay_server.replicas.figures import metrics_of, page_data
from enginebay_server.replicas.router import PlacedRequest, Router
from enginebay_server.replicas.table import Replica, ReplicaTable
from enginebay_server.settings import ServerSettings

log = logging.getLogger("enginebay.server")

BALANCED = {
    "/v1/chat/completions": ("tools", "messages"),
    "/v1/completions": ("prompt",),
    "/v1/responses": ("instructions", "tools", "input"),
    "/v1/messages": ("system", "tools", "messages"),
    "/v1/embeddings": ("input",),
}
"""Paths that run a model, and the fields that its prompt is made of, in their order."""

OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"transfer-encoding"))
"""Headers that belong to one connection and are not passed on."""
NOT_FORWARDED = OF_CONNECTIONS | frozenset(
    (b"host", b"authorization", b"x-api-key", b"content-length", b"expect", b"upgrade", b"te")
)
NOT_RETURNED = OF_CONNECTIONS | {b"x-request-id"}
EVENT_END = b"\n\n"
MAX_PLACED_CHARS = 1 << 18
"""The router gets so many characters of a prompt at most."""
REPEAT_S = 1.0
"""A request whose replica ends within this time is sent once more, to another replica."""


class Content(typing.NamedTuple):
    """A body, and what the front needs of it: the model that it names, and the text for the router.
    The fields themselves are not kept while the request is answered.
    """

    body: bytes
    model: str | None = None
    text: str = ""


@dataclasses.dataclass(slots=True)
class ProxyState:
    """The state of the front; see AppState."""

    settings: ServerSettings
    table: ReplicaTable
    router: Router
    names: Sequence[str]
    """Names of the models."""
    adapters: SharedAdapters | None = None
    """None: clients may not load adapters."""
    is_draining: bool = False
    num_open: int = 0
    body_bytes: int = 0
    forwards: set[ProxiedRequest] = dataclasses.field(default_factory=set)
    lanes: Lanes = dataclasses.field(default_factory=Lanes)

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return not self.is_draining and bool(self.table.ready)

    async def end_all(self) -> None:
        """End the requests that are being answered."""
        ended = ApiError(503, "the server has ended", code="engine_stopped")
        for forward in list(self.forwards):
            forward.stop(ended)


class ReplicaProxy:
    """The ASGI application after Door, which has read the whole body."""

    def __init__(self, state: ProxyState) -> None:
        self._state = state

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path, is_get = scope["path"], scope["method"] == "GET"
        if is_get and path in PROBES:
            await self._probe(path, send)
        elif is_get and path == "/metrics":
            text = await metrics_of(self._state.table)
            await answer(send, 200, text, b"text/plain; version=0.0.4; charset=utf-8")
        elif is_get and path == "/ui/data":
            since = dict_of(scope["query_string"]).get("since", "")
            state = self._state
            data = await page_data(state.table, state.names, since, is_ready=state.is_ready)
            await answer(send, 200, orjson.dumps(data))
        else:
            body = (await receive()).get("body", b"")
            if scope["method"] == "POST" and await self._change(scope, body, send):
                return
            content, fields = Content(body), BALANCED.get(path)
            if fields is not None and scope["method"] == "POST":
                content = await self._read(content_of, body, fields)
            await self._forward(scope, content, receive, send)

    async def _read(self, read: Callable[..., Result], body: bytes, *args: Any) -> Result:
        """Return read(body, max values of a body, *args); a large body is read on its lane."""
        call = functools.partial(read, body, self._state.settings.max_body_values, *args)
        return await self._state.lanes.large.run(call) if len(body) > LARGE_BYTES else call()

    async def _change(self, scope: Mapping[str, Any], body: bytes, send: Send) -> bool:
        """Load or unload an adapter in every replica. Returns False for another path."""
        adapters, path = self._state.adapters, scope["path"]
        texts = {LOAD: ("lora_name", "lora_path"), UNLOAD: ("lora_name",)}.get(path)
        if adapters is None or texts is None:
            return False
        record = await self._read(record_of, body)
        given = texts if record.get("model") is None else (*texts, "model")
        for name in given:  # a wrong body is not forwarded: a replica might read it differently
            if not isinstance(record.get(name), str):
                raise ApiError(
                    400,
                    f"{name} = {shown(record.get(name))}. Allowed: a text, in a JSON object with "
                    f"{' and '.join(texts)}. Send {name} as text.",
                    param=name,
                )
        users = (
            forward.replica.number
            for forward in self._state.forwards
            if names_adapter(forward.model, record["lora_name"])
        )
        answer = await adapters.change(path, record, forwarded(scope), users)
        await pass_whole(send, answer.status, answer.headers, answer.body)
        return True

    async def _forward(
        self, scope: MutableMapping[str, Any], content: Content, receive: Receive, send: Send
    ) -> None:
        watcher = asyncio.create_task(gone(receive))
        try:
            forward = await self._try(scope, content, send, watcher)
            if forward.may_repeat:
                forward = await self._try(scope, content, send, watcher)
            if not forward.has_begun:
                raise forward.error
        finally:
            watcher.cancel()

    async def _try(
        self, scope: Mapping[str, Any], content: Content, send: Send, watcher: asyncio.Task[None]
    ) -> ProxiedRequest:
        """Send the request to a replica, and pass its answer on. ApiError 503 without a replica."""
        model, adapters = None, self._state.adapters
        if adapters is not None and scope["path"] in BALANCED:
            model = content.model
            await adapters.settled(model)
        forward = ProxiedRequest(await self._place(scope, content), scope["path"], model)
        self._state.forwards.add(forward)

        def leave(done: asyncio.Task[None]) -> None:
            if not done.cancelled():
                forward.stop(client_left())

        watcher.add_done_callback(leave)
        try:
            await forward.run(scope, content.body, send)
        finally:
            watcher.remove_done_callback(leave)
            self._state.forwards.discard(forward)
            forward.close()
        return forward

    async def _place(self, scope: Mapping[str, Any], content: Content) -> PlacedRequest:
        """Choose a replica, and connect to it. ApiError 503 without a replica."""
        router, fields = self._state.router, BALANCED.get(scope["path"])
        placement = None
        if fields is not None and scope["method"] == "POST":
            placement = await router.place(content.text)
        for _ in range(len(self._state.table) + 1):
            placement = placement or router.place_anywhere()
            if placement is None:
                break
            try:
                await placement.connect()
            except BrokenError as error:
                log.warning("%s", error)
                placement.end()
                placement = None
            else:
                return placement
        raise ApiError(
            503,
            "no replica listens: all of them are being started",
            code="model_not_ready",
            retry_after_s=self._state.settings.retry_after_s,
        )

    async def _probe(self, path: str, send: Send) -> None:
        table, state = self._state.table, self._state
        replicas = {str(one.number): one.state for one in table}
        if path == "/liveness":
            await answer(send, 200, orjson.dumps({"status": "alive"}))
            return
        if path == "/health":
            is_good = bool(table.listening)
            status = dict.fromkeys(state.names, "alive" if is_good else "dead")
            record: dict[str, Any] = {"models": status}
        else:
            is_good = state.is_ready
            readiness = [one.readiness for one in (*table.ready, *table.listening) if one.readiness]
            waiting = {name: {"ready": False, "warmup": "waiting"} for name in state.names}
            models = readiness[0]["models"] if readiness else waiting
            record = {"draining": state.is_draining, "models": models}
        text = "ok" if is_good else "unavailable"
        record = {"status": text, **record, "replicas": replicas}
        await answer(send, 200 if is_good else 503, orjson.dumps(record))


class ProxiedRequest:
    """One request at one replica."""

    def __init__(self, placement: PlacedRequest, path: str, model: str | None) -> None:
        """`model`: the name in the body; it is read only where clients may load adapters."""
        self._placement = placement
        self._path = path
        self.model = model
        self._connection = placement.connection
        self._stopped: ApiError | None = None
        self._sent_s = self._broken_s = 0.0
        self.has_begun = False
        """Whether the client has got the head of the answer, or has left."""

    @property
    def replica(self) -> Replica:
        """The replica that answers the request."""
        return self._placement.replica

    @property
    def may_repeat(self) -> bool:
        """Whether the replica ended so soon after it got the request that it had probably been
        ended before: the kernel takes connections of a killed process for a while.
        """
        return (
            not self.has_begun
            and self._stopped is None
            and self._broken_s - self._sent_s < REPEAT_S
        )

    @property
    def error(self) -> ApiError:
        """Why there is no answer, or not all of it."""
        return self._stopped or ApiError(
            503,
            f"replica {self._placement.replica.number} ended before its answer was complete",
            code="replica_failed",
            retry_after_s=1,
        )

    def stop(self, error: ApiError) -> None:
        """End the request with an error; the replica ends it too."""
        self._stopped = self._stopped or error
        self._connection.close()

    def close(self) -> None:
        """Give the connection back, and end the placement."""
        self._placement.end()

    async def run(self, scope: Mapping[str, Any], body: bytes, send: Send) -> None:
        """Send the request, and pass the answer on. If the replica ends before the first byte of
        its answer, nothing is sent; if it ends later, the last event of the stream is an error.
        """
        self._sent_s = asyncio.get_running_loop().time()
        try:
            status, headers = await self._send(scope, body)
            whole = None if is_stream(headers) else await self._connection.whole()
        except BrokenError:
            self._break()
            return
        self.has_begun = True
        if whole is not None:
            await pass_whole(send, status, headers, whole)
            return
        await pass_head(send, status, headers)
        await self._pass_events(send)

    def _break(self) -> None:
        """Note when the connection broke, and that the replica has ended."""
        self._broken_s = asyncio.get_running_loop().time()
        if self._stopped is None:
            self._placement.replica.lose()

    async def _send(self, scope: Mapping[str, Any], body: bytes) -> tuple[int, Headers]:
        query = scope.get("query_string", b"").decode("latin-1")
        raw = scope.get("raw_path") or scope["path"].encode()
        target = raw.decode("latin-1") + (f"?{query}" if query else "")
        headers = [*self._placement.replica.headers(), *forwarded(scope)]
        return await self._connection.send(scope["method"], target, headers, body)

    async def _pass_events(self, send: Send) -> None:
        """Pass whole events on; an event reports the end of the replica."""
        rest, num_events = b"", 0
        try:
            while chunk := await self._connection.chunk():
                rest += chunk
                end = rest.rfind(EVENT_END) + len(EVENT_END)
                if end < len(EVENT_END):
                    continue
                body, rest = rest[:end], rest[end:]
                num_events += body.count(EVENT_END)
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except BrokenError:
            self._break()
            error = self.error
            log.warning("a stream of %s failed: %s", self._path, error)
            rest = error_event(self._path, error, num_events)
        await send({"type": "http.response.body", "body": rest})


def error_event(path: str, error: ApiError, number: int) -> bytes:
    """Return the event of an error that ends a stream, in the form of the API of a path. `number`
    is the number of events before it.
    """
    if path.startswith("/v1/messages"):
        return event("error", {"error": error.anthropic_body["error"]})
    if path.startswith("/v1/responses"):
        record = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return event("error", {"sequence_number": number, **record})
    return b"data: " + to_json(error.body) + EVENT_END


def content_of(body: bytes, max_values: int, fields: Sequence[str]) -> Content:
    """Return what the front needs of a body whose prompt is made of `fields`. ApiError 400 for one
    of more than `max_values` values.
    """
    record = record_of(body, max_values)
    named = record.get("model")
    return Content(body, named if isinstance(named, str) else None, prompt_text(record, fields))


def prompt_text(record: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Return a text of at most MAX_PLACED_CHARS characters, in which two bodies are equal at the
    beginning if their prompts are. A body that is wrong has any text; the replica refuses it.
    """
    names, parts, room = ("model", "cache_salt", *fields), [], MAX_PLACED_CHARS
    for name in names:
        if name in record and room > 0:
            parts.append(to_json(record[name]).decode()[:room])
            room -= len(parts[-1])
    return "".join(parts)


def record_of(body: bytes, max_values: int) -> dict[str, Any]:
    """Return the fields of a body; an empty record if the body is no JSON object. ApiError 400 for
    one of more than `max_values` values.
    """
    check_values(body, max_values)
    with contextlib.suppress(orjson.JSONDecodeError):
        record = orjson.loads(body)
        if isinstance(record, dict):
            return record
    return {}


def forwarded(scope: Mapping[str, Any]) -> Headers:
    """Return the headers of a client's request that a replica gets."""
    return [one for one in scope["headers"] if one[0] not in NOT_FORWARDED]


async def pass_head(send: Send, status: int, headers: Headers) -> None:
    """Send the beginning of a replica's answer."""
    returned = [one for one in headers if one[0] not in NOT_RETURNED]
    await send({"type": "http.response.start", "status": status, "headers": returned})


async def pass_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Send a replica's whole answer."""
    await pass_head(send, status, headers)
    await send({"type": "http.response.body", "body": body})


def is_stream(headers: Headers) -> bool:
    """Whether an answer is a stream of events."""
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def dict_of(query: bytes) -> dict[str, str]:
    """Return the fields of a query that have no escapes, as those of the page."""
    pairs = (part.partition("=") for part in query.decode("latin-1").split("&"))
    return {name: value.replace("%2C", ",") for name, _, value in pairs}


async def answer(
    send: Send, status: int, body: bytes, media_type: bytes = b"application/json"
) -> None:
    """Send a whole answer."""
    headers = [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def proxy_app(state: ProxyState) -> App:
    """Return the application with its checks, and CORS if the settings name origins."""
    app: App = IngressMiddleware(
        ReplicaProxy(state), state, takes_json=()
    )  # replicas check the types of bodies
    return CORSMiddleware(app, **cors_of(state.settings)) if state.settings.cors_origins else app
