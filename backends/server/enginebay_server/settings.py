"""The settings of a server: keys, limits, timeouts, and the treatment of unknown fields."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from enginebay.errors import ConfigError
from enginebay.types import MAX_LOGPROBS

UnknownFields = Literal["refuse", "ignore"]
Warmup = Literal["full", "lazy"]

MAX_SECONDS = 31_536_000
"""Max value of each setting in seconds: a year."""

MAX_COUNT = 2**63 - 1

RANGES: dict[str, tuple[float, float]] = {
    "max_body_bytes": (1, MAX_COUNT),
    "max_body_values": (1, MAX_COUNT),
    "max_prompts": (1, MAX_COUNT),
    "max_n": (1, MAX_COUNT),
    "max_logprobs": (0, MAX_LOGPROBS),
    "max_concurrency": (1, MAX_COUNT),
    "max_queue": (0, MAX_COUNT),
    "max_responses": (1, MAX_COUNT),
    "max_stored_bytes": (0, MAX_COUNT),
    "response_ttl_s": (0, MAX_SECONDS),
    "retry_after_s": (1, MAX_SECONDS),
    "request_timeout_s": (0.001, MAX_SECONDS),
    "body_timeout_s": (0.001, MAX_SECONDS),
    "drain_timeout_s": (0, MAX_SECONDS),
}
"""The lowest and the highest value of each number."""

ORIGIN = re.compile(r"https?://[^/\s?#]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of one server. ConfigError for a value outside its range."""

    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """API keys; a client must send one of them. Without keys, every client may send requests."""
    front_key: str | None = dataclasses.field(default=None, repr=False)
    """The only key that a replica accepts. The front sends it, and checks the clients' keys."""
    max_body_bytes: int = 8 * 2**20
    max_body_values: int = 2**18
    """Max JSON values (numbers, texts, lists and objects) of a body."""
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
    response_journal: Literal["WAL", "TRUNCATE"] = "WAL"
    """Journal of the SQLite file; WAL is for processes of one machine only."""
    max_responses: int = 1024
    """Max number of stored responses; the oldest is dropped."""
    max_stored_bytes: int = 256 * 2**20
    """Max bytes of all stored responses, with their conversations; the oldest are dropped."""
    response_ttl_s: float = 3600.0
    """Seconds that a response is stored."""
    cors_origins: tuple[str, ...] = ()
    warmup: Warmup = "full"
    drain_timeout_s: float = 30.0
    """Seconds that accepted requests have to end after SIGTERM."""
    traces_url: str | None = None
    """Where spans are sent by OTLP over HTTP; None: nowhere."""
    lora_routes: bool = False
    """Whether clients may load and unload adapters, from any folder that the server can read."""
    usage_times: bool = False
    """Whether `usage` of chats and completions also has processing_time and tokens_per_second."""

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """The keys of which a request needs one; without any, no key is needed."""
        return self.api_keys if self.front_key is None else (self.front_key,)

    def __post_init__(self) -> None:
        for name, (lowest, highest) in RANGES.items():
            value = getattr(self, name)
            if not lowest <= value <= highest:
                flag = f"--{name.removesuffix('_s').replace('_', '-')}"
                raise ConfigError(
                    f"{name} = {value}",
                    f"{lowest} or more" if highest == MAX_COUNT else f"{lowest} to {highest}",
                    f"Pass {flag} {lowest if value < lowest else highest}.",
                )
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins with {origin!r}",
                    "the address of a web site without a path, or * for every site",
                    "Pass --cors-origin https://site.example.",
                )
