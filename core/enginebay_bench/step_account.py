"""The account of a step: what each op of the model costs at the rates of this machine, what it
takes alone, and what the whole step takes.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.composition import make_engine
from enginebay.compose.ops import ATTENTION
from enginebay.compose.plan import Plan
from enginebay.contracts.cache import CacheLayout, KVLayout, Lease
from enginebay.contracts.engine import Demand, RowPlan, StepPlan
from enginebay.contracts.model import ModelCache, Weights
from enginebay.contracts.prefix_key import DIGEST_BYTES, PrefixKey
from enginebay.errors import UnsupportedError
from enginebay.ops.op import Op
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket
from enginebay.types import FrozenSampling, Request
from enginebay_bench.attention import attention_cost
from enginebay_bench.cost import Cost
from enginebay_bench.machine_rates import MachineRates
from enginebay_bench.problem import cost_of
from enginebay_bench.timed_calls import seconds_alone
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.recorded_calls import CallRecorder, RecordedCall
from enginebay_runtime.shadow_steps import ShadowCacheForm

BatchesByGroup = Mapping[str, AttnBatch]


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """The steps of an account: a decode step of `num_rows` rows with `context` tokens in the cache,
    and a prefill step of one row's first `prompt_len` tokens. Times are the best of `rounds`.
    """

    num_rows: int = 1
    context: int = 128
    prompt_len: int = 128
    rounds: int = 10


@dataclasses.dataclass(frozen=True)
class OpCalls:
    """The calls of one op on arguments of the same shapes in a step, all of them together.

    `ideal_s` is predicted: the time of `cost` at the measured rates. `alone_s` is measured: calls
    that follow one another in a program of their own. `share` is ideal_s / alone_s.
    """

    op: str
    kernel: str
    shapes: str
    num_calls: int
    cost: Cost
    ideal_s: float
    bound: str
    alone_s: float

    @property
    def share(self) -> float:
        """The share of the roofline that the calls reach."""
        return self.ideal_s / self.alone_s


@dataclasses.dataclass(frozen=True)
class StepAccount:
    """A step of an engine by its ops. `step_s` is measured from the launch of a step until its
    tokens are on the host; for a decode step it is the time per token of a launch that computes
    `decode_steps` tokens.
    """

    name: str
    bucket: Bucket
    ops: tuple[OpCalls, ...]
    read_bytes_per_s: float
    step_s: float

    @property
    def ideal_s(self) -> float:
        """The predicted seconds of all ops."""
        return math.fsum(one.ideal_s for one in self.ops)

    @property
    def ops_s(self) -> float:
        """The measured seconds of all ops, each alone."""
        return math.fsum(one.alone_s for one in self.ops)

    @property
    def rest_s(self) -> float:
        """The measured seconds of the step beyond its ops: sampling, what the model computes
        between ops, the launch and the host's work. Below 0 where ops are faster in the step than
        alone.
        """
        return self.step_s - self.ops_s


@dataclasses.dataclass(frozen=True)
class CostedCalls:
    """The calls of one sort, what all of them cost, and the measured seconds of each alone."""

    calls: Sequence[RecordedCall]
    cost: Cost
    call_s: float


def account_of(
    name: str,
    bucket: Bucket,
    sorts: Sequence[CostedCalls],
    rates: MachineRates,
    kernels: Mapping[str, str],
    step_s: float,
) -> StepAccount:
    """Return the account of a step. An op is bound by memory or by arithmetic, whichever takes
    longer at the machine's rates. Bytes are moved at the read rate of arrays as large as everything
    that the step's ops read and write: a step finds in the processor's caches what the step
    before it has left there.
    """
    bytes_per_s = rates.read_bytes_per_s(moved_bytes([one.cost for one in sorts]))
    ops = []
    for one in sorts:
        first, cost = one.calls[0], one.cost
        flops_per_s = rates.flops_per_s(_dtype_of(first))
        ideal_s = cost.time_s(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
        ops.append(
            OpCalls(
                op=first.op,
                kernel=kernels.get(first.op, "its parts"),
                shapes=shapes_text(first),
                num_calls=len(one.calls),
                cost=cost,
                ideal_s=ideal_s,
                bound="arithmetic" if cost.flops / flops_per_s >= ideal_s else "memory",
                alone_s=one.call_s * len(one.calls),
            )
        )
    return StepAccount(name, bucket, tuple(ops), bytes_per_s, step_s)


def _dtype_of(call: RecordedCall) -> str:
    """Return the dtype of the activations of a call: that of its first floating-point array."""
    dtypes = (x.dtype for x in call.arrays)
    return str(next((d for d in dtypes if jnp.issubdtype(d, jnp.floating)), jnp.float32.dtype))


def shapes_text(call: RecordedCall) -> str:
    """Return the shapes of the first two arguments that have one, such as "1x64 256x64"."""
    shaped = [x for x in call.arguments[0] if hasattr(x, "shape")][:2]
    return " ".join("x".join(map(str, one.shape)) or "scalar" for one in shaped)


def step_accounts(plan: Plan, sizes: StepSizes, rates: MachineRates) -> list[StepAccount]:
    """Return the accounts of a prefill and of a decode step of a plan's engine, on one device.

    UnsupportedError for several devices, and for an engine whose steps are not those of
    enginebay_runtime.
    """
    if plan.placement.mesh is not None:
        given = f"an account of steps on {plan.placement.mesh.size} devices"
        raise UnsupportedError(given, "one device", "Leave --mesh out.")
    engine = make_engine(plan)
    if not isinstance(engine, StepEngine):
        given = f"an account of the steps of {type(engine).__name__}"
        todo = "Choose another engine with --engine."
        raise UnsupportedError(given, "an engine that is a StepEngine", todo)
    try:
        engine.make_arrays()
        return [
            _account(engine, plan, "prefill", sizes, rates),
            _account(engine, plan, "decode", sizes, rates),
        ]
    finally:
        engine.close()


def _account(
    engine: StepEngine, plan: Plan, phase: str, sizes: StepSizes, rates: MachineRates
) -> StepAccount:
    if phase == "prefill":
        name, lengths = f"prefill of {sizes.prompt_len} tokens", [sizes.prompt_len]
        bucket, step_s = measured_prefill(engine, sizes)
        recorder, form = record_step(engine, bucket, lengths, lengths)
    else:
        rows = "1 row" if sizes.num_rows == 1 else f"{sizes.num_rows} rows"
        name, ones = f"decode of {rows}, context {sizes.context}", [1] * sizes.num_rows
        bucket, step_s = measured_decode(engine, sizes)
        recorder, form = record_step(engine, bucket, ones, [sizes.context + 1] * sizes.num_rows)
    layouts = _layouts_by_spec(engine.parts.info.attention, form.layouts)
    sorts = recorder.sorts()
    costs = [
        total([cost_of_call(plan.kernels.ops, layouts, call) for call in calls]) for calls in sorts
    ]
    moved = moved_bytes(costs)
    costed = [
        CostedCalls(calls, cost, seconds_alone(recorder, calls, sizes.rounds, moved))
        for calls, cost in zip(sorts, costs, strict=True)
    ]
    kernels = {**plan.kernels.names, ATTENTION: plan.kernels.names[f"attention.{bucket.mode}"]}
    return account_of(name, bucket, costed, rates, kernels, step_s)


class _Rows:
    """Rows of an engine with random prompts of their own; the block releases them."""

    def __init__(self, engine: StepEngine, num_rows: int, prompt_len: int, max_new: int) -> None:
        self._engine, self._total = engine, prompt_len + max_new
        config = engine.parts.config
        # A cache that grows gets its last size at once, for which programs are compiled.
        self._demand = Demand(config.max_num_seqs, config.max_model_len or self._total)
        self._ids = [secrets.token_hex(DIGEST_BYTES) for _ in range(num_rows)]
        self._added: list[str] = []
        self._rows: list[tuple[int, Lease]] = []
        self._max_new, self._prompt_len = max_new, prompt_len

    def __enter__(self) -> Self:
        engine, rng = self._engine, np.random.default_rng(0)
        vocab = engine.parts.info.num_token_ids
        for name in self._ids:
            prompt = rng.integers(0, vocab, self._prompt_len, np.int32)
            request = Request(name, prompt, FrozenSampling(self._max_new), (0, 0), 0.0)
            number = engine.rows.add_request(request)
            self._added.append(name)
            # With a salt of its own, a prompt has no cached prefix, which would not be computed.
            lease = engine.ledger.admit(number, prompt, self._total, PrefixKey(salt=name))
            if lease is not None:
                self._rows.append((number, lease))
            if lease is None or not engine.ledger.reserve(lease, self._total):
                self.__exit__()
                given = f"{len(self._ids)} x {self._total} tokens in the cache"
                todo = "Pass a smaller --rows, --context or --prompt-len, or enlarge the cache."
                raise UnsupportedError(given, "rows for which the cache has room", todo)
        return self

    def __exit__(self, *raised: object) -> None:
        for _, lease in self._rows:
            self._engine.ledger.release(lease)
        for name in self._added:
            self._engine.rows.remove_request(name)

    def prefill(self) -> tuple[Bucket | None, float]:
        """Prefill each row by itself. Returns the bucket and the seconds of the last step."""
        found: tuple[Bucket | None, float] = None, 0.0
        most = self._engine.parts.config.max_num_batched_tokens
        for row, lease in self._rows:
            for start in range(0, self._prompt_len, most):
                count = min(most, self._prompt_len - start)
                is_last = start + count == self._prompt_len
                plan = RowPlan(row, lease, start, count, samples=is_last)
                found = self._run(StepPlan((plan,), demand=self._demand))
        return found

    def decode(self, num_steps: int) -> tuple[Bucket | None, float]:
        """Decode num_steps tokens of every row. Returns the bucket and the seconds per token of a
        row.
        """
        table = self._engine.rows
        rows = [
            RowPlan(row, lease, int(table.num_tokens[row]) - 1, 1, samples=True)
            for row, lease in self._rows
        ]
        bucket, spent_s = self._run(StepPlan(tuple(rows), num_steps, self._demand))
        return bucket, spent_s / num_steps

    def _run(self, plan: StepPlan) -> tuple[Bucket | None, float]:
        engine = self._engine
        started_s = time.perf_counter()
        pending = engine.step(plan)
        tokens = pending.read()
        spent_s = time.perf_counter() - started_s
        for one, new in zip(plan.rows, tokens, strict=True):
            if one.samples:
                engine.rows.append_tokens(one.row, [int(token) for token in new if token >= 0])
            if any(engine.ledger.windows.values()):  # frees pages outside of the window
                num = one.num_computed + max(one.num_tokens, plan.num_steps)
                engine.ledger.commit(one.lease, engine.rows.token_ids[one.row, :num])
        return pending.bucket, spent_s


def measured_prefill(engine: StepEngine, sizes: StepSizes) -> tuple[Bucket, float]:
    """Return the bucket and the best seconds of prefill steps of new prompts."""

    def steps(rounds: int) -> list[tuple[Bucket | None, float]]:
        found = []
        for _ in range(rounds):
            with _Rows(engine, 1, sizes.prompt_len, 1) as rows:
                found.append(rows.prefill())
        return found

    return _measured(engine, steps, sizes.rounds)


def measured_decode(engine: StepEngine, sizes: StepSizes) -> tuple[Bucket, float]:
    """Return the bucket and the best seconds per token of decode steps, which compute
    `decode_steps` tokens of each row, up to the context.
    """
    num = min(engine.parts.config.decode_steps, sizes.context)

    def steps(rounds: int) -> list[tuple[Bucket | None, float]]:
        found = []
        for _ in range(rounds):
            with _Rows(engine, sizes.num_rows, sizes.context + 1 - num, num + 1) as rows:
                rows.prefill()
                found.append(rows.decode(num))
        return found

    return _measured(engine, steps, sizes.rounds)


def _measured(
    engine: StepEngine,
    steps: Callable[[int], list[tuple[Bucket | None, float]]],
    rounds: int,
) -> tuple[Bucket, float]:
    """Run a step once to know its bucket, compile its programs whole, and measure `rounds` steps.
    Returns the bucket and the best seconds.
    """
    bucket = steps(1)[0][0]
    assert bucket is not None, "a StepEngine has buckets"
    keys = [key for key in engine.geometry.all_steps() if key.bucket == bucket]
    engine.executor.compile_all(keys, None, copies=False)
    return bucket, min(seconds for _, seconds in steps(rounds))


def record_step(
    engine: StepEngine, bucket: Bucket, q_lens: Sequence[int], kv_lens: Sequence[int]
) -> tuple[CallRecorder, ShadowCacheForm]:
    """Compute a step of the engine's model on random tokens, and return the calls of its ops. Row i
    has q_lens[i] new tokens and kv_lens[i] tokens with them; the cache before them is 0.
    """
    parts, info = engine.parts, engine.parts.info
    compact = parts.compact_decode and bucket.mode == "decode" and not bucket.rows_are_pages
    form = ShadowCacheForm.of(engine.layouts, bucket, compact=compact)
    ops = parts.ops(bucket, form.layouts)
    recorder = CallRecorder(parts.platform.compile_options(), ops.shares_layers)
    ops = ops.wrapped(recorder.wrap)
    padding = [0] * (bucket.seqs - len(q_lens))
    lengths = (jnp.asarray([*some, *padding], jnp.int32) for some in (q_lens, kv_lens))
    q, kv = lengths
    batches = {group: form.batch(group, q, kv) for group in form.layouts}
    layers = {group.name: group.num_layers for group in info.cache_groups}
    cache = {
        group: tuple(
            {name: jnp.zeros(one.shape, one.dtype) for name, one in layout.shapes().items()}
            for _ in range(layers[group])
        )
        for group, layout in form.layouts.items()
    }
    ids = np.random.default_rng(0).integers(0, info.num_token_ids, bucket.tokens, np.int32)

    def step(
        weights: Weights, ids: jax.Array, cache: ModelCache, batches: BatchesByGroup
    ) -> jax.Array:
        hidden, _ = parts.model.hidden(weights, ops.in_step(batches), ids, cache, batches)
        if bucket.mode != "decode":
            ends = next(iter(batches.values())).cu_q_lens[1:]
            hidden = hidden[jnp.maximum(ends - 1, 0)].astype(info.hidden_dtype)
        return parts.model.logits(weights, ops.of_rows(None), hidden)

    with jax.default_device(parts.placement.device):
        recorder.run(step, engine.executor.weights(), jnp.asarray(ids), cache, batches)
    return recorder, form


def cost_of_call(
    ops: Mapping[str, Op[Any]], layouts: Mapping[AttnSpec, KVLayout], call: RecordedCall
) -> Cost:
    """Return the ideal cost of a call. `layouts`: of each spec of attention, as the model passes
    it.
    """
    arguments, keywords = call.arguments
    if call.op != ATTENTION:
        return cost_of(ops[call.op], *arguments, **keywords)
    q, k, batch = arguments[0], arguments[1], arguments[4]
    spec, layout = keywords["spec"], layouts[keywords["spec"]]
    q_lens, kv_lens = np.asarray(batch.q_lens), np.asarray(batch.kv_lens)
    real = kv_lens > 0
    width = spec.head_dim + (0 if spec.v_is_k_prefix else spec.v_head_dim or spec.head_dim)
    token_bytes = layout.num_bytes() / (layout.num_pages * layout.page_size)
    cost = attention_cost(
        spec,
        q_lens[real].tolist(),
        kv_lens[real].tolist(),
        kv_bytes=token_bytes / (spec.num_kv_heads * width),
        q_bytes=q.dtype.itemsize,
    )
    if k is None:  # the layer reads the cache of another one, which wrote the new tokens
        unwritten = float(q_lens[real].sum()) * token_bytes
        return dataclasses.replace(cost, bytes_written=cost.bytes_written - unwritten)
    return cost


def total(costs: Sequence[Cost]) -> Cost:
    """Return the sum of costs."""
    names = [field.name for field in dataclasses.fields(Cost)]
    return Cost(**{name: math.fsum(getattr(one, name) for one in costs) for name in names})


def moved_bytes(costs: Sequence[Cost]) -> float:
    """Return the bytes that calls of these costs read and write."""
    return math.fsum(one.bytes_read + one.bytes_written for one in costs)


def _layouts_by_spec(
    attention: Mapping[str, AttnSpec], layouts: Mapping[str, CacheLayout]
) -> dict[AttnSpec, KVLayout]:
    """Return the layout of each spec as models pass it: with the dtype of the computation."""
    return {
        spec.called: layout
        for group, spec in attention.items()
        if isinstance(layout := layouts[group], KVLayout)
    }
