"""GenerationState: processed prompts and their first tokens, which can be inserted into slots, here
or in another engine.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from enginebay.cache import Lease
from enginebay.errors import InputError
from enginebay_executor.device import DeviceRows
from enginebay_oengine.page_manager import HBMPageManager

Views = Mapping[str, Sequence[Mapping[str, Any]]]


class PageReader(Protocol):
    """The cache that pages are of."""

    manager: HBMPageManager
    held: weakref.WeakSet[Any]

    def read(self, leases: Sequence[Lease]) -> Views:
        """The pages' arrays."""


class HeldLeases:
    """Leases that are taken back when nobody refers to this any more, or with let_go()."""

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
    slot folds its own number in. views: their pages' arrays per cache group and layer, [n, pages,
    ...] each.

    While it stays in its engine it holds pages there, and views are read from them when somebody
    asks: inserting copies nothing. As a pytree its leaves are all three, so jax.device_put and the
    like make one that holds no pages and can be inserted anywhere.
    """

    def __init__(
        self, rows: DeviceRows, base_keys: Any, views: Views | None, held: HeldLeases | None = None
    ) -> None:
        self.rows = rows
        self.base_keys = base_keys
        self._views = views
        self.held = held
        self.num_copies = 0
        """How often it was inserted: each time it is another completion, with random keys of its
        own.
        """

    @property
    def num_prompts(self) -> int:
        """n."""
        return int(self.base_keys.shape[0])

    @property
    def views(self) -> Views:
        """The keys and values. InputError when the pages were let go."""
        if self.held is not None and self.held.let_go.alive:
            return self.held.owner.read(self.held.leases)
        if self._views is None:
            raise InputError(
                "a prefix whose pages were released", "one that holds its pages", "Prefill again."
            )
        return self._views

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, its first new one included; where no pages are held, waits for
        the prefill.
        """
        if self.held is not None:
            return self.held.lengths
        return tuple(int(length) for length in np.asarray(self.rows.length))

    def release(self) -> None:
        """Give the pages back now instead of when nobody refers to this. Sequences in slots keep
        theirs.
        """
        if self.held is not None:
            self.held.let_go()
            self.held = None

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], None]:
        """Rows, keys and views; reading views copies them out of the pages."""
        names = ("rows", "base_keys", "views")
        return tuple((tree_util.GetAttrKey(name), getattr(self, name)) for name in names), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Sequence[Any]) -> GenerationState:
        """A prefix that holds no pages."""
        del aux
        return cls(*children)


def place_rows(
    rows: DeviceRows,
    prefix: DeviceRows,
    base_keys: jax.Array,
    source: jax.Array,
    slots: jax.Array,
    index: jax.Array,
) -> DeviceRows:
    """`rows` with row source[i] of a prefix at slots[i], as completion index[i] of its request; a
    slot past the end is dropped.
    """

    def fold(key: jax.Array, number: jax.Array) -> jax.Array:
        typed = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(typed, number))

    picked: DeviceRows = jax.tree.map(lambda array: array[source], prefix)
    keys = jax.vmap(fold)(base_keys[source], index)
    return rows.put(slots, dataclasses.replace(picked, keys=keys))


def take_rows(rows: DeviceRows, num_rows: int, num_tokens: int) -> tuple[DeviceRows, jax.Array]:
    """The first num_rows rows with their first num_tokens tokens, and the ResultTokens data of
    their last ones.
    """
    taken = rows.take(jnp.arange(num_rows, dtype=jnp.int32), num_tokens)
    one = jnp.ones(num_rows, jnp.int32)
    return taken, jnp.stack([taken.last_token, one, taken.length - taken.prompt_length], axis=1)


def read_pages(views: Views, table: jax.Array) -> Views:
    """The pages table int32 [n, pages] of every layer: arrays [n, pages, ...]."""
    return jax.tree.map(lambda array: array[table], views)


def write_pages(views: Views, parts: Views, table: jax.Array) -> Views:
    """`views` with parts [n, pages, ...] at pages table int32 [n, pages]; a page past the end is
    dropped.
    """
    flat = table.reshape(-1)

    def put(array: jax.Array, part: jax.Array) -> jax.Array:
        pages = part.reshape(-1, *part.shape[2:]).astype(array.dtype)
        return array.at[flat].set(pages, mode="drop")

    return jax.tree.map(put, views, parts)
