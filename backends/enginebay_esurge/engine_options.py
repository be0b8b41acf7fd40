"""The section of the engine "esurge"."""

from __future__ import annotations

import copy
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from enginebay_oengine.options import PagedOptions


def _like(name: str) -> Any:
    """A field of the paged engine's options."""
    return copy.copy(PagedOptions.model_fields[name])


class ESurgeOptions(BaseModel):
    """The paged engine's options under eSurge's names, with its defaults. num_pages or cache_bytes
    replace hbm_utilization.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: int = Field(
        default=128,
        ge=8,
        le=256,
        multiple_of=8,
        description="tokens a page; prefixes are shared by full pages",
    )
    hbm_utilization: float = Field(
        default=0.85,
        gt=0.0,
        le=1.0,
        description="share of each device's free memory for weights, cache and steps together; the "
        "cache gets no more than max_num_seqs requests of max_model_len tokens need",
    )
    enable_prefix_caching: bool = _like("prefix_caching")
    num_pages: int | None = _like("num_pages")
    cache_bytes: int | None = _like("cache_bytes")
    grow: bool = _like("grow")
    reserve_all: bool = _like("reserve_all")
    prefix_ttl_s: float | None = _like("prefix_ttl_s")
    state_snapshot_tokens: int = _like("state_snapshot_tokens")
    num_state_snapshots: int | None = _like("num_state_snapshots")

    @model_validator(mode="after")
    def _one_way_of_sizing(self) -> Self:
        ways = ("num_pages", "cache_bytes", "hbm_utilization")
        given = [
            name
            for name in ways
            if name in self.model_fields_set and getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)} both size the cache: give one of {', '.join(ways)}"
            )
        return self

    def paged(self) -> PagedOptions:
        """The same under the paged engine's names."""
        is_sized = self.num_pages is not None or self.cache_bytes is not None
        return PagedOptions(
            page_size=self.page_size,
            num_pages=self.num_pages,
            cache_bytes=self.cache_bytes,
            memory_utilization=None if is_sized else self.hbm_utilization,
            grow=self.grow,
            reserve_all=self.reserve_all,
            prefix_caching=self.enable_prefix_caching,
            prefix_ttl_s=self.prefix_ttl_s,
            state_snapshot_tokens=self.state_snapshot_tokens,
            num_state_snapshots=self.num_state_snapshots,
        )
