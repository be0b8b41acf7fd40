"""The section of the engine "oengine"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PagedOptions(BaseModel):
    """Options of the paged engine. The size of the cache is given in one way: num_pages,
    cache_bytes or memory_utilization.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: int = Field(
        default=64,
        ge=8,
        le=256,
        multiple_of=8,
        description="tokens a page; prefixes are shared by full pages",
    )
    num_pages: int | None = Field(
        default=None,
        ge=2,
        description="pages of the cache, with the one that stands for none; groups of layers with "
        "a window get what max_num_seqs rows need",
    )
    cache_bytes: int | None = Field(
        default=None, ge=1, description="bytes of the cache on each device"
    )
    memory_utilization: float | None = Field(
        default=None,
        gt=0.0,
        le=1.0,
        description="share of each device's free memory for weights, cache and steps together; the "
        "cache gets no more than max_num_seqs requests of max_model_len tokens need; unset: 0.85",
    )
    grow: bool = Field(
        default=True,
        description="on a CPU, start with the cache's first 128 MiB, and allocate the rest when it "
        "is needed; False allocates all at once, as other devices do",
    )
    reserve_all: bool = Field(
        default=False,
        description="promise a request all pages that it can need when it is admitted, so that "
        "none is preempted; otherwise its prompt's, and more as it grows",
    )
    prefix_caching: bool = Field(
        default=True,
        description="keep full pages after their request, for others that begin with the same "
        "tokens",
    )
    state_snapshot_tokens: int = Field(
        default=512,
        ge=8,
        description="of a model with a recurrent state: prompts are cut after so many tokens, "
        "rounded up to pages, to keep a copy of the state that others can go on from",
    )
    num_state_snapshots: int | None = Field(
        default=None,
        ge=0,
        description="copies of recurrent states that are kept at most; unset: 4 for each of "
        "max_num_seqs rows",
    )
    prefix_ttl_s: float | None = Field(
        default=None,
        gt=0.0,
        description="seconds that an unused page is kept; unset: until its room is needed",
    )

    @model_validator(mode="after")
    def _one_way_of_sizing(self) -> Self:
        check_one_size(self, ("num_pages", "cache_bytes", "memory_utilization"))
        return self


def check_one_size(options: BaseModel, ways: Sequence[str]) -> None:
    """ValueError when more than one of the options `ways`, which size the cache, was given."""
    given = [w for w in ways if w in options.model_fields_set and getattr(options, w) is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} both size the cache: give one of {', '.join(ways)}"
        )
