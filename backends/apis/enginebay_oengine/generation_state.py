"""GenerationState: processed prompts with their first tokens. They can be inserted into slots of
this engine or of another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jax import tree_util

from enginebay.contracts.cache import Lease
from enginebay.errors import InputError
from enginebay_oengine.page_manager import HBMPageManager
from enginebay_paged.page_steps import PageRows, Views


class PageReader(Protocol):
    """The cache that owns the pages of leases."""

    manager: HBMPageManager
    held: weakref.WeakSet[Any]

    def read(self, leases: Sequence[Lease]) -> Views:
        """Return the arrays of the leases' pages."""


class LeaseHandles:
    """Leases that are released when this object is garbage-collected, or by let_go()."""

    def __init__(self, owner: PageReader, leases: Sequence[Lease], lengths: Sequence[int]) -> None:
        self.owner = owner
        self.leases = tuple(leases)
        self.lengths = tuple(lengths)
        self.let_go = weakref.finalize(self, owner.manager.release_later, self.leases)
        self.let_go.atexit = False
        owner.held.add(self)


@tree_util.register_pytree_with_keys_class
class GenerationState:
    """n prompts after their prefill (a *prefix*).

    rows: their columns on the device. base_keys uint32 [n, 2]: their random keys; a copy in another
    slot folds its own number in. views: the arrays of their pages per cache group and layer, [n,
    pages, ...] each.

    Within its engine a prefix holds pages, and views are read from the pages on access: inserting
    copies nothing. As a pytree it has rows, base_keys and views as leaves, so jax.device_put makes
    a prefix that holds no pages and can be inserted into any engine.
    """

    def __init__(
        self, rows: PageRows, base_keys: Any, views: Views | None, held: LeaseHandles | None = None
    ) -> None:
        self.rows = rows
        self.base_keys = base_keys
        self._views = views
        self.held = held
        self.num_copies = 0
        """Number of insertions so far. Each is another completion with its own random keys."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts (n)."""
        return int(self.base_keys.shape[0])

    @property
    def views(self) -> Views:
        """The keys and values. InputError when the pages were released."""
        if self.held is not None and self.held.let_go.alive:
            return self.held.owner.read(self.held.leases)
        if self._views is None:
            raise InputError(
                "a prefix whose pages were released", "a prefix with pages", "Call prefill again."
            )
        return self._views

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, including its first new token. Without pages this waits for the
        prefill.
        """
        if self.held is not None:
            return self.held.lengths
        return tuple(int(length) for length in np.asarray(self.rows.length))

    def release(self) -> None:
        """Release the pages now instead of at garbage collection. Sequences in slots keep their
        pages.
        """
        if self.held is not None:
            self.held.let_go()
            self.held = None

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """Return rows, base_keys and views; reading views copies them from the pages."""
        names = ("rows", "base_keys", "views")
        return tuple((tree_util.GetAttrKey(name), getattr(self, name)) for name in names), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[Any]) -> GenerationState:
        """Make a prefix that holds no pages."""
        del aux
        return cls(*children)
