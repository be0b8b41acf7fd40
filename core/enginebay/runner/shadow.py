"""Shadow mode: a candidate runs on copies beside the chosen implementation, on a share of the live
steps.

Nothing that the live step reads or gives is touched: before a sampled step is launched, a program
of its own computes the queries, keys and values of each layer; then, layer by layer, both
implementations attend to them over a copy of the pages of the step's rows, one after the other and
timed. The live step is the same program as ever.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import CacheArrays
from enginebay.model import Model, Weights
from enginebay.ops.shadow import LayerDifference, ShadowPhase, ShadowReport
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, RopeSpec, derive_batch
from enginebay.runner import device
from enginebay.runner.compacting import compact_rows
from enginebay.runner.inputs import DecodeInputs, PrefillInputs, RunnerView
from enginebay.runner.keys import StepKey
from enginebay.runner.step import Layouts, OpsFactory, StepState

log = logging.getLogger("enginebay.runner")

MAX_TIMES = 1024
"""The last so many steps are what medians are taken of."""

QKV = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""What a layer gives attention; no k and v where it shares the cache of another."""

Captured = Mapping[str, tuple[QKV, ...]]
"""q, k and v of each layer by cache group."""


@dataclasses.dataclass(frozen=True)
class ShadowParts:
    """A candidate for attention: its name, the share of steps, the ops that have it, and the phases
    it is for.

    `compact_decode`: it wants decode steps on one page a row. `chosen` are the names of the chosen
    implementations by phase.
    """

    name: str
    share: float
    ops: OpsFactory
    compact_decode: bool
    chosen: Mapping[str, str]
    """Only the phases in which the candidate is compared."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How a copy of the rows' pages lies: one page a row, or as many as the step's tables have; and
    the step's bucket for it.
    """

    layouts: Layouts
    bucket: Bucket
    compact: bool

    @staticmethod
    def of(layouts: Layouts, bucket: Bucket, *, compact: bool) -> Form:
        """The form for a step of `bucket` over a cache of `layouts`."""
        seqs, pages = bucket.seqs, 1 if compact else bucket.pages_per_seq
        size = bucket.max_kv_len if compact else None
        small = {
            g: layout.resized(num_pages=seqs * pages, page_size=size)
            for g, layout in layouts.items()
        }
        return Form(
            small,
            dataclasses.replace(bucket, pages_per_seq=pages, rows_are_pages=pages == 1),
            compact,
        )

    def copy(
        self, layouts: Layouts, group: str, cache: CacheArrays, table: jax.Array
    ) -> dict[str, jax.Array]:
        """One layer's pages of the rows, in the order of the table int32 [S, P]."""
        if self.compact:
            return compact_rows(layouts[group], cache, table, self.bucket.max_kv_len)[1]
        return {name: array[table.reshape(-1)] for name, array in cache.items()}

    def batch(self, group: str, q_lens: jax.Array, kv_lens: jax.Array) -> AttnBatch:
        """The rows as they lie in a copy."""
        bucket = self.bucket
        places = jnp.arange(bucket.seqs * bucket.pages_per_seq, dtype=jnp.int32)
        table = places.reshape(bucket.seqs, bucket.pages_per_seq)
        return derive_batch(q_lens, kv_lens, table, self.layouts[group].page_size, bucket)


def capture(
    model: Model,
    make_ops: OpsFactory,
    layouts: Layouts,
    form: Form,
    weights: Weights,
    state: StepState,
    inputs: tuple[jax.Array, ...],
    tables: Mapping[str, jax.Array],
) -> tuple[Captured, jax.Array, jax.Array]:
    """The first token's worth of a step again: q, k, v of every layer, and the rows' q_lens and
    kv_lens int32 [S].

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
    groups = {spec: group for group, spec in model.info.attention.items()}
    seen: dict[str, list[QKV]] = {group: [] for group in layouts}

    def attention(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: CacheArrays,
        batch: AttnBatch,
        *,
        spec: AttnSpec,
        rope: RopeSpec | None = None,
    ) -> tuple[jax.Array, CacheArrays]:
        group = groups[spec]
        if rope is not None:  # both implementations are given the same rotated vectors
            q = rotate(q, batch.positions, spec=rope)
            k = None if k is None else rotate(k, batch.positions, spec=rope)
        seen[group].append((q, k, v))
        copy = form.copy(layouts, group, cache, tables[group])
        return attention_chosen(q, k, v, copy, batch, spec=spec)[0], cache

    batches = {group: form.batch(group, q_lens, kv_lens) for group in layouts}
    model.hidden(weights, ops.replaced("attention", attention), token_ids, state.cache, batches)
    return {group: tuple(layers) for group, layers in seen.items()}, q_lens, kv_lens


def attend(
    make_ops: OpsFactory,
    form: Form,
    group: str,
    spec: AttnSpec,
    copy: CacheArrays,
    qkv: QKV,
    q_lens: jax.Array,
    kv_lens: jax.Array,
) -> tuple[CacheArrays, tuple[jax.Array, ...]]:
    """One layer's attention over a copy, which is donated: (copy, (out, new keys, new values,
    whether a token is real)).
    """
    batch = form.batch(group, q_lens, kv_lens)
    out, after = make_ops(form.bucket, form.layouts).named("attention")(
        *qkv, copy, batch, spec=spec
    )
    k, v = form.layouts[group].read_tokens(after, jnp.maximum(batch.slots, 0))
    return after, (out, k, v, batch.seq_ids < form.bucket.seqs)


@jax.jit
def compare(
    chosen: tuple[jax.Array, ...], candidate: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """(largest difference, that over the largest value, values not finite, tokens with other keys
    or values, tokens).
    """
    out, k, v, real = chosen
    mine = real[:, None, None]
    want, got = (jnp.where(mine, x, 0).astype(jnp.float32) for x in (out, candidate[0]))
    bad = ~jnp.isfinite(got)
    off = jnp.where(bad | ~jnp.isfinite(want), 0, jnp.abs(got - want)).max()
    largest = jnp.where(jnp.isfinite(want), jnp.abs(want), 0).max()
    same = [
        ((a == b) | (jnp.isnan(a) & jnp.isnan(b))).all(axis=(1, 2))
        for a, b in ((k, candidate[1]), (v, candidate[2]))
    ]
    others = (real & ~(same[0] & same[1])).sum()
    relative = jnp.where(off > 0, off / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny), 0)
    return off, relative, bad.sum(), others, real.sum()


class _Phase:
    """What is counted of one phase."""

    def __init__(self) -> None:
        self.num_steps = self.num_compared = 0
        self.times: collections.deque[tuple[float, float]] = collections.deque(maxlen=MAX_TIMES)

    def median(self, side: int) -> float:
        """Of the seconds that one side's steps took."""
        times = list(self.times)
        return statistics.median(pair[side] for pair in times) if times else math.nan


class Shadow:
    """Compares a candidate with the chosen implementation. Belongs to the runner, and to its
    thread.
    """

    def __init__(self, parts: ShadowParts) -> None:
        self.parts = parts
        self._phases = {phase: _Phase() for phase in parts.chosen}
        self._layers: dict[tuple[str, str, int], LayerDifference] = {}
        self._programs: dict[Any, Any] = {}
        self._failed: set[StepKey] = set()
        self._num_failed = 0
        self._error: str | None = None

    def watch(self, runner: RunnerView, key: StepKey, inputs: PrefillInputs | DecodeInputs) -> None:
        """Called before a step is launched: the first of each phase is sampled, and then every
        1/share-th.

        A sampled step waits for the device. Whatever goes wrong is told in the report, and that
        program is not tried again.
        """
        phase = self._phases.get(key.bucket.mode)
        if phase is None:
            return
        number = phase.num_steps
        phase.num_steps += 1
        if number and int(number * self.parts.share) == int((number - 1) * self.parts.share):
            return
        if key in self._failed:
            return
        try:
            self._compare(runner, key, inputs, phase)
        except Exception as error:  # nothing that a candidate does may end the live step
            log.info("shadow %s failed on %s", self.parts.name, key, exc_info=True)
            self._failed.add(key)
            self._num_failed += 1
            self._error = self._error or " ".join(f"{key}: {type(error).__name__}: {error}".split())

    def report(self) -> ShadowReport:
        """What was found so far. May be called from any thread."""
        phases = tuple(
            ShadowPhase(
                name, self.parts.chosen[name], p.num_steps, p.num_compared, p.median(0), p.median(1)
            )
            for name, p in self._phases.items()
        )
        layers = tuple(self._layers.values())
        parts = self.parts
        return ShadowReport(
            "attention", parts.name, parts.share, phases, layers, self._num_failed, self._error
        )

    def _compare(
        self, runner: RunnerView, key: StepKey, inputs: PrefillInputs | DecodeInputs, phase: _Phase
    ) -> None:
        layouts, bucket = dict(runner.layouts), key.bucket
        forms = (
            Form.of(layouts, bucket, compact=key.kind == "compact"),
            Form.of(layouts, bucket, compact=self.parts.compact_decode and bucket.mode == "decode"),
        )
        factories = (runner.program.make_ops, self.parts.ops)
        tables = {group: jnp.asarray(table) for group, table in inputs.tables.items()}
        run = functools.partial(self._run, runner, (key, tuple(layouts.items())))
        step = functools.partial(capture, runner.program.model, factories[0], layouts, forms[0])
        captured, q_lens, kv_lens = run(
            "capture", step, (runner.weights, runner.state, _arrays(inputs), tables)
        )[0]
        totals = [0.0, 0.0]
        for group, layers in captured.items():
            spec = runner.info.attention[group]
            for layer, qkv in enumerate(layers):
                outs = []
                for side, (form, make_ops) in enumerate(zip(forms, factories, strict=True)):
                    cache = runner.state.cache[group][layer]
                    copying = functools.partial(form.copy, layouts, group)
                    copy, _ = run(("copy", side, group), copying, (cache, tables[group]))
                    attending = functools.partial(attend, make_ops, form, group, spec)
                    (_, out), seconds = run(
                        ("attend", side, group),
                        attending,
                        (copy, qkv, q_lens, kv_lens),
                        donated=(0,),
                    )
                    totals[side] += seconds
                    outs.append(out)
                self._note(bucket.mode, group, layer, compare(*outs))
        phase.times.append((totals[0], totals[1]))
        phase.num_compared += 1

    def _run(
        self,
        runner: RunnerView,
        key: Any,
        what: Any,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donated: tuple[int, ...] = (),
    ) -> tuple[Any, float]:
        """The function's result and the seconds that it took; compiled once for each key and
        `what`.
        """
        program = self._programs.get((key, what))
        if program is None:
            lowered = jax.jit(function, donate_argnums=donated).lower(*args)
            program = lowered.compile(compiler_options=runner.compile_options)
            self._programs[key, what] = program
        began_s = time.perf_counter()
        result = jax.block_until_ready(program(*args))
        return result, time.perf_counter() - began_s

    def _note(self, phase: str, group: str, layer: int, found: tuple[jax.Array, ...]) -> None:
        off, relative, bad, others, tokens = (np.asarray(x).item() for x in found)
        new = LayerDifference(
            phase, group, layer, off, relative, int(bad), int(others), int(tokens)
        )
        old = self._layers.get((phase, group, layer))
        self._layers[phase, group, layer] = new if old is None else old.joined(new)


def _arrays(inputs: PrefillInputs | DecodeInputs) -> tuple[jax.Array, ...]:
    """What `capture` takes of a step's host arrays."""
    if isinstance(inputs, DecodeInputs):
        return (jnp.asarray(inputs.row_ids),)
    columns = inputs.token_ids, inputs.ints[:, device.Q_LEN], inputs.ints[:, device.KV_LEN]
    return tuple(map(jnp.asarray, columns))
