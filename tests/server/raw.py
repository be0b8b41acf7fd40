"""Raw ASGI requests, of which the test decides when the client leaves and how slowly it sends."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class RawClient:
    """One HTTP request to an application. Belongs to one event loop."""

    def __init__(
        self, app: Any, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> None:
        self._app = app
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
        }
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": data, "more_body": False})
        self.status: int | None = None
        self.body = b""
        self.has_body = asyncio.Event()
        self.reads = asyncio.Event()
        """Cleared, the client takes nothing more after its first bytes."""
        self.reads.set()
        self.task = asyncio.ensure_future(app(self.scope, self.messages.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
            self.has_body.set()
            await self.reads.wait()

    def leave(self) -> None:
        """Close the connection."""
        self.messages.put_nowait({"type": "http.disconnect"})
