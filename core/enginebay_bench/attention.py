"""The benchmark of the op attention: the rows of a named shape with their own cache, checked
against f64 arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.ops import ATTENTION
from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.ops.batches import derive_batch
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_bench.cost import Cost
from enginebay_bench.problem import (
    BenchSetting,
    Inputs,
    OpBench,
    Parity,
    Problem,
    StepFunction,
    TuningKey,
    compared,
    noise,
    spread,
    worst,
)
from enginebay_bench.shapes import BATCHES, CONTEXTS, Axes, Shape, bucket_lengths
from enginebay_testing import oracle
from enginebay_testing.attention_inputs import share_slots, visible_from
from enginebay_testing.kernels import F32_BOUND, NARROW_FACTOR
from enginebay_testing.layouts import kept
from enginebay_testing.traced_cases import TracedShape, attention_case

COMPACT = "on a compact copy"
MAX_TOKENS = 64
ORACLE_WORK = 1e8
"""Max number of products in the f64 reference: of long contexts, fewer tokens are checked, but at
least two.
"""


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The lengths of a step's rows, and its static shapes."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    spec: AttnSpec
    bucket: Bucket
    layout: KVLayout
    table: np.ndarray | None = None
    """The page table of a step that was captured; None: one is made."""

    @property
    def starts(self) -> np.ndarray:
        """Return where each row begins in the packed contexts, [S + 1]."""
        return np.concatenate([[0], np.cumsum(self.kv_lens)])

    def tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (place in the step, row, position) of every new token."""
        rows = np.repeat(np.arange(len(self.q_lens)), self.q_lens)
        first = np.array(self.kv_lens) - np.array(self.q_lens)
        offsets = np.concatenate([np.arange(n) for n in self.q_lens])
        places = rows if self.bucket.mode == "decode" else np.arange(rows.size)
        return places, rows, first[rows] + offsets


@dataclasses.dataclass(frozen=True)
class _Facts:
    """Inputs that the check needs: keys and values [all tokens of all rows, Hkv, D], and queries
    [T, Hq, D].
    """

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray


def attention_cost(
    spec: AttnSpec,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    kv_bytes: float = 2,
    q_bytes: int = 2,
) -> Cost:
    """Return the cost of attention over rows with q_lens[i] new tokens and kv_lens[i] tokens of
    context, the new tokens included.
    """
    v_dim = spec.v_head_dim or spec.head_dim
    q, kv = np.asarray(q_lens, float), np.asarray(kv_lens, float)
    first = (
        kv - q + 1 if spec.causal else kv
    )  # positions that the first new token attends to; each later token attends to one more
    window = np.inf if spec.window is None else spec.window
    seen = np.minimum(kv, window + q - 1)  # positions that some new token attends to
    num_growing = (
        np.clip(window - first, 0, q) if spec.causal else q * 0
    )  # tokens that attend to less than a window
    pairs = (
        num_growing * first
        + num_growing * (num_growing - 1) / 2
        + (q - num_growing) * np.minimum(kv, window)
    ).sum()
    row_bytes = (
        spec.num_kv_heads * (spec.head_dim + (0 if spec.v_is_k_prefix else v_dim)) * kv_bytes
    )
    io_bytes = q.sum() * spec.num_q_heads * q_bytes
    return Cost(
        flops=2 * spec.num_q_heads * pairs * (spec.head_dim + v_dim),
        bytes_read=seen.sum() * row_bytes + io_bytes * spec.head_dim,
        bytes_written=q.sum() * row_bytes + io_bytes * v_dim,
    )


def step_problems(shape: Shape, setting: BenchSetting) -> list[Problem]:
    """Return a step over pages, and for decode steps also a step on a compact copy of the rows'
    cache, for implementations to which engines give such a copy.
    """
    paged = attention_problem(shape, setting)
    if shape.mode != "decode":
        return [paged]
    copied = attention_problem(shape, setting, compact=True)
    return [
        paged,
        dataclasses.replace(
            copied, label=COMPACT, is_for=lambda impl: bool(impl.caps.compact_decode)
        ),
    ]


def attention_problem(shape: Shape, setting: BenchSetting, *, compact: bool = False) -> Problem:
    """Return a step. `compact`: a decode step on a copy of the rows' cache with one page per row,
    as engines make it for some kernels.
    """
    q_lens, kv_lens = shape.lengths(ragged=setting.ragged)
    spec = shape.layer.spec(setting.dtype).stored_as(setting.cache_dtype or setting.dtype)
    bucket = shape.bucket(q_lens, setting.page_size, setting.min_rows, compact=compact)
    page_size = shape.context if compact else setting.page_size
    num_pages = bucket.seqs * bucket.pages_per_seq
    layout = spec.make_layout(setting.layout_type, num_pages, page_size)
    return _problem(shape.name, _Rows(q_lens, kv_lens, spec, bucket, layout), setting)


def bucket_problem(
    spec: AttnSpec, bucket: Bucket, layout: KVLayout, setting: BenchSetting
) -> Problem:
    """Return a step in a bucket of an engine, with ragged rows that fill it. The dtype and layout
    of `setting` are ignored.
    """
    name = f"{bucket.mode}, {bucket.tokens} tokens, {bucket.seqs} rows, context {bucket.max_kv_len}"
    return _problem(name, _Rows(*bucket_lengths(bucket), spec, bucket, layout), setting)


def traced_problem(shape: TracedShape, setting: BenchSetting) -> Problem:
    """Return a captured call of attention, in the layout of `setting`, with the rows and the page
    table of its step. It refuses every kernel where the benchmark cannot make the inputs.
    """
    case = attention_case(shape)
    layout = case.spec.make_layout(setting.layout_type, case.num_pages, case.page_size)
    table = np.array(case.table, np.int32)
    rows = _Rows(case.q_lens, case.kv_lens, case.spec, case.bucket, layout, table)
    problem = _problem(shape.name, rows, setting)
    reason = _why_no_inputs(case.spec)
    return problem if reason is None else dataclasses.replace(problem, why_not=lambda _: reason)


def _why_no_inputs(spec: AttnSpec) -> str | None:
    """Return why the benchmark has no inputs for a layer, or None; `check --trace` has them."""
    if spec.v_is_k_prefix or spec.v_dim != spec.head_dim:
        return "the benchmark has no latent cache"
    if spec.inputs:
        return f"the benchmark has no {', '.join(spec.inputs)}"
    return "the benchmark has no layer that reads another's cache" if spec.kv_shared else None


def _problem(name: str, rows: _Rows, setting: BenchSetting) -> Problem:
    spec, bucket, layout = rows.spec, rows.bucket, rows.layout
    item = jnp.dtype(spec.q_dtype).itemsize
    token_bytes = (2 * spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim * item
    kv_bytes: float = jnp.dtype(spec.kv_dtype).itemsize
    if spec.kv_storage:  # with the scales
        places = layout.num_pages * layout.page_size * spec.num_kv_heads
        kv_bytes = layout.num_bytes() / (2 * places * spec.head_dim)
    return Problem(
        name=name,
        cost=attention_cost(spec, rows.q_lens, rows.kv_lens, kv_bytes=kv_bytes, q_bytes=item),
        num_bytes=layout.num_bytes() + bucket.tokens * token_bytes,
        make=functools.partial(_make, rows, setting.seed),
        bind=functools.partial(_bind, rows, setting),
        check=functools.partial(_check, rows),
        why_not=lambda impl: impl.caps.why_not(setting.env, spec, bucket, layout),
        config=lambda impl: setting.tuned.config(
            ATTENTION, impl, setting.env, spec, bucket, layout
        ),
        key=TuningKey(spec, bucket, layout),
    )


def _bind(rows: _Rows, setting: BenchSetting, impl: Any, config: Any) -> StepFunction:
    fused = "fused_write" in impl.caps.features
    call = functools.partial(impl, spec=rows.spec, layout=rows.layout, config=config)

    def step(
        cache: CacheArrays, q: jax.Array, k: jax.Array, v: jax.Array, batch: AttnBatch
    ) -> tuple[jax.Array, CacheArrays]:
        if not fused:
            cache = setting.kv_write(cache, batch.slots, k, v, layout=rows.layout)
        out, cache, _ = call(q, k if fused else None, v if fused else None, cache, batch)
        return out, cache

    return step


def _make(rows: _Rows, seed: int, poison: float) -> Inputs:
    spec, bucket, layout = rows.spec, rows.bucket, rows.layout
    starts, (places, token_rows, positions) = rows.starts, rows.tokens()
    shape = (int(starts[-1]), spec.num_kv_heads, spec.head_dim)
    keys, values = (noise(shape, spec.kv_dtype, seed, i) for i in (1, 2))
    fresh = starts[token_rows] + positions
    table, slots = _tables(rows)
    if rows.table is not None:
        first = visible_from(spec, rows.q_lens, rows.kv_lens)
        each = [np.split(x, starts[1:-1]) for x in (slots, keys, values)]
        share_slots(each[0], first, *each[1:])
    q = np.full((bucket.tokens, spec.num_q_heads, spec.head_dim), poison).astype(
        jnp.dtype(spec.q_dtype)
    )
    k, v = np.full((2, bucket.tokens, *shape[1:]), poison).astype(jnp.dtype(spec.kv_dtype))
    q[places] = noise((places.size, *q.shape[1:]), spec.q_dtype, seed, 3)
    k[places], v[places] = keys[fresh], values[fresh]
    slots[fresh] = -1  # the step itself writes these slots
    lens = np.zeros((2, bucket.seqs), np.int32)
    lens[:, : len(rows.q_lens)] = rows.q_lens, rows.kv_lens
    cache = {n: _full_of(poison, s) for n, s in layout.shapes().items()}
    cache = jax.jit(layout.write, donate_argnums=0)(cache, slots, keys, values)
    batch = jax.jit(derive_batch, static_argnums=(3, 4))(*lens, table, layout.page_size, bucket)
    (keys,), (values,) = kept(layout, [keys], [values])
    return Inputs(
        cache, (jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), batch), _Facts(keys, values, q)
    )


def _full_of(poison: float, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array full of poison; an array of integers is full of their largest value."""
    if jnp.issubdtype(shape.dtype, jnp.integer):
        poison = jnp.iinfo(shape.dtype).max
    return jnp.full(shape.shape, poison, shape.dtype)


def _tables(rows: _Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return (page_table int32 [S, P], slots int32 of every position of every row)."""
    bucket, size = rows.bucket, rows.layout.page_size
    table = np.zeros((bucket.seqs, bucket.pages_per_seq), np.int32)
    if rows.table is not None:
        table = rows.table
    elif bucket.rows_are_pages:
        table[:, 0] = np.arange(bucket.seqs)
    else:
        pages = np.random.default_rng(0).permutation(rows.layout.num_pages).astype(np.int32)
        for i, length in enumerate(rows.kv_lens):
            used = -(-length // size)
            table[i, :used] = pages[i * bucket.pages_per_seq :][:used]
    row = np.repeat(np.arange(len(rows.kv_lens)), rows.kv_lens)
    position = np.concatenate([np.arange(n) for n in rows.kv_lens])
    return table, (table[row, position // size] * size + position % size).astype(np.int32)


def _check(rows: _Rows, inputs: Inputs, out: Any, state: Any) -> Parity:
    """Compare some tokens with f64, padding with zeros, and every bit of the cache with the
    layout's own write.
    """
    facts: _Facts = inputs.facts
    got = np.asarray(out)
    places, token_rows, positions = rows.tokens()
    work = rows.spec.num_q_heads * rows.spec.head_dim * max(rows.kv_lens)
    chosen = spread(places.size, max(2, min(MAX_TOKENS, int(ORACLE_WORK / work))))
    against = compared(chosen.size, places.size, "tokens")
    if np.delete(got, places, axis=0).astype(np.float64).any():
        return Parity(float("nan"), float("inf"), "padding tokens, which must give 0")
    if not bool(_same_cache(rows.layout, inputs.state, inputs.arrays, state)):
        return Parity(float("nan"), float("inf"), "the cache, bit by bit")
    parts = [
        _compare_token(rows, facts, got, int(places[i]), token_rows[i], positions[i])
        for i in chosen
    ]
    errors, allowed, roundings = (np.array(part) for part in zip(*parts, strict=True))
    return worst(errors, allowed + NARROW_FACTOR * roundings.max(), against)


def _compare_token(
    rows: _Rows, facts: _Facts, got: np.ndarray, place: int, row: int, position: int
) -> tuple[float, float, float]:
    """Return (error, error that f32 arithmetic allows, error of exact arithmetic rounded to the
    dtype) of one token.
    """
    spec = rows.spec
    context = slice(rows.starts[row], rows.starts[row] + position + 1)
    keys, values, query = facts.keys[context], facts.values[context], facts.queries[place][None]
    exact, _ = oracle.attend(query, keys, values, spec)
    error = np.abs(got[place].astype(np.float64) - exact[0])
    largest = float("nan") if np.isnan(error).any() else float(error.max())
    score = oracle.largest_score(query, keys, spec)
    allowed = F32_BOUND * (1.0 + score) * float(np.abs(values.astype(np.float64)).max())
    if spec.q_dtype == "float32":
        return largest, allowed, 0.0
    narrow, _ = oracle.attend(query, keys, values, spec, weights_dtype=jnp.dtype(spec.q_dtype))
    return largest, allowed, float(np.abs(narrow - exact).max())


@functools.partial(jax.jit, static_argnums=0)
def _same_cache(
    layout: KVLayout, before: CacheArrays, arrays: tuple[Any, ...], after: CacheArrays
) -> jax.Array:
    _, k, v, batch = arrays
    wanted = layout.write(before, batch.slots, k, v)
    return jnp.stack([same_bits(wanted[name], after[name]) for name in wanted]).all()


def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return whether two arrays of one dtype are equal bit by bit, NaNs included."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    return (jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits)).all()


BENCH = OpBench(Axes(BATCHES, dict.fromkeys(BATCHES, CONTEXTS)), step_problems)
"""The benchmark of the op attention."""
