"""The settings of a server: keys, limits, timeouts, and the treatment of unknown fields."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

from enginebay.errors import ConfigError
from enginebay.types import MAX_LOGPROBS

UnknownFields = Literal["refuse", "ignore"]
Warmup = Literal["background", "full", "lazy"]
ToolPrompt = Literal["auto", "none"]
"""Whether a system text describes tools to a model whose chat template has no place for them."""

MAX_SECONDS = 31_536_000
"""Max value of each setting in seconds: a year."""

MAX_COUNT = 2**63 - 1

ORIGIN = re.compile(r"https?://[^/\s?#]+")


@dataclasses.dataclass(frozen=True, slots=True)
class NumberRange:
    """Metadata of a setting that is a number: its range and its meaning. Without a meaning it has
    no flag.
    """

    lowest: float
    highest: float
    meaning: str = ""


def limit(
    default: float, meaning: str = "", *, lowest: float = 1, highest: float = MAX_COUNT
) -> Any:
    """Return the field of a setting that is a number."""
    metadata = {"limit": NumberRange(lowest, highest, meaning)}
    return dataclasses.field(default=default, metadata=metadata)


def seconds(default: float, meaning: str = "", *, lowest: float = 0) -> Any:
    """Return the field of a setting in seconds."""
    return limit(default, meaning, lowest=lowest, highest=MAX_SECONDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The settings of one server. ConfigError for a value outside its range."""

    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """API keys; a client must send one of them. Without keys, every client may send requests."""
    front_key: str | None = dataclasses.field(default=None, repr=False)
    """The only key that a replica accepts. The front sends it, and checks the clients' keys."""
    max_body_bytes: int = limit(8 * 2**20, "max bytes of a request's body")
    max_body_values: int = limit(
        2**18, "max JSON values (numbers, texts, lists and objects) of a request's body"
    )
    max_prompts: int = limit(128, "max prompts of a request")
    max_n: int = limit(16, "max completions of a prompt")
    max_logprobs: int = limit(
        MAX_LOGPROBS,
        "max top tokens with log-probabilities for each token",
        lowest=0,
        highest=MAX_LOGPROBS,
    )
    max_concurrency: int = limit(256, "max HTTP requests that the engine runs at the same time")
    max_queue: int = limit(
        1024, "max HTTP requests that wait; further requests get status 429", lowest=0
    )
    retry_after_s: int = seconds(1, lowest=1)
    """Seconds in the Retry-After header of answers 429 and 503."""
    request_timeout_s: float = seconds(
        600.0, "max time from the body of a request to the end of its answer", lowest=0.001
    )
    body_timeout_s: float = seconds(
        30.0, "max time until a request's body has arrived", lowest=0.001
    )
    unknown_fields: UnknownFields = "refuse"
    response_store: str | None = None
    """SQLite file for stored responses; None stores them in memory."""
    response_journal: Literal["WAL", "TRUNCATE"] = "WAL"
    """Journal of the SQLite file; WAL is for processes of one machine only."""
    max_responses: int = limit(1024, "max stored responses; a new response replaces the oldest")
    max_stored_bytes: int = limit(
        256 * 2**20,
        "max bytes of all stored responses, with their conversations; the oldest are dropped",
        lowest=0,
    )
    response_ttl_s: float = seconds(3600.0, "how long a response is stored")
    cors_origins: tuple[str, ...] = ()
    warmup: Warmup = "background"
    drain_timeout_s: float = seconds(
        30.0, "max time that accepted requests may still run after SIGTERM"
    )
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
        for name, one in LIMITS.items():
            value, lowest, highest = getattr(self, name), one.lowest, one.highest
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


LIMITS = {
    field.name: field.metadata["limit"]
    for field in dataclasses.fields(ServerSettings)
    if "limit" in field.metadata
}
"""The settings that are numbers, with their ranges and meanings."""
