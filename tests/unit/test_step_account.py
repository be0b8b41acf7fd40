"""The account of a step: the calls that a model makes, what they cost, and what is printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay import LLM
from enginebay.compose.ops import ATTENTION
from enginebay.contracts.step_key import StepKey
from enginebay.errors import UnsupportedError
from enginebay.ops.batches import derive_batch
from enginebay.ops.bound import Ops
from enginebay.ops.linear import EMBEDDING, LINEAR
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.weights import QuantizedArray
from enginebay_bench import stored_rates
from enginebay_bench.cost import Cost
from enginebay_bench.machine_rates import MachineRates, MemoryRate, ProductRate, Rates
from enginebay_bench.problem import cost_of
from enginebay_bench.step_account import (
    CostedCalls,
    OpCalls,
    StepAccount,
    StepSizes,
    _measured,
    account_of,
    cost_of_call,
    measured_decode,
    measured_prefill,
    record_step,
    step_accounts,
    total,
)
from enginebay_bench.timed_calls import seconds_alone, written_arrays
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.recorded_calls import CallRecorder
from tests.brief import BRIEF
from tests.unit.serving import SIZES

Run = Callable[..., tuple[int, str, str]]

RATES = MachineRates(
    "some device",
    num_processors=1,
    all=Rates(
        (MemoryRate(1 << 20, 100e9, 50e9), MemoryRate(1 << 30, 10e9, 5e9)),
        (ProductRate("float32", 1, 20e9), ProductRate("float32", 64, 200e9)),
        5e-6,
    ),
)
BUCKET = Bucket(1, 1, 1, 1, 64, "decode")


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x @ weight.T


def write(cache: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return x * 2, {"k": cache["k"].at[0].set(x)}


def test_an_op_is_bound_by_what_takes_longer_at_the_rates_of_the_machine() -> None:
    recorder = CallRecorder({}, same_layers=True)
    linear = recorder.wrap("linear", product)
    few, many_rows, weight = jnp.ones((1, 8)), jnp.ones((64, 8)), jnp.ones((16, 8))
    recorder.run(lambda: [linear(x, weight) for x in (few, few, few, many_rows)])
    one, many = recorder.sorts()
    # Three products of 1000 bytes each, and a product of 4 million operations in 1000 bytes.
    sorts = [
        CostedCalls(one, Cost(600.0, 2000.0, 1000.0), 50e-9),
        CostedCalls(many, Cost(4e6, 600.0, 400.0), 80e-6),
    ]
    account = account_of("a step", BUCKET, sorts, RATES, {"linear": "native"}, 100e-6)
    assert account.read_bytes_per_s == 100e9, "4000 bytes fit the smallest measured size"
    first, second = account.ops
    assert (first.op, first.kernel, first.shapes) == ("linear", "native", "1x8 16x8")
    assert (first.num_calls, first.bound) == (3, "memory")
    assert first.ideal_s == pytest.approx(3000 / 100e9)
    assert first.alone_s == pytest.approx(3 * 50e-9)
    assert first.share == pytest.approx(0.2), "30 of 150 ns"
    assert (second.num_calls, second.bound) == (1, "arithmetic")
    assert second.ideal_s == pytest.approx(4e6 / 200e9)
    assert second.share == pytest.approx(0.25), "20 of 80 us"
    assert account.ideal_s == pytest.approx(20.03e-6)
    assert account.ops_s == pytest.approx(80.15e-6)
    assert account.rest_s == pytest.approx(19.85e-6)


def test_bytes_move_at_the_rate_of_all_that_the_step_reads_and_writes() -> None:
    recorder = CallRecorder({}, same_layers=True)
    recorder.run(recorder.wrap("linear", product), jnp.ones((1, 8)), jnp.ones((16, 8)))
    sorts = [CostedCalls(recorder.calls, Cost(0.0, 1 << 20, 1.0), 1.0)]
    account = account_of("a step", BUCKET, sorts, RATES, {}, 1.0)
    assert account.read_bytes_per_s == 10e9
    assert account.ops[0].kernel == "its parts"


@pytest.mark.long
def test_calls_of_one_op_on_other_shapes_or_other_values_are_of_another_sort() -> None:
    recorder = CallRecorder({}, same_layers=True)
    call = recorder.wrap("scaled", lambda x, *, by, inputs: x * by + 0 * len(inputs))
    for by, layer in ((2, 0), (2, 1), (3, 2)):
        recorder.run(lambda x, y=by, i=layer: call(x, by=y, inputs={"layer": i}), jnp.ones(4))
    assert [len(calls) for calls in recorder.sorts()] == [2, 1]
    by_layer = CallRecorder({}, same_layers=False)
    own = by_layer.wrap("scaled", lambda x, *, inputs: x * inputs["layer"])
    by_layer.run(lambda x: [own(x, inputs={"layer": i}) for i in (1, 2)], jnp.ones(2))
    assert len(by_layer.sorts()) == 2, "this implementation reads the number of the layer"


@pytest.mark.long
def test_a_call_has_the_arrays_that_the_step_gave_it() -> None:
    recorder = CallRecorder({}, same_layers=True)
    call = recorder.wrap("linear", product)
    weight = jnp.arange(6.0).reshape(2, 3)
    recorder.run(lambda x, w: call(call(x, w) @ w, w), jnp.ones((1, 3)), weight)
    first, second = recorder.calls
    np.testing.assert_array_equal(first.arrays[0], np.ones((1, 3)))
    np.testing.assert_array_equal(second.arrays[0], [[36.0, 51.0, 66.0]])  # [3, 12] times weight
    np.testing.assert_array_equal(second.arrays[1], weight)


@pytest.mark.long
def test_a_cache_is_what_an_op_returns_again() -> None:
    recorder = CallRecorder({}, same_layers=True)
    recorder.run(recorder.wrap("kv_write", write), {"k": jnp.zeros((4, 2))}, jnp.ones(2))
    assert written_arrays(write, recorder.calls[0]) == {0: 1}
    scaled = recorder.wrap("scaled", lambda params, x: x * params["scale"])
    recorder.run(scaled, {"scale": jnp.ones(2)}, jnp.ones(2))
    assert written_arrays(recorder.implementations["scaled"], recorder.calls[1]) == {}


@pytest.mark.long
def test_calls_are_timed_alone_and_their_arrays_stay_as_they_were() -> None:
    recorder = CallRecorder({}, same_layers=True)
    call = recorder.wrap("kv_write", write)
    recorder.run(lambda c, x: [call(c, x), call(c, x)], {"k": jnp.zeros((4, 2))}, jnp.ones(2))
    assert 0 < seconds_alone(recorder, recorder.calls, rounds=1, step_bytes=200) < 1
    for one in recorder.calls:
        np.testing.assert_array_equal(one.arrays[0], np.zeros((4, 2)))


@pytest.mark.long
@pytest.mark.parametrize("has_keys", [True, False])
def test_the_cost_of_attention_is_that_of_its_rows(llm: LLM, *, has_keys: bool) -> None:
    spec = AttnSpec(4, 2, 8)
    bucket = Bucket(4, 4, 1, 1, 32, "decode")
    layout = spec.make_layout(llm.plan.kernels.layout_type, 4, 32)
    lengths = jnp.asarray([10, 20, 0, 0], jnp.int32)  # two rows, and two of padding
    batch = derive_batch(
        jnp.ones(4, jnp.int32), lengths, jnp.arange(4)[:, None].astype(jnp.int32), 32, bucket
    )
    recorder = CallRecorder({}, same_layers=True)
    new = jnp.ones((4, 2, 8)) if has_keys else None
    attend = recorder.wrap(ATTENTION, lambda q, *_, **__: q)
    queries = jnp.ones((4, 4, 8))
    recorder.run(lambda batch: attend(queries, new, new, {}, batch, spec=spec), batch)
    cost = cost_of_call({}, {spec: layout}, recorder.calls[0])
    token_bytes = 2 * 2 * 8 * 4  # keys and values of two heads
    assert cost.flops == 2 * 4 * (10 + 20) * (8 + 8)
    assert cost.bytes_read == (10 + 20) * token_bytes + 2 * 4 * 8 * 4
    assert cost.bytes_written == has_keys * 2 * token_bytes + 2 * 4 * 8 * 4


@pytest.mark.long
def test_a_quantised_weight_costs_the_bytes_of_its_parts() -> None:
    weight = QuantizedArray(
        jnp.ones((16, 8), jnp.int8), jnp.ones((16, 2), jnp.float32), None, "int8"
    )
    x, ids = jnp.ones((3, 8), jnp.float32), jnp.zeros(5, jnp.int32)
    assert cost_of(LINEAR, x, weight) == Cost(
        2.0 * 3 * 8 * 16, 16 * 8 + 16 * 2 * 4 + 3 * 8 * 4, 3 * 16 * 4
    )
    assert cost_of(EMBEDDING, weight, ids) == Cost(0.0, 5 * (8 + 2 * 4) + 5 * 4, 5 * 8 * 4)
    half = dataclasses.replace(weight, values=jnp.ones((16, 8), jnp.int4))
    assert cost_of(LINEAR, x, half).bytes_read == 16 * 4 + 16 * 2 * 4 + 3 * 8 * 4


def test_costs_are_summed() -> None:
    assert total([Cost(1.0, 2.0, 3.0), Cost(10.0, 20.0, 30.0)]) == Cost(11.0, 22.0, 33.0)


def traced_calls(engine: StepEngine, bucket: Bucket) -> list[str]:
    """The ops that the engine's model calls in a step, as a trace of the model finds them."""
    names: list[str] = []

    def noting(op: str, implementation: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            names.append(op)
            return implementation(*arguments, **keywords)

        return call

    parts = engine.parts
    original = parts.ops(bucket, engine.layouts)
    model, weights = parts.model, engine.executor.weights()
    counts = jnp.ones(bucket.seqs, jnp.int32)
    tables = {g: jnp.zeros((bucket.seqs, bucket.pages_per_seq), jnp.int32) for g in engine.layouts}

    def step(ops: Ops) -> jax.Array:
        batches = {
            g: derive_batch(counts, counts, tables[g], layout.page_size, bucket)
            for g, layout in engine.layouts.items()
        }
        ids = jnp.zeros(bucket.tokens, jnp.int32)
        cache = engine.executor.arrays().cache
        hidden, _ = model.hidden(weights, ops.in_step(batches), ids, cache, batches)
        return model.logits(weights, ops.of_rows(None), hidden)

    jax.eval_shape(lambda: step(original.wrapped(noting)))
    return names


@pytest.mark.long
def test_the_account_names_every_call_of_the_model(llm: LLM) -> None:
    def record() -> tuple[list[str], list[str], list[Cost]]:
        engine: Any = llm.engine
        engine.make_arrays()
        bucket = engine.geometry.decode_key(2, 16).bucket
        recorder, form = record_step(engine, bucket, [1, 1], [9, 16])
        layouts = {
            spec.stored_as(spec.q_dtype): form.layouts[group]
            for group, spec in engine.parts.info.attention.items()
        }
        costs = [cost_of_call(llm.plan.kernels.ops, layouts, call) for call in recorder.calls]
        return [call.op for call in recorder.calls], traced_calls(engine, bucket), costs

    recorded, traced, costs = llm.run_on_engine(record)
    assert recorded == traced
    assert {"embedding", "rms_norm", "linear", ATTENTION} <= set(recorded)
    assert all(cost.bytes_read > 0 and cost.bytes_written > 0 for cost in costs)
    [head] = [cost for op, cost in zip(recorded, costs, strict=True)][-1:]
    info = llm.plan.model.info
    assert head.bytes_read >= 4 * info.vocab_size * info.hidden_size


@pytest.mark.long
def test_the_whole_step_is_measured_and_the_rows_are_released(llm: LLM) -> None:
    def measure() -> list[tuple[Bucket, float]]:
        engine: Any = llm.engine
        engine.make_arrays()
        sizes = StepSizes(num_rows=2, context=12, prompt_len=10, rounds=1)
        return [measured_prefill(engine, sizes), measured_decode(engine, sizes)]

    (prefill, prefill_s), (decode, decode_s) = llm.run_on_engine(measure)
    assert prefill.mode != "decode"
    assert prefill.tokens >= 10
    assert (decode.mode, decode.seqs >= 2, decode.max_kv_len >= 13) == ("decode", True, True)
    assert 0 < prefill_s < 60
    assert 0 < decode_s < 60


@pytest.mark.long
def test_rows_for_which_the_cache_has_no_room_are_released() -> None:
    engine = {"name": "oengine", "options": {"page_size": 8, "num_pages": 5}}
    with LLM(BRIEF, **(SIZES | {"engine": engine})) as llm:

        def measure() -> int:
            engine: Any = llm.engine
            engine.make_arrays()
            with pytest.raises(UnsupportedError, match="the cache has room"):
                measured_prefill(engine, StepSizes(prompt_len=60, rounds=1))
            engine.ledger.check()
            return int(engine.rows.num_reqs)

        assert llm.run_on_engine(measure) == 0


def test_the_seconds_of_a_step_are_the_best_after_its_programs_are_compiled() -> None:
    engine, rounds = MagicMock(), []

    def steps(num: int) -> list[tuple[Bucket | None, float]]:
        rounds.append((num, engine.executor.compile_all.call_count))
        return [(BUCKET, 3.0 + i) for i in range(num)]

    engine.geometry.all_steps.return_value = [
        StepKey("decode", BUCKET),
        StepKey("decode", dataclasses.replace(BUCKET, seqs=2)),
    ]
    assert _measured(engine, steps, 4) == (BUCKET, 3.0)
    assert rounds == [(1, 0), (4, 1)]
    assert engine.executor.compile_all.call_args.args[0] == [StepKey("decode", BUCKET)]


def test_a_strange_engine_and_several_devices_are_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginebay_bench.step_account.make_engine", lambda _: object())
    with pytest.raises(UnsupportedError, match=r"the steps of object.*--engine"):
        step_accounts(llm.plan, StepSizes(), RATES)
    mesh = jax.make_mesh((1,), ("tensor",))
    placement = dataclasses.replace(llm.plan.placement, mesh=mesh)
    with pytest.raises(UnsupportedError, match="one device"):
        step_accounts(dataclasses.replace(llm.plan, placement=placement), StepSizes(), RATES)


ACCOUNT = StepAccount(
    "decode of 1 row, context 128",
    BUCKET,
    (
        OpCalls(
            *("linear", "native", "1x8 16x8", 6),
            Cost(600e6, 2e6, 1e6),
            ideal_s=30e-6,
            bound="memory",
            alone_s=40e-6,
        ),
        OpCalls(*("attention", "xla", "1x2x8", 3), Cost(5e6, 1e6, 0.0), 10e-6, "arithmetic", 50e-6),
    ),
    read_bytes_per_s=10e9,
    step_s=100e-6,
)


@pytest.fixture
def accounted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command finds ACCOUNT and RATES at once; the list has the sizes it asked for."""
    asked: list[Any] = []

    def accounts(_: Any, sizes: StepSizes, __: MachineRates) -> list[StepAccount]:
        asked.append(sizes)
        return [ACCOUNT]

    monkeypatch.setattr("enginebay_bench.step_account.step_accounts", accounts)
    monkeypatch.setattr(stored_rates, "known_rates", lambda *_, **__: RATES)
    return asked


def test_the_command_prints_predicted_and_measured_times_in_columns_of_their_own(
    run: Run, accounted: list[Any]
) -> None:
    code, out, _ = run(
        *("roofline", "--model", "demo", "--rows", "2", "--context", "30", "--rounds", "3")
    )
    assert code == 0
    assert accounted == [StepSizes(num_rows=2, context=30, rounds=3)]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "linear native 1x8 16x8 6 3 600 30.00 40.0 75 % memory" in lines
    assert "attention xla 1x2x8 3 1 5 10.00 50.0 20 % arithmetic" in lines
    assert "all ops 40.00 90.0 44 %" in lines
    assert "the step 100.0" in lines
    assert "the rest 10.0" in lines
    assert "ops take 90 % of the step; predictions read 10.0 GB/s" in lines
    header, first = out.splitlines()[1:3]
    assert header.index("predicted us") == first.index("30.00")
    assert header.index("measured us") == first.index("40.0")


def test_the_json_has_the_rates_and_the_steps(run: Run, accounted: list[Any]) -> None:
    record = json.loads(run("roofline", "--model", "demo", "--json")[1])
    assert record["machine"]["all"]["launch_s"] == 5e-6
    [step] = record["steps"]
    assert [op["share"] for op in step["ops"]] == pytest.approx([0.75, 0.2])
    assert (step["ideal_s"], step["ops_s"]) == pytest.approx((40e-6, 90e-6))
    assert (step["step_s"], step["rest_s"]) == pytest.approx((100e-6, 10e-6))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rows", "2"), "--rows without a model"),
        (("--engine", "oengine"), "--engine without a model"),
        (("--model", "demo", "--context", "0"), "--context 0. Allowed: at least 1"),
        (("--model", "demo", "--rows", "8", "--max-num-seqs", "4"), "Pass --rows 4"),
        (("--model", "demo", "--context", "63", "--max-model-len", "64"), "Pass --context 62"),
        (
            *(
                (
                    "--model",
                    "demo",
                    "--context",
                    "9",
                    "--prompt-len",
                    "64",
                    "--max-model-len",
                    "64",
                ),
            ),
            "Pass --prompt-len 63",
        ),
        (
            ("--model", "demo", "--prompt-len", "64", "--max-num-batched-tokens", "32"),
            "at most 32 with this --max-num-batched-tokens",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    run: Run, accounted: list[Any], flags: tuple[str, ...], words: str
) -> None:
    code, _, err = run("roofline", *flags)
    assert code == 2
    assert words in err
    assert accounted == []
