"""The cache contract: groups that a model declares, layouts of the arrays, and the ledger, which
leases cache space to rows.

The cache has two owners. The **ledger** is on the host, belongs to the loop's thread, and knows
which space is promised to which row. The **arrays** and the page tables are on the device and
belong to the executor: every step receives them as donated arguments and returns them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.prefix_key import NO_KEY, PrefixKey
from enginebay.errors import InternalError
from enginebay.weights import stored_bytes

CacheArrays = Mapping[str, jax.Array]
"""The arrays of one layer, by name; the layout defines the names."""


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Attention layers of a model whose caches have the same shape and the same lifetime.

    `window` is the number of most recent positions that the layers attend to; None: all positions.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None

    def first_position(self, num_tokens: int) -> int:
        """Return the first position that a row still attends to after `num_tokens` tokens."""
        return 0 if self.window is None else max(0, num_tokens + 1 - self.window)


@dataclasses.dataclass(frozen=True)
class CacheLayout(ABC):
    """The memory layout of one layer of a cache group. Axis 0 of every array counts pages. Layouts
    are frozen and hashable, because they are part of the key of every compiled program.
    """

    num_pages: int
    page_size: int

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that the layout is registered under."""

    @abstractmethod
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape and dtype of each array of one layer, by name."""

    @abstractmethod
    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Return the logical axes of the first dimensions of each array, by name. Dimensions that
        the tuple does not cover are not sharded.
        """

    def init(self) -> dict[str, jax.Array]:
        """Make the arrays of one layer, filled with zeros."""
        return {name: jnp.zeros(s.shape, s.dtype) for name, s in self.shapes().items()}

    def resized(self, *, num_pages: int | None = None, page_size: int | None = None) -> Self:
        """Return the same layout with another number of pages or another page size."""
        return dataclasses.replace(
            self, num_pages=num_pages or self.num_pages, page_size=page_size or self.page_size
        )

    def num_bytes(self) -> int:
        """Return the bytes that the arrays of one layer use on a device."""
        return sum(stored_bytes(s.shape, s.dtype) for s in self.shapes().values())


@dataclasses.dataclass(frozen=True)
class KVLayout(CacheLayout):
    """The memory layout of the keys and values of one layer.

    The position of a token in the cache is its slot: slot = page * page_size + offset. A contiguous
    cache is the special case of one page per row: page_size is the row's capacity and the page
    table has one column.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    v_prefix_dim: int | None = None
    """None: values are stored in arrays of their own, as wide as keys. A number: values are the
    first `v_prefix_dim` columns of their keys (as in latent attention) and no array stores them;
    the layer then has one KV head, and every device holds the whole head.
    """
    storage: str | None = None
    """How values are quantised, such as "int8", with arrays of scales beside the values. None: the
    arrays hold values of `dtype`. `dtype` is always the dtype of values that are written and read.
    """

    offset_axis: ClassVar[int]
    """The axis that counts tokens within a page, in every array for which `offset_axis_of` names no
    other; axis 0 counts pages.
    """

    serves_v_prefix: ClassVar[bool] = False
    """Whether the layout supports `v_prefix_dim`."""

    storages: ClassVar[frozenset[str]] = frozenset()
    """The allowed values of `storage`, besides None."""

    @property
    def tolerance(self) -> float:
        """Max difference between a written and a read value, as a share of the largest value of the
        same head and token. 0: they are equal. A layout that quantises has a tolerance above 0.
        """
        return 0.0

    def offset_axis_of(self, array: str) -> int:
        """Return the axis of an array that counts tokens within a page."""
        return self.offset_axis

    @abstractmethod
    def head_axis(self) -> dict[str, int]:
        """Return the axis of each array that counts KV heads, by name; this axis is sharded."""

    @abstractmethod
    def write(
        self, cache: CacheArrays, slots: jax.Array, k: jax.Array, v: jax.Array
    ) -> dict[str, jax.Array]:
        """Return the arrays with k and v [tokens, kv_heads, head_dim] written at slots int32
        [tokens]. Tokens with a negative slot are dropped.

        With `v_prefix_dim` the last dimension of v is v_prefix_dim, in this and the read methods;
        `write` then ignores v.
        """

    @abstractmethod
    def read(self, cache: CacheArrays, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return K and V [*pages.shape, page_size, kv_heads, head_dim] of the pages with these
        int32 ids.
        """

    @abstractmethod
    def read_tokens(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return K and V [tokens, kv_heads, head_dim] at slots int32 [tokens], none negative."""

    def read_exact(self, cache: CacheArrays, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `read_tokens` in f32 without loss: writing the values again gives the same arrays.
        A quantised layout returns values times scales, without rounding to `dtype`.
        """
        k, v = self.read_tokens(cache, slots)
        return k.astype(jnp.float32), v.astype(jnp.float32)

    def per_shard(self, num_shards: int) -> Self:
        """Return the layout of the part that one of `num_shards` devices holds."""
        heads = 1 if self.v_prefix_dim else self.num_kv_heads // num_shards
        return dataclasses.replace(self, num_kv_heads=heads)

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        if self.v_prefix_dim:
            return dict.fromkeys(self.head_axis(), ())
        return {name: (None,) * axis + ("kv_heads",) for name, axis in self.head_axis().items()}

    def split_slots(self, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the page and the offset [tokens] of each slot. A negative slot gets page
        num_pages, which a scatter with mode="drop" ignores.
        """
        pages = jnp.where(slots < 0, self.num_pages, slots // self.page_size)
        return pages, jnp.maximum(slots, 0) % self.page_size


@dataclasses.dataclass(eq=False, slots=True)
class Lease:
    """Cache space that a ledger promises to one row. Only the ledger writes its fields.

    `row`: index in the row table. `capacity`: number of tokens promised so far. `num_cached`:
    number of prompt tokens that were in the cache when the lease was made; `num_from_host` of them
    were in the memory of the host, and `num_from_disk` in files. `pages`: by cache group, the page
    ids of the row in the order of its positions, each for page_size positions; 0 for a page that
    the row no longer keeps. A ledger that derives pages from the row leaves `pages` empty.
    """

    row: int
    capacity: int
    num_cached: int = 0
    pages: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    released: bool = False
    num_from_host: int = 0
    num_from_disk: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PageMove:
    """A move of the content of a page. "copy": from page `source` to page `target`. "out": from
    page `source` to the host, in slot `target`. "in": from slot `source` to page `target`.

    An "out" move has `digest`, the hash of the tokens, under which files may keep the content, and
    `age_s`, the seconds since a row last used the page.
    """

    kind: Literal["copy", "out", "in"]
    group: str
    source: int
    target: int
    digest: bytes = b""
    age_s: float = 0.0


class Ledger(ABC):
    """Leases cache space to rows: knows which pages belong to which row. Only the loop's thread
    calls it, and it never touches arrays.

    Each cache group has its own pages, numbered from 0, and its own page table. Invariants: all
    leases together never exceed the space that exists; several leases share a page only when its
    tokens are equal (prefix sharing), and then none of them writes to it; `release` frees
    everything, once; a refused call changes nothing. The methods that are not abstract are for
    ledgers that share pages, or that promise space step by step.
    """

    windows: Mapping[str, int | None]
    """Cache group -> window. A row keeps at least the last `window` committed positions of a group;
    the group may free pages with older positions only. None: rows keep all positions.
    """

    states: Sequence[str] = ()
    """Names of the groups with a recurrent state. A row has one page in each, its *place*."""

    max_ahead: int | None = None
    """Max number of tokens after the committed ones that a step may write. In groups with a window,
    a row has pages for this number of tokens ahead. None: for all tokens of its lease.
    """

    grows: bool = False
    """Whether a new lease covers the prompt and one token only, and `reserve` grows it. Otherwise a
    new lease covers all tokens that the request can need.
    """

    forks: bool = False
    """Whether `fork` works, so that several completions of a prompt compute it once."""

    host_slots: Mapping[str, int] = MappingProxyType({})
    """Number of slots on the host, each for a page, by cache group. Groups whose pages do not move
    to the host are missing.
    """

    @abstractmethod
    def admit(
        self, row: int, prompt_token_ids: np.ndarray, num_tokens: int, key: PrefixKey = NO_KEY
    ) -> Lease | None:
        """Return a lease of space for `num_tokens` tokens for row `row`, or None when there is not
        enough space now.

        prompt_token_ids: int32 [tokens]. The lease shares cached pages of an equal prefix under an
        equal `key`; `Lease.num_cached` prompt tokens need not be computed. The last prompt token
        is always computed.
        """

    @abstractmethod
    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Grow the lease to at least `num_tokens` tokens; return False when there is not enough
        space now.

        Called before every step. Afterwards no other lease shares the pages that the step will
        write, and groups with a window have exchanged pages that they no longer need.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Free the lease's space. Raises InternalError when the lease was released before."""

    @abstractmethod
    def write_table(self, group: str, leases: Sequence[Lease], table: np.ndarray) -> None:
        """Fill table[i] (table int32 [rows, pages_per_row]) with the pages of leases[i] in a cache
        group. Write 0 for pages that the row no longer keeps, and after the last page.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise InternalError when the records of pages and leases contradict each other."""

    @property
    @abstractmethod
    def num_free_tokens(self) -> int:
        """Number of tokens that can still be promised. Groups with a window do not count: they have
        room for every row.
        """

    @property
    def max_tokens(self) -> int | None:
        """Max number of tokens of one row when it is the only row; None: only max_model_len limits
        it.
        """
        return None

    def num_cached_tokens(self, token_ids: np.ndarray, key: PrefixKey = NO_KEY) -> int:
        """Return how many of the first tokens `admit` would find in the cache now."""
        return 0

    def commit(self, lease: Lease, token_ids: np.ndarray) -> None:  # noqa: B027  # most ledgers share nothing
        """Record token_ids int32 [tokens] as the row's first tokens: their keys and values are in
        the cache, or will be before the next launched step runs.
        """

    def commit_rows(
        self, leases: Sequence[Lease], token_ids: np.ndarray, num_tokens: np.ndarray
    ) -> None:
        """Call `commit` for each lease i with the first num_tokens[i] tokens of
        token_ids[leases[i].row]; token_ids int32 [rows, length].
        """
        for lease, num in zip(leases, num_tokens.tolist(), strict=True):
            self.commit(lease, token_ids[lease.row, :num])

    def resume(self, lease: Lease, num_tokens: int) -> Mapping[str, np.ndarray]:
        """Prepare the row to continue after `num_tokens` tokens, which the caller writes into the
        cache before the next step.

        Returns int32 page ids by group: the pages that the caller writes to. They differ from the
        lease's pages where the row shares a page, which must not be written. In a group that is
        not returned, the caller writes to the lease's pages.
        """
        return {}

    def fork(self, lease: Lease, row: int, num_cached: int, num_tokens: int) -> Lease | None:
        """Return a lease for row `row` with space for `num_tokens` tokens that shares the first
        `num_cached` tokens of `lease`, all committed there; None when there is not enough space.

        The new lease has fewer tokens cached if `lease` no longer keeps the positions that a row
        needs to continue after `num_cached` tokens. Called only when `forks` is True.
        """
        raise InternalError(f"row {row} is forked from {lease.row} in a ledger that does not fork")

    def chunk_end(
        self,
        lease: Lease,
        num_tokens: int,
        fork_at: int | None = None,
        reuse_at: int | None = None,
    ) -> int:
        """Return the position at which the next prefill chunk must end at the latest.

        The row's prompt has `num_tokens` tokens; other rows may fork it after `fork_at` tokens, and
        the prompts of a conversation's later turns repeat its first `reuse_at` tokens. A ledger
        that keeps copies of recurrent states returns the next position at which it copies the
        state, because a state exists only at the end of a chunk.
        """
        return num_tokens

    def take_moves(self) -> Sequence[PageMove]:
        """Return the moves of pages to make before the next step, in this order. Each move is
        returned once.
        """
        return ()

    def save_pages(self) -> None:  # noqa: B027  # most ledgers have no host slots
        """Order all cached pages that no row uses to the host, the most recently used first: the
        engine is closed, and files keep them.
        """

    def drop_idle(self) -> float | None:
        """Free what is kept for later requests only and is older than the ledger's own limit.
        Called while no request is there. Returns the seconds after which more is due; None: nothing
        is.
        """
        return None

    def free_pages(self) -> Mapping[str, np.ndarray]:
        """Return the ids of the pages that may hold old content although no row and no prefix uses
        them, int32 by cache group. Their content may be replaced by zeros.
        """
        return {}

    @property
    def reach(self) -> Mapping[str, int]:
        """For each group, the number of first pages that contain every page ever promised."""
        return {}

    def page_holders(self) -> Mapping[str, np.ndarray]:
        """Return who holds each page, for displays: int32 [pages] for each group that has pages.

        0 is a free page, n > 0 a page that n rows share, and -1 a page without a row whose contents
        are kept. Page 0 is never used. Pages that were never used may be left out at the end.
        """
        return {}

    def resized(self, shapes: Mapping[str, CacheShape]) -> None:  # noqa: B027  # pages keep their numbers
        """Use these sizes of the arrays from now on, by cache group."""

    def forget(self) -> None:  # noqa: B027  # most ledgers keep nothing
        """Forget all cached prefixes: the arrays were dropped or the weights have changed."""
