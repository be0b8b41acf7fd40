"""Swapping and shadow mode where heads and weights are split over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from enginebay import LLM
from enginebay.compose.override import overridden_plan
from enginebay.compose.plan import Plan
from enginebay.compose.shadowing import with_shadow
from enginebay.config import DEFAULT_AXIS_RULES
from enginebay.config_sections import ShadowChoice
from enginebay.contracts.placement import make_placement
from enginebay.errors import IncorrectError, UnsupportedError
from enginebay_runtime.shadow_steps import compare_outputs
from enginebay_xla import collectives
from enginebay_xla.attention import CAPS, xla_attention
from tests.brief import BRIEF, TINY
from tests.unit.serving import GREEDY, SIZES, assert_idle
from tests.unit.test_native_compiling import need_compiler
from tests.unit.unregistered import garbage_attention, plain_attention, scaled_linear

pytestmark = pytest.mark.xdist_group("llm")
PROMPT = "The fox " * 20
"""It takes more than one step to process."""


@pytest.fixture(scope="module")
def expected(shared_llm: LLM) -> list[int]:
    """On one device."""
    return tokens(shared_llm)


@pytest.fixture(
    scope="module", params=["vinference", pytest.param("oengine", marks=pytest.mark.slow)]
)
def sharded(request: pytest.FixtureRequest) -> Iterator[LLM]:
    shadow = {"attention": "tests.unit.unregistered:plain_attention@0.5"}
    with LLM(BRIEF, engine=request.param, mesh={"tensor": 2}, shadow=shadow, **SIZES) as llm:
        assert llm.plan.placement.num_shards("kv_heads") == 2
        yield llm


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.mark.long
def test_a_shadow_compares_what_is_split(sharded: LLM, expected: list[int]) -> None:
    assert tokens(sharded) == expected
    report = sharded.shadow_report()
    assert report is not None
    assert report.error is None
    compared = {phase.phase: phase.num_compared for phase in report.phases}
    assert compared["decode"] > 1
    assert compared["prefill"] >= 1
    assert compared["mixed"] >= 1
    assert len(report.layers) == 3 * sharded.plan.model.info.groups[0].num_layers
    assert all(layer.num_tokens and not layer.num_cache_differences for layer in report.layers)
    assert all(layer.relative < 1e-5 and not layer.num_nonfinite for layer in report.layers)


@pytest.mark.parametrize("head", range(4))
def test_a_shadow_notices_what_one_device_alone_computes_wrongly(head: int) -> None:
    mesh = make_placement(jax.devices(), {"tensor": 2}, DEFAULT_AXIS_RULES).mesh
    assert mesh is not None
    right = np.ones((3, 4, 8), np.float32)
    wrong = right.copy()
    wrong[1, head, 5] = 3.0
    real = np.array([True, True, False])

    def outputs(*arrays: np.ndarray) -> tuple[jax.Array, ...]:
        by_heads = NamedSharding(mesh, PartitionSpec(None, "tensor"))
        return (*(jax.device_put(array, by_heads) for array in arrays), jax.device_put(real))

    chosen = outputs(right, right, right)
    for candidate, expected in (
        ((wrong, right, right), (2.0, 2.0, 0, 0, 2)),
        ((right, wrong, right), (0.0, 0.0, 0, 1, 2)),
        ((right, right, wrong), (0.0, 0.0, 0, 1, 2)),
    ):
        found = compare_outputs(chosen, outputs(*candidate))
        assert [float(one) for one in found] == list(expected)


@pytest.mark.long
def test_an_override_runs_in_every_shard_and_is_undone(sharded: LLM, expected: list[int]) -> None:
    assert tokens(sharded) == expected
    with sharded.override(attention=plain_attention):
        assert tokens(sharded) == expected
        assert sharded.shadow_report() is None
        with sharded.override(attention={"decode": garbage_attention}, check=False):
            wrong = tokens(sharded)
    assert (wrong[0], wrong != expected) == (expected[0], True), (
        "the first token comes from the prompt"
    )
    compiled = sharded.engine.compilations.count
    assert tokens(sharded) == expected
    assert sharded.engine.compilations.count == compiled
    assert sharded.shadow_report() is not None
    assert_idle(sharded)


@pytest.mark.slow  # a small sample is in test_partition.py
def test_a_kernel_of_weights_in_one_piece_runs_on_each_part_by_its_ops_rule(
    sharded: LLM, expected: list[int]
) -> None:
    need_compiler()
    with sharded.override(linear="native"):
        assert tokens(sharded) == expected


@pytest.mark.slow  # a small sample is in test_partition.py
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_kernel_in_cpp_has_the_tokens_of_one_device(devices: int, quantization: str) -> None:
    """The compiler cannot split a call of foreign code: the op's rule does."""
    need_compiler()
    named: dict[str, Any] = {"kernels": {"linear": "native"}, "quantization": quantization}
    both = []
    for mesh in ({}, {"tensor": devices}):
        with LLM(TINY, engine="oengine", mesh=mesh, **SIZES, **named) as llm:
            assert llm.plan.kernels.names["linear"] == "native"
            both.append(tokens(llm))
    assert both[0] == both[1]


@pytest.mark.long
def test_an_engine_adds_up_by_an_all_reduce_given_by_hand(
    sharded: LLM, expected: list[int]
) -> None:
    """One that forgets the other devices changes the tokens."""
    seen: list[tuple[int, ...]] = []

    def mine(x: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
        seen.append(x.shape)
        return x

    with pytest.raises(IncorrectError, match="all_reduce"):
        sharded.override(all_reduce=mine).__enter__()
    before = len(seen)
    with sharded.override(all_reduce=mine, check=False):
        wrong = tokens(sharded)
    layers = sharded.plan.model.info.groups[0].num_layers
    assert wrong != expected
    assert (len(seen) - before) % (1 + 2 * layers) == 0, (
        "embedding, attention and MLP of each layer"
    )
    assert len(seen) > before


@pytest.mark.slow
def test_another_all_reduce_that_is_right_has_the_same_tokens(
    sharded: LLM, expected: list[int]
) -> None:
    with sharded.override(all_reduce=collectives.all_reduce_reference):
        assert tokens(sharded) == expected


def shadowed(plan: Plan, op: str, name: str) -> Plan:
    shadow = {op: ShadowChoice(name=name, share=0.5)}
    return with_shadow(
        dataclasses.replace(plan, config=plan.config.model_copy(update={"shadow": shadow}))
    )


def test_what_cannot_be_split_is_refused(sharded: LLM) -> None:
    plan = sharded.plan
    without = dataclasses.replace(plan.kernels.ops["linear"], partition=None)
    ops = {**plan.kernels.ops, "linear": without}
    stiff = dataclasses.replace(plan, kernels=dataclasses.replace(plan.kernels, ops=ops))
    with pytest.raises(UnsupportedError, match=r"linear = native .*weights split over devices"):
        overridden_plan(stiff, {"linear": "native"}, check=False)
    with pytest.raises(UnsupportedError, match=r"shadow.linear = 'native' .*weights split over"):
        shadowed(stiff, "linear", "native")
    assert shadowed(plan, "linear", "native").shadow is not None, "the rule of the op splits it"
    whole = dataclasses.replace(CAPS, features=CAPS.features - {"shard_map"})
    attention = dataclasses.replace(xla_attention, caps=whole)
    with pytest.raises(UnsupportedError, match=r"attention.decode = \S+ cannot .*shard_map"):
        overridden_plan(plan, {"attention": {"decode": attention}}, check=False)
    with pytest.raises(IncorrectError, match="linear = scaled_linear fails"):
        with sharded.override(linear=scaled_linear):
            pytest.fail("the block was entered")
    assert sharded.plan is plan
