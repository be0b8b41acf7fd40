"""Programs of a shadow: repeating a step of the model over copies of its rows' pages, and comparing
the results of two implementations of an op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import CacheArrays, KVLayout
from enginebay.contracts.commands import PrefillInputs, Step
from enginebay.contracts.executor import Layouts, OpsFactory
from enginebay.contracts.model import Model, Weights
from enginebay.errors import UnsupportedError
from enginebay.ops import prefill_columns as columns
from enginebay.ops.attention import NO_INPUTS, NamedInputs
from enginebay.ops.batches import derive_batch
from enginebay.ops.bound import Ops
from enginebay.ops.key_centers import without_center
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay_runtime.compacting import compact_rows
from enginebay_runtime.step import StepState

QKV = tuple[jax.Array, jax.Array | None, jax.Array | None, NamedInputs]
"""q, k and v of a layer, and its further inputs by name; k and v are None where the layer shares
the cache of another layer.
"""

Captured = Mapping[str, tuple[QKV, ...]]
"""The attention inputs of each layer, by cache group."""


@dataclasses.dataclass(frozen=True)
class ShadowCacheForm:
    """The layouts of a copy of the rows' pages, and the step's bucket for it. The copy has one page
    per row (`compact`), or as many as the step's tables.
    """

    layouts: Layouts
    bucket: Bucket
    compact: bool

    @staticmethod
    def of(layouts: Layouts, bucket: Bucket, *, compact: bool) -> ShadowCacheForm:
        """The form of the copy for a step of `bucket` over a cache of `layouts`."""
        seqs, pages = bucket.seqs, 1 if compact else bucket.pages_per_seq
        size = bucket.max_kv_len if compact else None
        small = {
            g: layout.resized(num_pages=seqs * pages, page_size=size)
            if isinstance(layout, KVLayout)
            else layout.resized(num_pages=seqs)
            for g, layout in layouts.items()
        }
        return ShadowCacheForm(
            small,
            dataclasses.replace(bucket, pages_per_seq=pages, rows_are_pages=pages == 1),
            compact,
        )

    def copy(
        self, layouts: Layouts, group: str, cache: CacheArrays, table: jax.Array
    ) -> dict[str, jax.Array]:
        """Copy one layer's pages of the rows, in the order of the table int32 [S, P]."""
        layout, (arrays, center) = layouts[group], without_center(cache)
        if self.compact and isinstance(layout, KVLayout):
            return {**compact_rows(layout, arrays, table, self.bucket.max_kv_len)[1], **center}
        return {name: array[table.reshape(-1)] for name, array in arrays.items()} | center

    def batch(self, group: str, q_lens: jax.Array, kv_lens: jax.Array) -> AttnBatch:
        """The AttnBatch of a step over a copy of one cache group: its page table numbers the copy's
        pages row by row.
        """
        bucket, layout = self.bucket, self.layouts[group]
        table = jnp.arange(layout.num_pages, dtype=jnp.int32).reshape(bucket.seqs, -1)
        return derive_batch(q_lens, kv_lens, table, layout.page_size, bucket)


def first_inputs(step: Step) -> tuple[jax.Array, ...]:
    """The host arrays of a step that `run_model` needs."""
    inputs = step.inputs
    if not isinstance(inputs, PrefillInputs):
        return (jnp.asarray(inputs.row_ids),)
    ints = inputs.ints
    return tuple(
        map(jnp.asarray, (inputs.token_ids, ints[:, columns.Q_LEN], ints[:, columns.KV_LEN]))
    )


def run_model(
    model: Model,
    make_ops: OpsFactory,
    layouts: Layouts,
    form: ShadowCacheForm,
    weights: Weights,
    state: StepState,
    inputs: tuple[jax.Array, ...],
    tables: Mapping[str, jax.Array],
) -> tuple[jax.Array, Captured, jax.Array, jax.Array]:
    """Repeat the first token of a step. Returns the hidden states [T, hidden], the attention inputs
    of every layer, and the rows' q_lens and kv_lens int32 [S].

    inputs: (token_ids, q_lens, kv_lens) of a prefill, (row_ids,) of a decode. The cache is only
    read.
    """
    if form.bucket.mode == "decode":
        rows = state.rows.take(inputs[0], 1)
        token_ids = rows.last_token
        q_lens, kv_lens = jnp.ones_like(token_ids), jnp.where(rows.finished, 0, rows.length)
    else:
        token_ids, q_lens, kv_lens = inputs
    ops = make_ops(form.bucket, form.layouts)
    rotate, attention_chosen = ops.named("rope"), ops.named("attention")
    groups = {spec.called: group for group, spec in model.info.attention.items()}
    seen: dict[str, list[QKV]] = {group: [] for group in model.info.attention}

    def attention(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: CacheArrays,
        batch: AttnBatch,
        *,
        spec: AttnSpec,
        rope: RopeSpec | None = None,
        inputs: NamedInputs = NO_INPUTS,
    ) -> tuple[jax.Array, CacheArrays, jax.Array | None]:
        group = groups[spec]
        if rope is not None:  # both implementations receive the same rotated vectors
            q = rotate(q, batch.positions, spec=rope)
            k = None if k is None else rotate(k, batch.positions, spec=rope)
        seen[group].append((q, k, v, inputs))
        copy = form.copy(layouts, group, cache, tables[group])
        out, _, lse = attention_chosen(q, k, v, copy, batch, spec=spec, inputs=inputs)
        return out, cache, lse

    batches = {group: form.batch(group, q_lens, kv_lens) for group in layouts}
    states = {
        one.name: tuple(
            form.copy(layouts, one.name, layer, tables[one.name]) for layer in state.cache[one.name]
        )
        for one in model.info.states
    }
    ops = ops.replaced("attention", attention).in_step(batches)
    hidden, _ = model.hidden(weights, ops, token_ids, {**state.cache, **states}, batches)
    return hidden, {group: tuple(layers) for group, layers in seen.items()}, q_lens, kv_lens


def capture(*args: Any) -> tuple[Captured, jax.Array, jax.Array]:
    """`run_model` without the hidden states."""
    return run_model(*args)[1:]


def compare_calls(
    op: str, model: Model, chosen: OpsFactory, candidate: OpsFactory, *args: Any
) -> tuple[jax.Array, jax.Array]:
    """Compare two implementations of an op at each call in a step.

    Returns (differences f32 [calls, 3], number of new tokens of the step). The three differences
    are the largest, the largest relative to the largest value, and the number of values that are
    not finite. `args` are the other arguments of `run_model`.
    """
    found: list[jax.Array] = []

    def make_ops(bucket: Bucket, layouts: Layouts) -> Ops:
        first, second = (make(bucket, layouts).named(op) for make in (chosen, candidate))

        def both(*given: Any, **named: Any) -> Any:
            wanted, got = first(*given, **named), second(*given, **named)
            parts = zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)
            each = jnp.stack([jnp.stack(difference(*pair)) for pair in parts])
            found.append(jnp.concatenate([each[:, :2].max(axis=0), each[:, 2:].sum(axis=0)]))
            return wanted

        return chosen(bucket, layouts).replaced(op, both)

    q_lens = run_model(model, make_ops, *args)[2]
    if not found:
        given = f"shadow.{op}: the model's layers do not call op {op!r}"
        raise UnsupportedError(given, "an op that they call", "Set shadow for another op.")
    return jnp.stack(found), q_lens.sum()


def difference(wanted: jax.Array, got: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """f32 (largest difference, the same relative to the largest value, number of values of `got`
    that are not finite).
    """
    want, mine = wanted.astype(jnp.float32), got.astype(jnp.float32)
    bad = ~jnp.isfinite(mine)
    off = jnp.where(bad | ~jnp.isfinite(want), 0, jnp.abs(mine - want)).max()
    largest = jnp.where(jnp.isfinite(want), jnp.abs(want), 0).max()
    relative = jnp.where(off > 0, off / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny), 0)
    return off, relative, bad.sum(dtype=jnp.float32)


def attend_over_copy(
    make_ops: OpsFactory,
    form: ShadowCacheForm,
    group: str,
    spec: AttnSpec,
    copy: CacheArrays,
    qkv: QKV,
    q_lens: jax.Array,
    kv_lens: jax.Array,
) -> tuple[CacheArrays, tuple[jax.Array, ...]]:
    """One layer's attention over a copy, which is donated. Returns (copy, (output, new keys, new
    values, whether each token is real)).
    """
    batch = form.batch(group, q_lens, kv_lens)
    out, after, _ = make_ops(form.bucket, form.layouts).named("attention")(
        *qkv[:3], copy, batch, spec=spec, inputs=qkv[3]
    )
    layout = form.layouts[group]
    assert isinstance(layout, KVLayout), "attention runs on groups of keys and values"
    k, v = layout.read_tokens(without_center(after)[0], jnp.maximum(batch.slots, 0))
    return after, (out, k, v, batch.seq_ids < form.bucket.seqs)


@jax.jit
def compare_outputs(
    chosen: tuple[jax.Array, ...], candidate: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """(largest difference, the same relative to the largest value, number of values that are not
    finite, number of tokens with other keys or values, number of tokens).
    """
    out, k, v, real = chosen
    mine = real[:, None, None]
    off, relative, bad = difference(*(jnp.where(mine, x, 0) for x in (out, candidate[0])))
    same = [
        ((a == b) | (jnp.isnan(a) & jnp.isnan(b))).all(axis=(1, 2))
        for a, b in ((k, candidate[1]), (v, candidate[2]))
    ]
    others = (real & ~(same[0] & same[1])).sum()
    return off, relative, bad, others, real.sum()


def hidden_states(*args: Any) -> jax.Array:
    """The hidden states of `run_model` alone."""
    return run_model(*args)[0]
