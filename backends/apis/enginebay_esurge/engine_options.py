"""Options of the engine "esurge"."""

from __future__ import annotations

import copy
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from enginebay_paged.options import PagedOptions, check_one_size, check_tiers

NAMES = {"hbm_utilization": "memory_utilization", "enable_prefix_caching": "prefix_caching"}
"""Options with another name than in the paged engine."""


def _like(name: str) -> Any:
    """Return a field of the paged engine's options."""
    return copy.copy(PagedOptions.model_fields[name])


class ESurgeOptions(BaseModel):
    """The paged engine's options with eSurge's names and defaults. num_pages or cache_bytes
    replaces hbm_utilization.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    page_size: Annotated[int, _like("page_size")] = 128
    hbm_utilization: float = Field(
        default=0.85,
        gt=0.0,
        le=1.0,
        description="share of each device's free memory for weights, cache and steps together; the "
        "cache is at most as large as max_num_seqs requests of max_model_len tokens; unset: the "
        "default size of the paged engine",
    )
    enable_prefix_caching: bool = _like("prefix_caching")
    num_pages: int | None = _like("num_pages")
    cache_bytes: int | None = _like("cache_bytes")
    grow: bool = _like("grow")
    reserve_all: bool = _like("reserve_all")
    prefix_ttl_s: float | None = _like("prefix_ttl_s")
    prefix_idle_s: float | None = _like("prefix_idle_s")
    prefix_host_bytes: int | None = _like("prefix_host_bytes")
    prefix_disk_dir: str | None = _like("prefix_disk_dir")
    prefix_disk_bytes: int = _like("prefix_disk_bytes")
    state_snapshot_tokens: int = _like("state_snapshot_tokens")
    num_state_snapshots: int | None = _like("num_state_snapshots")

    @model_validator(mode="after")
    def _one_way_of_sizing(self) -> Self:
        check_one_size(self, ("num_pages", "cache_bytes", "hbm_utilization"))
        check_tiers(self, caches=self.enable_prefix_caching)
        return self

    def paged(self) -> PagedOptions:
        """Return the same options with the paged engine's names."""
        values = {NAMES.get(name, name): value for name, value in self.model_dump().items()}
        if self.prefix_disk_dir is None:  # without a folder, PagedOptions refuses a size
            del values["prefix_disk_bytes"]
        given = self.model_fields_set
        if "prefix_idle_s" not in given:
            del values["prefix_idle_s"]
        if "hbm_utilization" not in given or self.num_pages is not None or self.cache_bytes:
            values["memory_utilization"] = None  # the paged engine's default is the same share
        return PagedOptions(**values)
