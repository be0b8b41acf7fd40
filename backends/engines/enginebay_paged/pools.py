"""Pools: the number of pages of each cache group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from enginebay.config import EngineConfig
from enginebay.contracts.cache import CacheGroup
from enginebay.contracts.cache_shape import CacheShape, pages_for
from enginebay.contracts.cache_state import StateGroup

SNAPSHOTS_PER_ROW = 4
"""Default number of snapshots of recurrent states per row."""


@dataclasses.dataclass(frozen=True)
class Pools:
    """Max pages of rows of up to max_model_len tokens. A page has the same number of tokens in
    every group.
    """

    page_size: int
    max_model_len: int
    max_ahead: int | None = None
    """Max tokens that launched steps write after the tokens that the host has read. None: rows keep
    all pages, even in groups with a window.
    """

    num_snapshots: int = 0
    """Places for snapshots of recurrent states, in addition to the rows' places."""

    def row_pages(self, window: int | None) -> int:
        """Return the max pages of a row in a cache group with this window."""
        whole = pages_for(self.max_model_len, self.page_size)
        if window is None or self.max_ahead is None:
            return whole
        return min(whole, pages_for(window + self.max_ahead, self.page_size) + 1)

    def kept_window(self, group: CacheGroup) -> int | None:
        """Return the window of a group whose rows release pages. None if rows keep all pages, for
        example because no row outgrows the window.
        """
        saves = self.row_pages(group.window) < self.row_pages(None)
        return group.window if saves else None

    def shapes(
        self, num_pages: int, groups: Sequence[CacheGroup | StateGroup], num_rows: int
    ) -> dict[str, CacheShape]:
        """Return the size of each group's pool: `num_pages` where rows keep all pages, and
        otherwise the max pages of `num_rows` rows, plus the dummy page. A group with a state has a
        place for each row and each snapshot.
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
    """Return the Pools of a configuration; `num_snapshots` None is SNAPSHOTS_PER_ROW for
    each row.
    """
    assert config.max_model_len is not None, "the composition root resolves max_model_len"
    if num_snapshots is None:
        num_snapshots = SNAPSHOTS_PER_ROW * config.max_num_seqs
    return Pools(page_size, config.max_model_len, config.max_ahead, num_snapshots)
