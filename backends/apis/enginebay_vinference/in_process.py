"""Requests to an ASGI application of this process, without a socket and by all of its rules."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel
from starlette.responses import JSONResponse, Response, StreamingResponse

from enginebay.errors import InputError, error_line
from enginebay.serving.reading import in_thread

Result = TypeVar("Result")
AsgiEvent = MutableMapping[str, Any]
Application = Callable[..., Awaitable[None]]

JSON = b"application/json"
STREAM = "text/event-stream"


class WrittenJson(JSONResponse):
    """An answer in JSON whose bytes are written already."""

    def render(self, content: bytes) -> bytes:
        return content


class Exchange:
    """One request to an application, and its answer as messages of ASGI. It belongs to one event
    loop.
    """

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self._messages: asyncio.Queue[AsgiEvent | None] = asyncio.Queue(1)
        self._loop = asyncio.get_running_loop()
        self._error: BaseException | None = None

    async def run(self, app: Application, scope: AsgiEvent) -> None:
        """Let the application answer. Its error is raised where the answer is read."""
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001  # whoever reads the answer gets it
            self._error = error
        if not self._left.is_set():
            await self._put(None)

    async def _receive(self) -> AsgiEvent:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiEvent) -> None:
        await self._put(message)

    async def _put(self, message: AsgiEvent | None) -> None:
        """Wait until the message before was read, or nobody reads any more."""
        putting = asyncio.ensure_future(self._messages.put(message))
        leaving = asyncio.ensure_future(self._left.wait())
        try:
            await asyncio.wait((putting, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()
            leaving.cancel()

    async def next(self) -> AsgiEvent | None:
        """Return the next message; None after the last one. Raises the error that ended the
        answer.
        """
        message = await self._messages.get()
        if message is None and self._error is not None:
            raise self._error
        return message

    def leave(self) -> None:
        """Read no more, from any thread: the application sees that its client has left."""
        try:
            self._loop.call_soon_threadsafe(self._left.set)
        except RuntimeError:  # the event loop has ended, and the application with it
            return


class Parts(AsyncIterator[bytes]):
    """The parts of an answer's body. Dropping or closing them ends the request."""

    def __init__(self, exchange: Exchange, loop: asyncio.AbstractEventLoop) -> None:
        self._exchange, self._loop = exchange, loop
        self._end = weakref.finalize(self, exchange.leave)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            message = await on_loop(self._loop, self._exchange.next())
        except BaseException:
            self._end()
            raise
        if message is None:
            self._end()
            raise StopAsyncIteration
        body: bytes = message.get("body", b"")
        return body

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        self._end()


class InProcess:
    """A client of an application of this process. `loop` is the event loop that answers; None is
    the caller's own. Await all calls on one event loop while `loop` is None.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self.loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, path: str) -> Response:
        """Return the answer to GET `path`."""
        return await self._ask("GET", path, b"")

    async def post(self, path: str, fields: BaseModel | Mapping[str, Any]) -> Response:
        """Return the answer to a POST of `fields` as JSON: a JSONResponse, or a StreamingResponse
        for a stream. InputError for other fields than a mapping or an object of pydantic.
        """
        return await self._ask("POST", path, await in_thread(as_body, fields))

    async def _ask(self, method: str, path: str, body: bytes) -> Response:
        loop = self.loop or asyncio.get_running_loop()
        return await on_loop(loop, self._answer(method, path, body))

    async def _answer(self, method: str, path: str, body: bytes) -> Response:
        exchange = Exchange(body)
        task = asyncio.create_task(exchange.run(self._app, scope_of(method, path, len(body))))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            start = await exchange.next()
            assert start is not None, "an answer begins with its status"
            headers = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
            if headers.get("content-type", "").startswith(STREAM):
                parts = Parts(exchange, asyncio.get_running_loop())
                return StreamingResponse(parts, start["status"], headers)
            read = []
            while (message := await exchange.next()) is not None:
                read.append(message.get("body", b""))
            return WrittenJson(b"".join(read), start["status"], headers)
        except BaseException:
            exchange.leave()
            raise


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, which runs on `loop`."""
    if loop is asyncio.get_running_loop():
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def as_body(fields: BaseModel | Mapping[str, Any]) -> bytes:
    """Return the fields of a request as JSON. InputError for values that JSON has no form for."""
    if isinstance(fields, BaseModel):
        return fields.model_dump_json(exclude_unset=True).encode()
    if isinstance(fields, Mapping):
        try:
            return json.dumps(dict(fields)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _wrong(f"a request with a wrong value ({error_line(error)})") from None
    raise _wrong(f"a request of type {type(fields).__name__}")


def _wrong(given: str) -> InputError:
    todo = 'Pass {"messages": [...]} for a chat, for example.'
    return InputError(given, "a mapping of the fields that the route takes, or its class", todo)


def scope_of(method: str, path: str, num_bytes: int) -> dict[str, Any]:
    """Return the ASGI scope of a request with a body of `num_bytes`."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", JSON), (b"content-length", b"%d" % num_bytes)],
        "client": None,
        "server": None,
    }
