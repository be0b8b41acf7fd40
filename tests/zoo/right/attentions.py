"""Attention in plain JAX, organised in ways that kernels of ours are not: by tokens, by rows and by
pages, with many softmaxes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tests.zoo.right import softmaxes
from tests.zoo.right.attending import (
    EVERY,
    FLOATS,
    PLAIN,
    STORED,
    USUAL,
    Attention,
    Problem,
    Queries,
    Sizes,
    caps,
)
from tests.zoo.right.softmaxes import Result, SoftmaxWay


def each_token(kernel: Attention, problem: Problem) -> Result:
    """One token after the other, each over its whole row."""
    positions = jnp.arange(problem.length)

    def one(given: tuple[Queries, jax.Array]) -> Result:
        queries, row = given
        k, v = kernel.read(problem, row, positions)
        return kernel.attend(problem, jax.tree.map(lambda x: x[None], queries), k, v, positions)

    out, lse = jax.lax.map(one, (problem.queries, problem.row))
    return out[:, 0], lse[:, 0]


def each_row(kernel: Attention, problem: Problem) -> Result:
    """One row after the other, all its tokens over the whole row."""
    positions = jnp.arange(problem.length)

    def keys(row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return *kernel.read(problem, row, positions), positions

    return _rows(kernel, problem, keys)


def own_keys(kernel: Attention, problem: Problem) -> Result:
    """One row after the other, over the new keys and values without the cache, for prompts."""
    assert problem.fresh is not None
    k, v = (x.astype(problem.layout.dtype) for x in problem.fresh)
    v = k[..., : problem.spec.v_dim] if problem.spec.v_is_k_prefix else v
    positions = jnp.arange(problem.batch.bucket.max_q_len)

    def keys(row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens = jnp.minimum(problem.batch.cu_q_lens[row] + positions, len(k) - 1)
        return k[tokens], v[tokens], positions

    return _rows(kernel, problem, keys)


def _rows(
    kernel: Attention,
    problem: Problem,
    keys: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]],
) -> Result:
    batch, tokens = problem.batch, problem.row.shape[0]

    def one(row: jax.Array) -> Result:
        start = batch.cu_q_lens[row]
        mine = jnp.minimum(start + jnp.arange(batch.bucket.max_q_len), tokens - 1)
        within = (start + jnp.arange(batch.bucket.max_q_len)) < batch.cu_q_lens[row + 1]
        queries = jax.tree.map(lambda x: x[mine], problem.queries)
        queries = queries._replace(end=jnp.where(within, queries.end, 0))
        return kernel.attend(problem, queries, *keys(row))

    out, lse = jax.lax.map(one, jnp.arange(batch.bucket.seqs))
    place = jnp.arange(tokens) - batch.cu_q_lens[problem.row]
    place = jnp.clip(place, 0, batch.bucket.max_q_len - 1)
    return out[problem.row, place], lse[problem.row, place]


def whole_pages(kernel: Attention, problem: Problem) -> Result:
    """All rows of a decode step together, each with the pages of its table."""
    batch, layout = problem.batch, problem.layout
    pages = batch.page_table
    if batch.bucket.rows_are_pages:
        pages = jnp.arange(batch.bucket.seqs)[:, None]
    k, v = (x.reshape(len(x), -1, *x.shape[-2:]) for x in layout.read(problem.cache, pages))
    positions = jnp.arange(k.shape[1])

    def one(queries: Queries, k: jax.Array, v: jax.Array) -> Result:
        found = kernel.attend(problem, jax.tree.map(lambda x: x[None], queries), k, v, positions)
        return found[0][0], found[1][0]

    return jax.vmap(one)(problem.queries, k, v)


def page_by_page(kernel: Attention, problem: Problem) -> Result:
    """One token after the other, over the pages that have keys which it sees and no others."""
    size, layout = problem.layout.page_size, problem.layout
    within = jnp.arange(size)

    def one(given: tuple[Queries, jax.Array]) -> Result:
        queries, row = given
        single = jax.tree.map(lambda x: x[None], queries)

        def add(page: jax.Array, done: Result) -> Result:
            k, v = layout.read(problem.cache, problem.batch.page_table[row, page][None])
            new = kernel.attend(bare, single, k[0], v[0], page * size + within)
            return softmaxes.mixed(done, new)

        shape = queries.q.shape[:-1]
        out = jnp.zeros((1, *shape, problem.spec.v_dim), jnp.float32)
        begin = jnp.full(shape, softmaxes.LOWEST) if problem.sinks is None else problem.sinks
        first, stop = queries.first // size, -(-queries.end // size)
        return jax.lax.fori_loop(first, stop, add, (out, begin[None]))

    bare = dataclasses.replace(problem, sinks=None)
    queries = problem.queries
    queries = queries._replace(end=jnp.where(problem.real, queries.end, 0))
    out, lse = jax.lax.map(one, (queries, problem.row))
    return out[:, 0], lse[:, 0]


def of(softmax: Callable[..., Result], block: int) -> tuple[SoftmaxWay, Sizes]:
    """A softmax in blocks of so many keys, and the sizes that a kernel with it tells."""
    return functools.partial(softmax, block=block), Sizes(block)


DECODE, PREFILL = frozenset({"decode"}), frozenset({"prefill"})
UP_TO_300 = functools.partial(int.__ge__, 300)

every = Attention("every", caps(EVERY, kv_dtypes=FLOATS | STORED), each_row)
exact = Attention(
    "exact", caps(EVERY, kv_dtypes=FLOATS | STORED), each_row, exact=True, scale_first=True
)
thirds = Attention("thirds", caps(EVERY), each_row, functools.partial(softmaxes.splits, count=3))
strides = Attention(
    "strides", caps(USUAL), each_row, functools.partial(softmaxes.splits, count=3, strided=True)
)
powers_of_two = Attention("powers_of_two", caps(EVERY), each_row, base2=True, scale_first=True)
backwards = Attention(
    "backwards", caps(EVERY), each_row, *of(functools.partial(softmaxes.online, backwards=True), 32)
)
blocks_of_24 = Attention(
    "blocks_of_24", caps(USUAL), each_row, *of(softmaxes.online, 24), base2=True
)
narrow = Attention("narrow", caps(USUAL), each_row, functools.partial(softmaxes.whole, narrow=True))
narrow_sums = Attention(
    "narrow_sums",
    caps(EVERY, kv_dtypes=FLOATS | {"int8", "fp8"}),
    each_row,
    functools.partial(softmaxes.whole, narrow=True, last=True),
    product="by head",
)
chain = Attention("chain", caps(USUAL), each_row, *of(softmaxes.log_sums, 40))
tree = Attention(
    "tree",
    caps(EVERY, layouts=("nhd",)),
    each_row,
    *of(functools.partial(softmaxes.log_sums, merge="pairs"), 16),
)
vectors = Attention(
    "vectors",
    dataclasses.replace(
        caps(PLAIN | {"window"}),
        q_dtypes=frozenset({"float32"}),
        head_dim=functools.partial(int.__ge__, 64),
        context=functools.partial(int.__ge__, 128),
        rows=functools.partial(int.__ge__, 8),
    ),
    each_token,
    product="sums",
)
heads_of_64 = Attention(
    "heads_of_64",
    dataclasses.replace(
        caps(USUAL, layouts=("hnd", "nhd")), head_dim=functools.partial(int.__eq__, 64)
    ),
    each_row,
    *of(softmaxes.two_passes, 48),
)
pages_of_16 = Attention(
    "pages_of_16",
    dataclasses.replace(
        caps(PLAIN | {"window", "sinks", "lse"}), page_size=functools.partial(int.__eq__, 16)
    ),
    page_by_page,
)
decode_alone = Attention(
    "decode_alone",
    dataclasses.replace(caps(EVERY, modes=DECODE, kv_dtypes=FLOATS | STORED), compact_decode=True),
    whole_pages,
)
decode_thirds = Attention(
    "decode_thirds",
    dataclasses.replace(caps(EVERY, modes=DECODE), compact_decode=True),
    whole_pages,
    functools.partial(softmaxes.splits, count=3),
)
decode_backwards = Attention(
    "decode_backwards",
    caps(EVERY, modes=DECODE),
    whole_pages,
    *of(functools.partial(softmaxes.online, backwards=True), 32),
    base2=True,
    scale_first=True,
)
prefill_alone = Attention(
    "prefill_alone", caps(USUAL - {"kv_share"}, modes=PREFILL), own_keys, product="by head"
)
no_write = Attention(
    "no_write",
    dataclasses.replace(caps(frozenset()), ragged_decode=True),
    page_by_page,
    base2=True,
)
one_head_each = Attention(
    "one_head_each",
    dataclasses.replace(
        caps(USUAL, layouts=("tpu_rpa",), kv_dtypes=FLOATS | {"uint4"}),
        group=functools.partial(int.__eq__, 1),
        context=UP_TO_300,
    ),
    each_token,
    functools.partial(softmaxes.whole, last=True),
    scale_first=True,
)
short = Attention(
    "short",
    dataclasses.replace(
        caps(USUAL - {"fused_write"}),
        context=UP_TO_300,
        rows=functools.partial(int.__ge__, 8),
    ),
    each_row,
    *of(softmaxes.two_passes, 64),
)
