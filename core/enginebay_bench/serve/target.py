"""The server that is measured: its address, its model, and the bodies of requests to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from enginebay.errors import InputError
from enginebay_bench.serve.prompts import PromptSpec

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclasses.dataclass(frozen=True)
class ServerTarget:
    """Where requests go. `address` has no path; `api_key` is in no record and no message."""

    address: str
    model: str
    endpoint: Endpoint = "chat"
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of each body."""
    api_key: str | None = dataclasses.field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The address of the endpoint."""
        return self.address + PATHS[self.endpoint]

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each request."""
        key = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return {"content-type": "application/json", "accept": "text/event-stream", **key}

    def body(self, spec: PromptSpec) -> bytes:
        """The body of a streamed request with usage; InputError for messages to `completions`."""
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            messages = spec.messages or ({"role": "user", "content": spec.prompt},)
            fields["messages"] = list(messages)
        elif spec.prompt is None:
            raise InputError(
                "messages with --endpoint completions", "a prompt", "Pass --endpoint chat."
            )
        else:
            fields["prompt"] = spec.prompt
        fields |= {
            "max_tokens": spec.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields | dict(self.extra)).encode()


def parse_address(url: str) -> str:
    """The address of `--url` without `/v1` and a slash at its end; InputError when it is none."""
    address = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(address)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
        _ = parts.port
    except ValueError:
        is_right = False
    if not is_right:
        raise InputError(
            f"--url {url}",
            "http:// or https://, a host and a port",
            "Pass --url http://127.0.0.1:8000.",
        )
    return address
