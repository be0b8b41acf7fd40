"""GrowingPages: the arrays behind the page pools, few pages of them until more are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from enginebay.cache import KVLayout
from enginebay.runner.resize import resize_cache
from enginebay.runner.runner import Runner
from enginebay_oengine.copying import PageCopier

PageCounts = Mapping[str, int]
"""Numbers of pages by cache group."""


class GrowingPages:
    """The cache of a runner as a whole, `num_pages` long, or only its `first` pages while nobody
    holds one of the others.

    Where allocating clears memory page by page, as a CPU's does, a large cache takes seconds: a
    program that serves one short request need not wait for them. All groups grow once, to their
    whole size, because each size has programs of its own.
    """

    def __init__(
        self,
        runner: Runner,
        layouts: Callable[[PageCounts], Mapping[str, KVLayout]],
        first: PageCounts,
        num_pages: PageCounts,
    ) -> None:
        """`layouts`: those of a cache of so many pages."""
        self.runner = runner
        self.copier = PageCopier(runner)
        self.num_pages = num_pages
        self._layouts = layouts
        self._first = first
        self._allocated = first

    def make(self) -> None:
        """Allocate the pages to begin with, when there are none."""
        if not self.runner.has_state:
            self._set_allocated(self._first)
            self.runner.make_state(self._layouts(self._first))

    def make_all(self) -> None:
        """Allocate all, now and whenever they are made again."""
        self._first = self.num_pages
        self.reach(self.num_pages)

    def reach(self, num_pages: PageCounts) -> None:
        """See that so many of each group's first pages are there."""
        if any(count > self._allocated[group] for group, count in num_pages.items()):
            resize_cache(self.runner, self._layouts(self.num_pages), _resized)
            self._set_allocated(self.num_pages)

    def _set_allocated(self, num_pages: PageCounts) -> None:
        if num_pages != self._allocated:
            self._allocated = num_pages
            self.copier.forget()


def _resized(array: jax.Array, _: KVLayout, layout: KVLayout) -> jax.Array:
    """Axis 0 counts pages; the new ones hold zeros."""
    return jnp.pad(array, [(0, layout.num_pages - len(array))] + [(0, 0)] * (array.ndim - 1))
