"""Quick cases of the op attention: few rows, with lengths around the borders of a page. Unused
places of the cache and padding tokens are NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.quick_cases import CheckSetting, QuickCase
from enginebay.contracts.cache import KVLayout
from enginebay.ops.batches import derive_batch
from enginebay.ops.caps import FEATURE_OF, LAYER
from enginebay.ops.head_inputs import draw_inputs
from enginebay.ops.spec import AttnSpec, Bucket, Mode

PADDING_ROWS, PADDING_TOKENS, SPARE_PAGES = 1, 3, 2


def quick_attention_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield decode steps, with several pages per row and with one; prompts; and mixed steps."""
    size = setting.page_size
    border = (1, size - 1, size, size + 1, 2 * size)
    for spec in dict.fromkeys(setting.specs):
        case = functools.partial(_case, setting, spec)
        if "decode" in setting.phases:
            yield case("decode", (1,) * 5, border)
            yield case("decode", (1,) * 5, border, rows_are_pages=True)
        if "prefill" in setting.phases:
            yield case("prefill", (3, size + 1), (3, size + 1))
        if "mixed" in setting.phases:
            yield case("mixed", (1, 9, 5), (size + 1, 9, size + 3))


def _case(
    setting: CheckSetting,
    spec: AttnSpec,
    mode: Mode,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    *,
    rows_are_pages: bool = False,
) -> QuickCase:
    capacity, seqs = 2 * setting.page_size, len(q_lens) + PADDING_ROWS
    page_size = capacity if rows_are_pages else setting.page_size
    decode, pages_per_seq = mode == "decode", capacity // page_size
    tokens = seqs if decode else sum(q_lens) + PADDING_TOKENS
    bucket = Bucket(
        tokens=tokens,
        seqs=seqs,
        pages_per_seq=pages_per_seq,
        max_q_len=max(q_lens),
        max_kv_len=capacity,
        mode=mode,
        rows_are_pages=rows_are_pages,
    )
    num_pages = seqs if rows_are_pages else seqs * pages_per_seq + SPARE_PAGES
    layout = spec.make_layout(setting.layout_type, num_pages, page_size)
    rows = np.repeat(np.arange(len(q_lens)), q_lens)
    rows = np.concatenate([rows, np.full(tokens - len(rows), -1)])
    name = f"{mode}_rows_are_pages" if rows_are_pages else mode

    def run(impl: Any, *inputs: Any) -> dict[str, jax.Array]:
        return _step(impl, setting, spec, layout=layout, bucket=bucket, rows=rows, inputs=inputs)

    def place(result: str, row: int) -> str:
        where = f"{name}, layout {layout.name}"
        if result in ("k", "v"):
            return f"{where}: {result} of page {row} in the cache afterwards"
        what = "padding" if rows[row] < 0 else f"token {row} of row {rows[row]}"
        return f"{where}: {what}" if result == "out" else f"{where}: {result} of {what}"

    return QuickCase(
        name,
        run,
        _inputs(spec, layout, bucket, q_lens, kv_lens, rows),
        exact=frozenset({"k", "v"}),
        serves=lambda impl: (
            FEATURE_OF.keys() >= set(spec.inputs)  # the reference knows no others
            and impl.caps.why_not(setting.env, spec, bucket, layout) is None
        ),
        place=place,
    )


def _inputs(
    spec: AttnSpec,
    layout: KVLayout,
    bucket: Bucket,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    rows: np.ndarray,
) -> tuple[Any, ...]:
    """Return the inputs of a step.

    They are q, new k and v, k and v of every place of the cache, the rows' lengths and pages, and
    the inputs of the spec.
    """
    rng = np.random.default_rng(0)
    heads, size = (spec.num_kv_heads, spec.head_dim), layout.page_size
    q = np.full((bucket.tokens, spec.num_q_heads, spec.head_dim), np.nan)
    q[rows >= 0] = rng.normal(size=(int((rows >= 0).sum()), *q.shape[1:]))
    new = np.full((2, bucket.tokens, *heads), np.nan)
    old = np.full((2, layout.num_pages * size, *heads), np.nan)
    lens = np.zeros((2, bucket.seqs), np.int32)
    table = np.zeros((bucket.seqs, bucket.pages_per_seq), np.int32)
    pages = rng.permutation(layout.num_pages)
    for row, (count, total) in enumerate(zip(q_lens, kv_lens, strict=True)):
        used = -(-total // size)
        mine, pages = pages[:used], pages[used:]
        table[row, :used] = row if bucket.rows_are_pages else mine
        lens[:, row] = count, total
        both = rng.normal(size=(2, total, *heads))
        positions = np.arange(total if spec.kv_shared else total - count)
        old[:, table[row, positions // size] * size + positions % size] = both[:, : len(positions)]
        new[:, rows == row] = both[:, total - count :]
    if bucket.rows_are_pages:
        table[:, 0] = np.arange(bucket.seqs)
    per_head = draw_inputs(spec.inputs, spec.num_q_heads, rng)
    wide, narrow = jnp.dtype(spec.q_dtype), jnp.dtype(spec.kv_dtype)
    arrays = (q.astype(wide), new.astype(narrow), old.astype(narrow))
    return (*arrays, lens, table, per_head)


def _step(
    impl: Any,
    setting: CheckSetting,
    spec: AttnSpec,
    layout: KVLayout,
    bucket: Bucket,
    rows: np.ndarray,
    inputs: Any,
) -> dict[str, jax.Array]:
    """Fill a cache, run one step, and return its results and the contents of the cache."""
    q, new, old, lens, table, per_head = inputs
    places = jnp.arange(layout.num_pages * layout.page_size, dtype=jnp.int32)
    cache = layout.write(layout.init(), places, *old)
    batch = derive_batch(lens[0], lens[1], table, layout.page_size, bucket)
    values = new[0][..., : spec.v_dim] if spec.v_is_k_prefix else new[1]
    k, v = (None, None) if spec.kv_shared else (new[0], values)
    if k is not None and v is not None and "fused_write" not in impl.caps.features:
        cache, k, v = layout.write(cache, batch.slots, k, v), None, None
    config = impl.default_config(setting.env, spec, bucket, layout)
    if LAYER in impl.caps.inputs:
        per_head = {**per_head, LAYER: 0}
    out, after, lse = impl(
        q, k, v, cache, batch, spec=spec, layout=layout, config=config, **per_head
    )
    keys, values = layout.read(after, jnp.arange(layout.num_pages))
    found = {"out": out, "k": keys, "v": values}
    if spec.return_lse and lse is not None:
        found["log-sum-exp"] = jnp.where(rows[:, None] < 0, 0.0, lse)
    return found
