"""Static descriptions of attention problems, and the device records of one step's rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Literal, Self

import jax
from jax import tree_util

from enginebay.contracts.cache import KVLayout

Mode = Literal["decode", "prefill", "mixed"]

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of the computation, and of a cache that is not quantised."""


@dataclasses.dataclass(frozen=True)
class AttnSpec:
    """One kind of attention layer, with the heads of one shard. Hashable, because it is part of jit
    keys and tuning keys.

    scale: factor on the scores; None means head_dim ** -0.5. window: with window w, position p
    attends to keys j with p - w < j <= p. softcap: with softcap c, a score s becomes c * tanh(s /
    c). inputs: names of further arguments of attention: "sinks", "slopes", or names that a kernel
    declares in `Caps.inputs` (see `enginebay.ops.attention`). kv_storage: how the cache quantises
    keys and values (`KVLayout.storage`); None: it does not. kv_shared: the layer reads the cache of
    another layer. v_is_k_prefix: values are the first `v_head_dim` columns of the keys; there is
    one KV head, which every shard holds whole. return_lse: attention also returns the log-sum-exp
    of each query's scores.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    inputs: tuple[str, ...] = ()
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    kv_storage: str | None = None
    kv_shared: bool = False
    v_is_k_prefix: bool = False
    return_lse: bool = False
    deterministic: bool = False

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """The factor on scores before softcap and softmax."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def v_dim(self) -> int:
        """Width of values and outputs."""
        return self.v_head_dim or self.head_dim

    @property
    def cache_dtype(self) -> str:
        """How the cache stores keys and values: a storage such as "int8", or `kv_dtype`."""
        return self.kv_storage or self.kv_dtype

    def stored_as(self, cache_dtype: str) -> AttnSpec:
        """Return the spec with another `cache_dtype`. Quantised keys and values are written and
        read in the dtype of the queries.
        """
        if cache_dtype in FLOAT_DTYPES:
            return dataclasses.replace(self, kv_dtype=cache_dtype, kv_storage=None)
        return dataclasses.replace(self, kv_dtype=self.q_dtype, kv_storage=cache_dtype)

    @property
    def called(self) -> AttnSpec:
        """The spec as models pass it to attention: with a cache in the dtype of the queries."""
        return self.stored_as(self.q_dtype)

    def per_shard(self, num_shards: int) -> AttnSpec:
        """Return the spec of one shard when the heads are split over `num_shards` devices."""
        return dataclasses.replace(
            self,
            num_q_heads=self.num_q_heads // num_shards,
            num_kv_heads=1 if self.v_is_k_prefix else self.num_kv_heads // num_shards,
        )

    def make_layout(self, kind: type[KVLayout], num_pages: int, page_size: int) -> KVLayout:
        """Return the layout of a cache for keys and values of this layer."""
        return kind(
            num_pages,
            page_size,
            self.num_kv_heads,
            self.head_dim,
            self.kv_dtype,
            v_prefix_dim=self.v_dim if self.v_is_k_prefix else None,
            storage=self.kv_storage,
        )


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static shapes of one compiled step.

    mode: "decode" has one token per row, and token i belongs to row i, so that tokens == seqs;
    "prefill" has rows without a prefix (every q_len == kv_len), so that nothing is read from the
    cache; "mixed" has any rows. max_kv_len: upper bound of every kv_len. rows_are_pages: the layout
    has exactly `seqs` pages, and page i holds all of row i, so that page tables are not needed.
    """

    tokens: int
    seqs: int
    pages_per_seq: int
    max_q_len: int
    max_kv_len: int
    mode: Mode = "mixed"
    rows_are_pages: bool = False


@functools.partial(
    tree_util.register_dataclass,
    data_fields=[
        "positions",
        "cu_q_lens",
        "kv_lens",
        "page_table",
        "slots",
        "seq_ids",
        "distribution",
    ],
    meta_fields=["bucket"],
)
@dataclasses.dataclass(frozen=True)
class AttnBatch:
    """The rows of one step: int32 arrays on the device, padded to the bucket (T tokens, S rows, P
    pages per row).

    positions [T]: absolute positions, 0 on padding. cu_q_lens [S+1]: starts of the rows in the
    packed tokens; padding repeats the last value. kv_lens [S]: context lengths including the tokens
    of this step, 0 on padding. page_table [S, P]: page ids, 0 on unused entries (never -1, because
    kernels prefetch these pages). slots [T]: page * page_size + offset of each new token, -1 on
    padding. seq_ids [T]: row of each token, S on padding. distribution [3]: three running sums, as
    rows are sorted in the order decode, prefill, mixed: the number of decode rows, the number of
    decode and prefill rows together, and the number of all rows.
    """

    positions: jax.Array
    cu_q_lens: jax.Array
    kv_lens: jax.Array
    page_table: jax.Array
    slots: jax.Array
    seq_ids: jax.Array
    distribution: jax.Array
    bucket: Bucket

    @property
    def q_lens(self) -> jax.Array:
        """Number of new tokens of each row [S], 0 on padding."""
        return self.cu_q_lens[1:] - self.cu_q_lens[:-1]


@functools.partial(
    tree_util.register_dataclass, data_fields=["rows", "positions", "adapters"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class StepBatch:
    """The row and the position of each token in one step, int32 [T] on the device. `rows`: index of
    the row in the step; on padding, the number of rows. `positions`: absolute positions, 0 on
    padding. `adapters`: number of the slot of the row's adapter, counted from 1; 0: no adapter, and
    on padding. None in an engine without adapters.
    """

    rows: jax.Array
    positions: jax.Array
    adapters: jax.Array | None = None

    @classmethod
    def of(cls, batches: Mapping[str, AttnBatch], adapters: jax.Array | None = None) -> Self:
        """Make the StepBatch of a step from its batches by cache group, which differ only in their
        pages. `adapters` int32 [S]: those of the rows.
        """
        batch = next(iter(batches.values()))
        if adapters is not None:
            adapters = adapters.at[batch.seq_ids].get(mode="fill", fill_value=0)
        return cls(batch.seq_ids, batch.positions, adapters)
