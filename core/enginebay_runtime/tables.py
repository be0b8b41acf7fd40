"""Page tables on the device, one per cache group. Commands bring only the entries that changed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache_shape import pages_for
from enginebay.contracts.executor import Layouts
from enginebay.ops.spec import Bucket

Tables = Mapping[str, jax.Array]
"""By cache group, int32 [rows, pages]: the page of each page_size positions of a row."""


def max_changes(bucket: Bucket) -> int:
    """Return how many changed entries of one group's table a step of this bucket can bring. If a
    group has more, its entries are written before the step.
    """
    return 16 + 2 * bucket.seqs


class ResidentTables:
    """The page tables of a runner's rows, with a copy on the host."""

    def __init__(self, num_rows: int, sharding: Any) -> None:
        self._num_rows, self._sharding = num_rows, sharding
        self._copies: dict[str, np.ndarray] = {}

    def forget(self, page_sizes: Mapping[str, int], max_model_len: int) -> None:
        """Start with new tables for pages of these sizes, by group. All entries are 0."""
        self._copies = {
            g: np.zeros((self._num_rows, pages_for(max_model_len, size)), np.int32)
            for g, size in page_sizes.items()
        }
        self._no_changes = functools.cache(self._make_no_changes)

    def whole(self, groups: Iterable[str] | None = None) -> Tables:
        """Send the current tables of `groups` to the device, and return them. None: all groups."""
        names = self._copies if groups is None else groups
        return {g: jax.device_put(self._copies[g].copy(), self._sharding) for g in names}

    def write(self, tables: Tables, changes: Mapping[str, np.ndarray]) -> Tables:
        """Return `tables` after writing changed entries (row, column, page) int32 [n, 3]."""
        self.note(changes)
        return {**tables, **self.whole(changes)}

    def note(self, changes: Mapping[str, np.ndarray]) -> None:
        """Write changed entries (row, column, page) int32 [n, 3] to the copy on the host."""
        for group, entries in changes.items():
            self._copies[group][entries[:, 0], entries[:, 1]] = entries[:, 2]

    def of_rows(self, row_ids: np.ndarray, num_pages: int) -> Mapping[str, np.ndarray]:
        """Return the first num_pages entries of each of these rows, int32 [rows, num_pages] by
        group; zeros for a row id past the end.
        """
        found = {}
        for group, table in self._copies.items():
            rows = table[np.minimum(row_ids, self._num_rows - 1), :num_pages]
            found[group] = np.where(row_ids[:, None] < self._num_rows, rows, 0)
        return found

    def padded(self, changes: Mapping[str, np.ndarray], num: int) -> dict[str, Any]:
        """Return the changes of every group as int32 [num, 3]. Padding entries have a row past the
        end.
        """
        padded: dict[str, Any] = {}
        for group in self._copies:
            entries = changes.get(group)
            if entries is None:
                padded[group] = self._no_changes(num)
                continue
            padded[group] = np.full((num, 3), self._num_rows, np.int32)
            padded[group][: len(entries)] = entries
        return padded

    def _make_no_changes(self, num: int) -> jax.Array:
        return jax.device_put(np.full((num, 3), self._num_rows, np.int32), self._sharding)


def with_changes(tables: Tables, changes: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the tables after writing changed entries (row, column, page) int32 [n, 3] by group;
    an entry with a row past the end is ignored.
    """
    return {
        g: table.at[changes[g][:, 0], changes[g][:, 1]].set(changes[g][:, 2], mode="drop")
        for g, table in tables.items()
    }


def pages_of_rows(
    tables: Tables,
    layouts: Layouts,
    bucket: Bucket,
    row_ids: jax.Array,
    num_tokens: jax.Array,
) -> dict[str, jax.Array]:
    """Return the pages of the first num_tokens [S] tokens of rows [S], int32 [S,
    bucket.pages_per_seq] by group, with zeros after them.
    """
    return {
        g: _of_rows(table, row_ids, num_tokens, layouts[g].page_size, bucket.pages_per_seq)
        for g, table in tables.items()
    }


def _of_rows(
    table: jax.Array, row_ids: jax.Array, num_tokens: jax.Array, page_size: int, num_pages: int
) -> jax.Array:
    """Return the pages of the first num_tokens [S] tokens of rows [S], int32 [S, num_pages], with
    zeros after them.

    Entries of the table after these pages are out of date: no step may use them.
    """
    pages = table.at[row_ids, :num_pages].get(mode="fill", fill_value=0)
    starts = jnp.arange(pages.shape[1], dtype=jnp.int32) * page_size
    return jnp.where(starts < num_tokens[:, None], pages, 0)
