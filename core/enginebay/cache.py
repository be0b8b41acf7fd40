"""The cache contract: groups a model declares, layouts of the arrays, and the ledger that promises
them.

The cache has two owners. The **ledger** lives on the host, belongs to the loop's thread, and knows
what is promised to whom. The **arrays** and the page tables live on the device and belong to the
executor: they are donated to every step and come back from it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache_shape import CacheShape
from enginebay.errors import InternalError
from enginebay.prefix_key import NO_KEY, PrefixKey
from enginebay.weights import stored_bytes

CacheArrays = Mapping[str, jax.Array]
"""The arrays of one layer, by the names that its layout gives them."""


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers of a model whose cache has the same shape and the same lifetime.

    `window` is the number of most recent positions that the layers look at, None for all.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None

    def first_position(self, num_tokens: int) -> int:
        """The first position that a row looks at which goes on after `num_tokens` tokens."""
        return 0 if self.window is None else max(0, num_tokens + 1 - self.window)


@dataclasses.dataclass(frozen=True)
class CacheLayout(ABC):
    """How one layer of a cache group lies in memory: axis 0 of every array counts pages. Frozen and
    hashable: part of every jit key.
    """

    num_pages: int
    page_size: int

    @property
    @abstractmethod
    def name(self) -> str:
        """The layout's registered name."""

    @abstractmethod
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each array of one layer."""

    @abstractmethod
    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """The logical axes of each array's first dimensions; the others are whole on each
        device.
        """

    def init(self) -> dict[str, jax.Array]:
        """One layer's arrays, zeroed."""
        return {name: jnp.zeros(s.shape, s.dtype) for name, s in self.shapes().items()}

    def resized(self, *, num_pages: int | None = None, page_size: int | None = None) -> Self:
        """The same layout with other counts."""
        return dataclasses.replace(
            self, num_pages=num_pages or self.num_pages, page_size=page_size or self.page_size
        )

    def num_bytes(self) -> int:
        """Bytes of one layer's arrays, as a device stores them."""
        return sum(stored_bytes(s.shape, s.dtype) for s in self.shapes().values())


@dataclasses.dataclass(frozen=True)
class KVLayout(CacheLayout):
    """How keys and values of one layer lie in memory.

    A token's place is its slot = page * page_size + offset. A contiguous cache is the special case
    of one page per row: page_size is the row's capacity and the page table is one column wide.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    v_prefix_dim: int | None = None
    """The width of values that are the first columns of their keys, of one KV head that every
    device has whole: no array holds them. None: values are stored, as wide as keys.
    """

    offset_axis: ClassVar[int]
    """The axis of every array that counts tokens within a page; axis 0 counts pages."""

    serves_v_prefix: ClassVar[bool] = False
    """Whether the layout has a form for values that are the first columns of their keys."""

    tolerance: ClassVar[float] = 0.0
    """How far a value that is read may be from what was written, as a share of the largest value of
    the same head of the same token; 0: it is the same. A quantised cache is a layout with a
    tolerance.
    """

    @abstractmethod
    def head_axis(self) -> dict[str, int]:
        """The axis of each array that is sharded over KV heads."""

    @abstractmethod
    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        """Put k and v [tokens, kv_heads, head_dim] at slots int32 [tokens]; drop negative ones.

        With `v_prefix_dim` values have that width here and below, and are not looked at.
        """

    @abstractmethod
    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """K and V [*pages.shape, page_size, kv_heads, head_dim] of int32 page ids."""

    @abstractmethod
    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """K and V [tokens, kv_heads, head_dim] at slots [tokens] (int32, none negative)."""

    def read_exact(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`read_tokens` in f32, without a loss: written again, the values give the same arrays. A
        quantised layout returns its values times their scales, not rounded to `dtype`.
        """
        k, v = self.read_tokens(cache, slots)
        return k.astype(jnp.float32), v.astype(jnp.float32)

    def per_shard(self, num_shards: int) -> Self:
        """The layout of what one of `num_shards` devices has."""
        heads = 1 if self.v_prefix_dim else self.num_kv_heads // num_shards
        return dataclasses.replace(self, num_kv_heads=heads)

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        if self.v_prefix_dim:
            return dict.fromkeys(self.head_axis(), ())
        return {name: (None,) * axis + ("kv_heads",) for name, axis in self.head_axis().items()}

    def split_slots(self, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pages and offsets [tokens]; a negative slot gets page num_pages, which a dropping scatter
        ignores.
        """
        pages = jnp.where(slots < 0, self.num_pages, slots // self.page_size)
        return pages, jnp.maximum(slots, 0) % self.page_size


@dataclasses.dataclass(eq=False, slots=True)
class Lease:
    """A promise of cache space to one row; opaque to scheduler and loop, filled in by its ledger.

    `row` is the row-table index; `capacity` the tokens promised so far; `num_cached` the tokens of
    the prompt whose keys and values were already there when the lease was given. `pages` has, by
    cache group, the page of each page_size positions from 0 on; 0 where the row no longer keeps
    them. A ledger whose pages follow from the row leaves it empty.
    """

    row: int
    capacity: int
    num_cached: int = 0
    pages: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    released: bool = False


class Ledger(ABC):
    """What is promised to which row. Lives on the loop's thread, never touches arrays.

    Each cache group has pages of its own, numbered from 0, and a table of its own. Invariants: the
    promises together never exceed what there is; a page is promised to several leases only when its
    tokens are equal (prefix sharing), and is written to by none of them; `release` gives everything
    back, once; a refused call changes nothing. The members that are not abstract are for ledgers
    that share pages or promise bit by bit.
    """

    windows: Mapping[str, int | None]
    """The cache groups by name. A group with a window may give a page back once the committed
    tokens have passed it: its rows keep the last `window` committed positions. None: they keep all.
    """

    states: Sequence[str] = ()
    """The groups with a recurrent state by name. A row has one page of each, its *place*."""

    max_ahead: int | None = None
    """How many tokens after the committed ones a row's pages cover in groups that give pages back,
    which is as far as a step may write; None: as many as were promised.
    """

    grows: bool = False
    """Whether leases begin with a prompt and its next token; otherwise with all that is needed."""

    forks: bool = False
    """Whether `fork` gives leases, so that rows with the same prompt have it computed once."""

    @abstractmethod
    def admit(
        self, row: int, prompt_token_ids: np.ndarray, num_tokens: int, key: PrefixKey = NO_KEY
    ) -> Lease | None:
        """Promise row `row` space for `num_tokens` tokens, or None when there is not enough now.

        What other rows have computed counts as the prompt's only under an equal `key`. The first
        `num_cached` of the prompt's tokens need not be computed: never the last.
        """

    @abstractmethod
    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Grow the promise to at least `num_tokens` tokens; False when there is not enough now.

        Called before every step, because the pages that it will write must be the row's alone, and
        because a group with a window exchanges pages only here.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Take the promise back. Releasing twice is a bug of the caller and raises
        InternalError.
        """

    @abstractmethod
    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        """Fill table[i] (int32 [rows, pages_per_row]) with the pages of leases[i] in a cache group;
        the rest of the row is 0, and so are pages that the row no longer keeps.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise InternalError when the books do not add up."""

    @property
    @abstractmethod
    def num_free_tokens(self) -> int:
        """Tokens that could still be promised. Groups that give pages back do not count: they have
        room for every row.
        """

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that a row can have when it is alone; None when max_model_len is the only
        limit.
        """
        return None

    def num_cached_tokens(self, token_ids: np.ndarray, key: PrefixKey = NO_KEY) -> int:
        """How many of the first tokens `admit` would find in the cache now."""
        return 0

    def commit(self, lease: Lease, token_ids: np.ndarray) -> None:  # noqa: B027  # most ledgers share nothing
        """Take note of token_ids int32 [tokens], the row's first ones: launched steps have put
        their keys and values into the cache, or will before any later step runs.
        """

    def commit_rows(
        self, leases: Sequence[Lease], token_ids: np.ndarray, num_tokens: np.ndarray
    ) -> None:
        """`commit` of the first num_tokens[i] of token_ids[lease.row] for each lease; token_ids
        int32 [rows, length].
        """
        for lease, num in zip(leases, num_tokens.tolist(), strict=True):
            self.commit(lease, token_ids[lease.row, :num])

    def resume(self, lease: Lease, num_tokens: int) -> Mapping[str, np.ndarray]:
        """The row goes on after `num_tokens` tokens, which the caller puts into the cache before
        the next step: see that the pages of those that it needs are there. Returns the pages to put
        them into, int32 by group, where these are others than the row's: not those that it shares.
        """
        return {}

    def fork(self, lease: Lease, row: int, num_cached: int, num_tokens: int) -> Lease | None:
        """Promise row `row` space for `num_tokens` tokens, of which the first `num_cached` are
        those of `lease`.

        They are committed there. The new lease may have fewer of them cached, where `lease` no
        longer keeps what is needed to go on from there. None when there is not enough now. For
        ledgers that say so with `forks`.
        """
        raise InternalError(f"row {row} is forked from {lease.row} in a ledger that does not fork")

    def chunk_end(self, lease: Lease, num_tokens: int, fork_at: int | None = None) -> int:
        """Where the next chunk of a row that is to be prefilled with `num_tokens` tokens must end
        at the latest, so that a recurrent state can be kept there once `commit` is called with
        these tokens. `fork_at`: after how many tokens others may fork the row.
        """
        return num_tokens

    def take_copies(self) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Pages (from, to) to copy before the next step, in order, by group; returned once."""
        return {}

    @property
    def reach(self) -> Mapping[str, int]:
        """How many of each group's first pages hold all that was ever promised."""
        return {}

    def resized(self, shapes: Mapping[str, CacheShape]) -> None:  # noqa: B027  # pages keep their numbers
        """The arrays have these sizes from now on, by cache group."""

    def forget(self) -> None:  # noqa: B027  # most ledgers keep nothing
        """Find nothing again of what was computed so far: the arrays are gone."""
