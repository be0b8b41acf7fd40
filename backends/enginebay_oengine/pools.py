"""Pools: how many pages each cache group needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from enginebay.cache import CacheGroup
from enginebay.cache_shape import CacheShape, pages_for
from enginebay.cache_state import StateGroup
from enginebay.config import EngineConfig

SNAPSHOTS_PER_ROW = 4
"""Snapshots of recurrent states that there is room for, where the options say no number."""


@dataclasses.dataclass(frozen=True)
class Pools:
    """Pages that rows of up to max_model_len tokens have at most. Pages have the same number of
    tokens in every group.
    """

    page_size: int
    max_model_len: int
    max_ahead: int | None = None
    """How many tokens launched steps may put into the cache after those that the host has read;
    None: rows keep their pages, in groups with a window too.
    """

    num_snapshots: int = 0
    """Places for snapshots of recurrent states, besides those of the rows."""

    def row_pages(self, window: int | None) -> int:
        """Pages that a row has at most in a cache group with this window."""
        whole = pages_for(self.max_model_len, self.page_size)
        if window is None or self.max_ahead is None:
            return whole
        return min(whole, pages_for(window + self.max_ahead, self.page_size) + 1)

    def kept_window(self, group: CacheGroup) -> int | None:
        """The window of a group whose rows give pages back; None where they keep all: a window that
        no row outgrows saves nothing.
        """
        saves = self.row_pages(group.window) < self.row_pages(None)
        return group.window if saves else None

    def shapes(
        self, num_pages: int, groups: Sequence[CacheGroup | StateGroup], num_rows: int
    ) -> dict[str, CacheShape]:
        """The size of each group's pool: `num_pages` where rows keep all of theirs; otherwise as
        many as `num_rows` rows can have, and the dummy. Places of states are for snapshots, too.
        """
        places = CacheShape(1, 1 + num_rows + self.num_snapshots, self.max_model_len)
        counts: Mapping[str, int] = {
            g.name: num_pages
            if self.kept_window(g) is None
            else 1 + num_rows * self.row_pages(g.window)
            for g in groups
            if isinstance(g, CacheGroup)
        }
        shapes = {name: CacheShape(1, count, self.page_size) for name, count in counts.items()}
        return shapes | {g.name: places for g in groups if isinstance(g, StateGroup)}


def make_pools(config: EngineConfig, page_size: int, num_snapshots: int | None = None) -> Pools:
    """The pools of an engine of this configuration; `num_snapshots` None: SNAPSHOTS_PER_ROW for
    each row.
    """
    assert config.max_model_len is not None, "the composition root resolves max_model_len"
    if num_snapshots is None:
        num_snapshots = SNAPSHOTS_PER_ROW * config.max_num_seqs
    return Pools(page_size, config.max_model_len, config.max_ahead, num_snapshots)
