"""Options of the engine "oengine"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PagedOptions(BaseModel):
    """Options of the paged engine. Set the size of the cache by one of num_pages, cache_bytes and
    memory_utilization.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: int = Field(
        default=64,
        ge=8,
        le=256,
        multiple_of=8,
        description="tokens per page; rows share only the full pages of a prefix",
    )
    num_pages: int | None = Field(
        default=None,
        ge=2,
        description="pages of the cache, including a dummy page; groups of layers with a window "
        "get as many pages as max_num_seqs rows need",
    )
    cache_bytes: int | None = Field(
        default=None, ge=1, description="bytes of the cache on each device"
    )
    memory_utilization: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="share of each device's free memory for weights, cache and steps together; the "
        "cache is at most as large as max_num_seqs requests of max_model_len tokens; unset: 0.85, "
        "and on a CPU at most 1,024 tokens for each of max_num_seqs rows, or one request of "
        "max_model_len tokens if that is more",
    )
    grow: bool = Field(
        default=True,
        description="on a CPU outside Linux, start with 128 MiB of the cache and allocate the rest "
        "when needed; False allocates all at once, as on other devices. On Linux memory is taken "
        "where the cache is written, and nothing grows",
    )
    reserve_all: bool = Field(
        default=False,
        description="reserve all pages that a request may need at its admission, so that no "
        "request is preempted; False reserves pages for the prompt, and more as the output grows",
    )
    prefix_caching: bool = Field(
        default=True,
        description="keep full pages after a request ends, for requests with the same prefix",
    )
    state_snapshot_tokens: int = Field(
        default=512,
        ge=8,
        description="for models with a recurrent state: number of prompt tokens between two "
        "snapshots of the state, rounded up to whole pages; requests with the same prefix go on "
        "from a snapshot",
    )
    num_state_snapshots: int | None = Field(
        default=None,
        ge=0,
        description="max snapshots of recurrent states; unset: 4 times max_num_seqs",
    )
    prefix_ttl_s: float | None = Field(
        default=None,
        gt=0.0,
        description="seconds to keep an unused page; unset: until its space is needed",
    )
    prefix_idle_s: float | None = Field(
        default=300.0,
        gt=0.0,
        description="with idle_release_s, on a Linux CPU, seconds after which an unused page is "
        "freed while no request runs, so that the memory of a load is given back; unset: not for "
        "this reason, as with prefix_host_bytes",
    )
    prefix_host_bytes: int | None = Field(
        default=None,
        ge=1,
        description="bytes of host memory for pages that the cache has no room for; unset: "
        "such pages are dropped",
    )
    prefix_disk_dir: str | None = Field(
        default=None,
        min_length=1,
        description="folder for copies of the pages that go to the host memory; processes may "
        "share it, and later ones find the pages again; unset: none",
    )
    prefix_disk_bytes: int = Field(
        default=10 * 2**30,
        ge=1,
        description="max bytes of the files in prefix_disk_dir; the least recently used ones are "
        "removed",
    )

    @model_validator(mode="after")
    def _one_way_of_sizing(self) -> Self:
        check_one_size(self, ("num_pages", "cache_bytes", "memory_utilization"))
        check_tiers(self, caches=self.prefix_caching)
        return self


def check_tiers(options: BaseModel, *, caches: bool) -> None:
    """Raise ValueError for a tier that needs an option which is not set. `caches`: whether prefixes
    are cached.
    """
    given = options.model_fields_set
    values = options.model_dump()
    if values["prefix_host_bytes"] is not None and not caches:
        raise ValueError(
            "prefix_host_bytes needs prefix caching: turn caching on, or unset prefix_host_bytes"
        )
    if values["prefix_disk_dir"] is not None and values["prefix_host_bytes"] is None:
        raise ValueError("prefix_disk_dir needs prefix_host_bytes: set this option too")
    if "prefix_disk_bytes" in given and values["prefix_disk_dir"] is None:
        raise ValueError("prefix_disk_bytes needs prefix_disk_dir: set the folder too")


def check_one_size(options: BaseModel, ways: Sequence[str]) -> None:
    """Raise ValueError when more than one of the options `ways` is set: each sets the size of the
    cache.
    """
    given = [w for w in ways if w in options.model_fields_set and getattr(options, w) is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot be combined: set one of {', '.join(ways)}")
