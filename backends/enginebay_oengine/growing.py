"""GrowingPages: the arrays behind the page pool, few pages of them until more are needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from enginebay.cache import KVLayout
from enginebay.runner.resize import resize_cache
from enginebay.runner.runner import Runner
from enginebay_oengine.copying import PageCopier


class GrowingPages:
    """The cache of a runner as a whole, `num_pages` long, or only its `first` pages while nobody
    holds one of the others.

    Where allocating clears memory page by page, as a CPU's does, a large cache takes seconds: a
    program that serves one short request need not wait for them. It grows once, to its whole size,
    because each size has programs of its own.
    """

    def __init__(
        self,
        runner: Runner,
        layouts: Callable[[int], Mapping[str, KVLayout]],
        first: int,
        num_pages: int,
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

    def reach(self, num_pages: int) -> None:
        """See that the first `num_pages` are there."""
        if num_pages > self._allocated:
            resize_cache(self.runner, self._layouts(self.num_pages), self._resized)
            self._set_allocated(self.num_pages)

    def _set_allocated(self, num_pages: int) -> None:
        if num_pages != self._allocated:
            self._allocated = num_pages
            self.copier.forget()

    def _resized(self, array: jax.Array, layout: KVLayout) -> jax.Array:
        """Axis 0 counts pages; the new ones hold zeros."""
        return jnp.pad(array, [(0, self.num_pages - self._allocated)] + [(0, 0)] * (array.ndim - 1))
