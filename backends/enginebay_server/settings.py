"""The settings of a server: keys, limits, timeouts, and the treatment of unknown fields."""

from __future__ import annotations

import dataclasses
from typing import Literal

from enginebay.errors import ConfigError
from enginebay.types import MAX_LOGPROBS

UnknownFields = Literal["refuse", "ignore"]
Warmup = Literal["full", "lazy"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of one server. ConfigError for a value outside its range."""

    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """API keys; a client must send one of them. Without keys, every client may send requests."""
    max_body_bytes: int = 8 * 2**20
    max_prompts: int = 128
    """Max number of prompts of an HTTP request."""
    max_n: int = 16
    """Max number of completions of a prompt."""
    max_logprobs: int = MAX_LOGPROBS
    max_concurrency: int = 256
    """Max number of HTTP requests in the engine at the same time."""
    max_queue: int = 1024
    """Max number of HTTP requests that wait for a place; further ones are answered with 429."""
    retry_after_s: int = 1
    """Seconds in the Retry-After header of answers 429 and 503."""
    request_timeout_s: float = 600.0
    """Max seconds from the body of a request to the end of its answer."""
    body_timeout_s: float = 30.0
    """Max seconds from the head of a request to the end of its body."""
    unknown_fields: UnknownFields = "refuse"
    response_store: str | None = None
    """SQLite file for stored responses; None stores them in memory."""
    max_responses: int = 1024
    """Max number of stored responses; the oldest is dropped."""
    response_ttl_s: float = 3600.0
    """Seconds that a response is stored."""
    cors_origins: tuple[str, ...] = ()
    warmup: Warmup = "full"
    drain_timeout_s: float = 30.0
    """Seconds that accepted requests have to end after SIGTERM."""
    traces_url: str | None = None
    """Where spans are sent by OTLP over HTTP; None: nowhere."""

    def __post_init__(self) -> None:
        for name, lowest in (
            ("max_body_bytes", 1),
            ("max_prompts", 1),
            ("max_n", 1),
            ("max_logprobs", 0),
            ("max_concurrency", 1),
            ("max_queue", 0),
            ("max_responses", 1),
            ("response_ttl_s", 0),
            ("retry_after_s", 1),
            ("request_timeout_s", 0.001),
            ("body_timeout_s", 0.001),
            ("drain_timeout_s", 0),
        ):
            value = getattr(self, name)
            if not value >= lowest:
                raise ConfigError(f"{name} = {value}", f"{lowest} or more", "Pass a larger value.")
        if self.max_logprobs > MAX_LOGPROBS:
            raise ConfigError(
                f"max_logprobs = {self.max_logprobs}",
                f"0 to {MAX_LOGPROBS}",
                f"Pass --max-logprobs {MAX_LOGPROBS}.",
            )
