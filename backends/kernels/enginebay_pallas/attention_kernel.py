"""The kernel of ragged paged attention. It reads pages by DMA into two buffers, computes an online
softmax, and writes the new tokens to the cache in place.

The online softmax is that of Milakov and Gimelshein (arXiv 1805.02867) and Dao et al. (arXiv
2205.14135). Prefetching pages across rows and writing in the same kernel come from ragged paged
attention (arXiv 2604.15464).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from enginebay_pallas.attention_codes import load_codes, load_factors
from enginebay_pallas.attention_plan import (
    AttentionPlan,
    PlanTables,
    Span,
    blocks_of,
    place_of_block,
    span_of,
)
from enginebay_pallas.generations import LANES

MASKED = -1e30
"""Score of a masked key. It is finite, so that the difference of two is 0 and not NaN."""


class Scratch(NamedTuple):
    """Scratch memory of the kernel.

    VMEM has two buffers of keys and values and the state of the softmax. SMEM has `progress`: the
    number of blocks read so far, and whether the first block of the next unit is being read. The
    rest are semaphores of DMAs. For a quantised cache, VMEM also has two buffers of scales by page,
    and the scales of a chunk of keys; the same for zero points, if there are any.
    """

    buffers: Any
    highest: Any
    total: Any
    sums: Any
    read_done: Any
    write_done: Any
    progress: Any
    scales: Any = None
    scale_rows: Any = None
    zeros: Any = None
    zero_rows: Any = None


class CacheRefs(NamedTuple):
    """The arrays of the cache: keys and values; of a quantised cache scales and zero points too."""

    kv: Any
    scales: Any = None
    zeros: Any = None


def for_each_read(
    *,
    plan: AttentionPlan,
    tables: PlanTables,
    scratch: Scratch,
    sources: tuple[CacheRefs, Any],
    span: Span,
    step: Any,
    slot: Any,
    act: Callable[[Any], None],
) -> None:
    """Call act(DMA) for every copy of a block into buffer `slot`.

    `sources` are the cache and the new tokens. Pages without a visible key are not read, because
    another row may own and write them.
    """
    cache, new = sources
    size = plan.page_size
    in_block = plan.block_kv // size

    def copy(source: Any, i: Any) -> None:
        target = scratch.buffers.at[slot, pl.ds(i * size, size)]
        act(pltpu.make_async_copy(source, target, scratch.read_done.at[slot]))

    def pages() -> None:
        first = (span.first_cached + step) * in_block
        table = span.row * plan.pages_per_seq + first
        # The window covers no key of these pages.
        skipped = jnp.maximum(lax.div(span.begin, jnp.int32(size)) - first, 0)
        needed = jnp.minimum(blocks_of(span.cached, size) - first, in_block)

        def page(i: Any, _: None) -> None:
            page_id = tables.page_table[table + i]
            copy(cache.kv.at[page_id], i)
            for factors, buffer in ((cache.scales, scratch.scales), (cache.zeros, scratch.zeros)):
                if factors is not None:
                    done = scratch.read_done.at[slot]
                    act(pltpu.make_async_copy(factors.at[page_id], buffer.at[slot, i], done))

        lax.fori_loop(skipped, needed, page, None)

    if not plan.no_prefix or plan.one_token:
        pages()
        return
    pl.when(step < span.num_cached)(pages)

    @pl.when(step >= span.num_cached)
    def _() -> None:
        first = (span.first_fresh + step - span.num_cached) * in_block
        needed = jnp.minimum(blocks_of(span.end - span.kv_len + span.q_len, size) - first, in_block)
        source = span.start + first * size
        lax.fori_loop(0, needed, lambda i, _: copy(new.at[pl.ds(source + i * size, size)], i), None)


def for_each_write(
    *,
    plan: AttentionPlan,
    tables: PlanTables,
    scratch: Scratch,
    span: Span,
    cache: Any,
    new: Any,
    act: Callable[[Any], None],
) -> None:
    """Call act(DMA) for every copy of a row's new tokens into its pages.

    The size of a DMA is static. So tokens are copied as whole pages, runs of eight, and single
    tokens.
    """
    size, done = plan.page_size, scratch.write_done
    table = span.row * plan.pages_per_seq
    if plan.one_token:
        last = span.kv_len - 1
        page_id = tables.page_table[table + lax.div(last, jnp.int32(size))]
        target = cache.at[page_id, pl.ds(lax.rem(last, jnp.int32(size)), 1)]
        act(pltpu.make_async_copy(new, target, done))
        return
    before = span.kv_len - span.q_len

    def page(i: Any, _: None) -> None:
        low = jnp.maximum(before - i * size, 0)
        high = jnp.minimum(span.kv_len - i * size, size)
        page_id = tables.page_table[table + i]
        first = span.start + i * size - before

        def runs(length: int, at: Any) -> Any:
            def run(_: Any, at: Any) -> Any:
                source, target = (
                    new.at[pl.ds(first + at, length)],
                    cache.at[page_id, pl.ds(at, length)],
                )
                act(pltpu.make_async_copy(source, target, done))
                return at + length

            return lax.fori_loop(0, lax.div(high - at, jnp.int32(length)), run, at)

        at = low
        for length in sorted({size, min(8, size), 1}, reverse=True):
            at = runs(length, at)

    lax.fori_loop(lax.div(before, jnp.int32(size)), blocks_of(span.kv_len, size), page, None)


def load_head(
    plan: AttentionPlan, buffers: Any, slot: Any, offset: Any, head: Any, valid: jax.Array
) -> tuple[Any, Any]:
    """Return (keys, values) [chunk_kv, lanes] of a KV head, 0 where `valid` [chunk_kv, 1] is false.
    Those of a quantised cache are codes.

    A word of 32 bits holds 16 bits of a key and 16 of a value. The device reads words with a stride
    and splits them. References in the interpreter have one dtype, so it reads both at once. It
    reads slices, because its race detector misses elements that are addressed by a number.
    """
    tokens = pl.ds(offset, plan.chunk_kv)
    if plan.storage is not None:
        place = (slot, tokens)
        k, v = load_codes(
            buffers, place, head, valid, plan.storage, is_interpreted=plan.is_interpreted
        )
        return k.astype(plan.spec.kv_dtype), v.astype(plan.spec.kv_dtype)
    if plan.is_interpreted:
        entries = 2 // buffers.shape[3]
        pair = buffers[slot, tokens, pl.ds(entries * head, entries)]
        pair = jnp.where(
            valid[..., None], pair.reshape(plan.chunk_kv, 2, -1), jnp.zeros((), pair.dtype)
        )
        return pair[:, 0], pair[:, 1]
    if buffers.dtype.itemsize == 4:
        k, v = (buffers[slot, tokens, 2 * head + i, 0, :] for i in range(2))
        return jnp.where(valid, k, 0.0), jnp.where(valid, v, 0.0)
    words = buffers.bitcast(jnp.uint32)[slot, tokens, head, 0, :]
    words = jnp.where(valid, words, jnp.uint32(0))
    k = lax.bitcast_convert_type(lax.shift_left(words, jnp.uint32(16)), jnp.float32)
    v = lax.bitcast_convert_type(lax.bitwise_and(words, jnp.uint32(0xFFFF0000)), jnp.float32)
    return k.astype(buffers.dtype), v.astype(buffers.dtype)


def scaled_scores(
    plan: AttentionPlan, products: jax.Array, q: jax.Array, scratch: Scratch, head: Any
) -> jax.Array:
    """Return the scores [rows, chunk_kv] of the products of q and keys or their codes."""
    key = pl.ds(2 * head, 1)
    if scratch.zeros is not None:
        sums = jnp.sum(q.astype(jnp.float32), axis=1, keepdims=True)
        products = products - sums * scratch.zero_rows[key, :]
    if plan.storage is not None:
        products = products * scratch.scale_rows[key, :]
    return products * plan.spec.softmax_scale


def weighted_values(
    plan: AttentionPlan,
    weights: jax.Array,
    v: jax.Array,
    scratch: Scratch,
    head: Any,
    precision: Any,
) -> jax.Array:
    """Return the products [rows, lanes] of weights [rows, chunk_kv] and values or their codes."""
    value = pl.ds(2 * head + 1, 1)
    if plan.storage is not None:
        weights = weights * scratch.scale_rows[value, :]
    rounded = weights.astype(v.dtype)
    products = lax.dot_general(
        rounded, v, (((1,), (0,)), ((), ())), precision, preferred_element_type=jnp.float32
    )
    if scratch.zeros is None:
        return products
    zeros = rounded.astype(jnp.float32) * scratch.zero_rows[value, :]
    return products - jnp.sum(zeros, axis=1, keepdims=True)


def attend_block(
    *,
    plan: AttentionPlan,
    q: Any,
    scratch: Scratch,
    slot: Any,
    base: Any,
    limit: Any,
    span: Span,
) -> None:
    """Add a buffer's keys to the softmax state of all heads, `chunk_kv` keys at a time.

    The first key of the buffer has position `base`.
    """
    spec, size = plan.spec, plan.chunk_kv
    precision = lax.Precision.HIGHEST if spec.kv_dtype == "float32" else None
    if plan.one_token:
        seen_to = span.position
    else:
        place = lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
        seen_to = span.position + lax.bitwise_and(place, plan.block_q - 1)

    def chunk(i: Any, _: None) -> None:
        first = base + i * size
        own = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        valid = own < limit
        if spec.window is not None:  # keys before it were not read
            valid &= own >= span.begin
        keys = first + lax.broadcasted_iota(jnp.int32, (plan.rows, size), 1)
        visible = keys < limit
        if spec.causal:
            visible &= keys <= seen_to
        if spec.window is not None:
            visible &= keys > seen_to - spec.window
        if plan.storage is not None:
            at = first + lax.broadcasted_iota(jnp.int32, (1, size), 1)
            real = (at < limit) & (at >= span.begin)
            page = i * (size // plan.page_size)
            load_factors(scratch.scales, scratch.scale_rows, slot, page, real)
            if scratch.zeros is not None:
                load_factors(scratch.zeros, scratch.zero_rows, slot, page, real)

        def one_head(head: Any, _: None) -> None:
            k, v = load_head(plan, scratch.buffers, slot, i * size, head, valid)
            scores = lax.dot_general(
                q[0, head],
                k,
                (((1,), (1,)), ((), ())),
                precision,
                preferred_element_type=jnp.float32,
            )
            scores = scaled_scores(plan, scores, q[0, head], scratch, head)
            if spec.softcap is not None:
                scores = spec.softcap * jnp.tanh(scores / spec.softcap)
            scores = jnp.where(visible, scores, MASKED)
            before = scratch.highest[head]
            highest = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - highest[:, :1]), 0.0)
            kept = jnp.exp(before - highest)
            scratch.highest[head] = highest
            scratch.total[head] = scratch.total[head] * kept + jnp.sum(
                weights, axis=1, keepdims=True
            )
            added = weighted_values(plan, weights, v, scratch, head, precision)
            scratch.sums[head] = scratch.sums[head] * kept[:, :1] + added

        lax.fori_loop(0, spec.num_kv_heads, one_head, None, unroll=plan.unroll_heads)

    unseen = lax.div(jnp.maximum(span.begin - base, 0), jnp.int32(size))
    lax.fori_loop(unseen, blocks_of(jnp.minimum(limit - base, plan.block_kv), size), chunk, None)


def finish_unit(plan: AttentionPlan, out: Any, lse: Any, scratch: Scratch) -> None:
    """Write the outputs of a unit: 0 and -inf where no key was visible."""

    def one_head(head: Any, _: None) -> None:
        total = scratch.total[head]
        seen = total > 0.0
        safe = jnp.where(seen, total, 1.0)
        out[0, head] = (scratch.sums[head] / safe[:, :1]).astype(out.dtype)
        if lse is not None:
            lse[0, head] = jnp.where(seen, scratch.highest[head] + jnp.log(safe), -jnp.inf)

    lax.fori_loop(0, plan.spec.num_kv_heads, one_head, None)


def num_arrays(plan: AttentionPlan) -> int:
    """Return the number of arrays of the cache."""
    return {None: 1, "uint4": 3}.get(plan.storage, 2)


def kernel(plan: AttentionPlan, *refs: Any) -> None:
    """Run one unit.

    `refs` are PlanTables, q, the new tokens if any, the cache, the outputs with the cache that the
    kernel writes (it is aliased), and Scratch.
    """
    tables = PlanTables(*refs[:5])
    q, *rest = refs[5:]
    new: Any = rest.pop(0) if plan.no_prefix else None
    given = [rest.pop(0) for _ in range(num_arrays(plan))]
    out = rest.pop(0)
    lse = rest.pop(0) if plan.is_wide else None
    # A cache that the kernel writes is an output, in the same memory as the input.
    cache = CacheRefs(*given) if plan.storage else CacheRefs(rest.pop(0))
    scratch = Scratch(*rest)
    unit = pl.program_id(0)
    span, following = span_of(plan, tables, unit), span_of(plan, tables, unit + 1)

    @pl.when(unit == 0)
    def _() -> None:
        scratch.progress[0] = 0
        scratch.progress[1] = 0

    done_before, is_started = scratch.progress[0], scratch.progress[1] != 0
    scratch.highest[...] = jnp.full_like(scratch.highest, MASKED)
    scratch.total[...] = jnp.zeros_like(scratch.total)
    scratch.sums[...] = jnp.zeros_like(scratch.sums)

    reads = functools.partial(
        for_each_read, plan=plan, tables=tables, scratch=scratch, sources=(cache, new)
    )
    writes = functools.partial(
        for_each_write,
        plan=plan,
        tables=tables,
        scratch=scratch,
        span=span,
        cache=cache.kv,
        new=new,
    )

    # The last unit of a row writes the row's new tokens after it has read the row's pages. No
    # other unit reads the pages that it writes.
    is_last = span.num_blocks > 0
    if plan.no_prefix and not plan.one_token:
        is_last &= tables.unit_first[unit] + plan.block_q >= span.q_len
    writing_step = span.num_cached - 1 if plan.one_token else span.num_cached

    def write(slot: Any, base: Any) -> None:
        if plan.one_token:
            scratch.buffers[slot, pl.ds(span.kv_len - 1 - base, 1)] = new[...]
        writes(act=lambda copy: copy.start())

    def block(step: Any, _: None) -> None:
        slot = lax.bitwise_and(done_before + step, 1)
        is_mine = step + 1 < span.num_blocks
        after = jax.tree.map(functools.partial(jnp.where, is_mine), span, following)

        def ask() -> None:
            reads(
                span=after,
                step=jnp.where(is_mine, step + 1, 0),
                slot=1 - slot,
                act=lambda copy: copy.start(),
            )

        def attend() -> None:
            reads(span=span, step=step, slot=slot, act=lambda copy: copy.wait())
            base, limit = place_of_block(plan, span, step)
            if plan.no_prefix:
                pl.when(is_last & (step == writing_step))(functools.partial(write, slot, base))
            attend_block(
                plan=plan, q=q, scratch=scratch, slot=slot, base=base, limit=limit, span=span
            )

        pl.when(is_mine | (following.num_blocks > 0))(ask)
        pl.when(step >= 0)(attend)

    # When the first block was not prefetched, the loop begins one step earlier and reads it.
    first_step = jnp.where((span.num_blocks > 0) & ~is_started, -1, 0)
    lax.fori_loop(first_step, span.num_blocks, block, None)
    scratch.progress[0] = done_before + span.num_blocks
    scratch.progress[1] = ((span.num_blocks > 0) & (following.num_blocks > 0)).astype(jnp.int32)
    finish_unit(plan, out, lse, scratch)
    if plan.no_prefix:
        pl.when(is_last)(lambda: writes(act=lambda copy: copy.wait()))


def paged_attention(
    plan: AttentionPlan,
    tables: PlanTables,
    num_units: jax.Array,
    q: jax.Array,
    new: jax.Array | None,
    cache: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, ...]]:
    """Return (out [U, Hkv, rows, lanes], log-sum-exp f32 [U, Hkv, rows] or None, cache).

    The first `num_units` units are run, a scalar on the device; the results of other units are not
    written. `new` [T, *token] has the new tokens in the form of the pages. Unless each unit has one
    token, one more page follows them. `cache` has the arrays of CacheRefs; a quantised one is read
    only, and `new` is None.
    """
    _, heads, rows, lanes = q.shape
    by_unit = pl.BlockSpec((1, heads, rows, lanes), lambda unit, *_: (unit, 0, 0, 0))
    in_memory = pl.BlockSpec(memory_space=pltpu.HBM)
    in_specs, arguments = [by_unit], [q]
    if plan.no_prefix and new is not None:
        most = new.shape[0] - 1
        token = pl.BlockSpec(
            (1, *new.shape[1:]), lambda unit, *_: (jnp.minimum(unit, most), 0, 0, 0)
        )
        in_specs.append(token if plan.one_token else in_memory)
        arguments.append(new)
    wide = jax.ShapeDtypeStruct((*q.shape[:3], LANES), jnp.float32)
    out_dtype = jnp.float32 if plan.is_wide else q.dtype
    outputs = [(jax.ShapeDtypeStruct(q.shape, out_dtype), by_unit)]
    if plan.is_wide:
        outputs.append(
            (wide, pl.BlockSpec((1, heads, rows, LANES), lambda unit, *_: (unit, 0, 0, 0)))
        )
    aliases = {}
    if plan.storage is None:
        aliases = {len(tables) + len(arguments): len(outputs)}
        outputs.append((jax.ShapeDtypeStruct(cache[0].shape, cache[0].dtype), in_memory))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(tables),
        grid=(num_units,),
        in_specs=[*in_specs, *[in_memory for _ in cache]],
        out_specs=[block for _, block in outputs],
        scratch_shapes=scratch_shapes(plan, (heads, rows, lanes), cache),
    )
    call = pl.pallas_call(
        functools.partial(kernel, plan),
        out_shape=[shape for shape, _ in outputs],
        grid_spec=grid_spec,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        name="paged_decode" if plan.one_token else "paged_chunks",
    )
    out, *others = call(*tables, *arguments, *cache)
    lse = others[0][..., 0] if plan.is_wide else None
    return out, lse, cache if plan.storage else (others[-1],)


def scratch_shapes(
    plan: AttentionPlan, shape: tuple[int, int, int], cache: tuple[jax.Array, ...]
) -> list[Any]:
    """Return the scratch memory for queries [heads, rows, lanes], in the order of Scratch."""
    heads, rows, lanes = shape
    kv, *factors = cache
    found: list[Any] = list(
        Scratch(
            buffers=pltpu.VMEM((2, plan.block_kv, *kv.shape[2:]), kv.dtype),
            highest=pltpu.VMEM((heads, rows, LANES), jnp.float32),
            total=pltpu.VMEM((heads, rows, LANES), jnp.float32),
            sums=pltpu.VMEM((heads, rows, lanes), jnp.float32),
            read_done=pltpu.SemaphoreType.DMA((2,)),
            write_done=pltpu.SemaphoreType.DMA,
            progress=pltpu.SMEM((2,), jnp.int32),
        )[:7]
    )
    for each in factors:
        pages = plan.block_kv // plan.page_size
        found.append(pltpu.VMEM((2, pages, *each.shape[1:]), each.dtype))
        found.append(pltpu.VMEM((each.shape[1], plan.chunk_kv), jnp.float32))
    return found
