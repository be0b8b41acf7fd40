"""Rows that decode beside prompts: in one program or in two, the tokens are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.compose.resolve import ResolveInputs, resolve
from enginebay.config import EngineConfig
from enginebay.contracts.engine import Engine, Pending, StepPlan
from enginebay.errors import ConfigError
from enginebay.ops.select import Candidate
from tests.brief import TINY
from tests.unit.test_embed import SIZES

PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (5, 40, 33, 9, 70, 21)]
"""More than there are rows, so that prompts come while others decode."""


def params(**fields: Any) -> list[SamplingParams]:
    """Some end early, so that a row may end in a step that is not read when the next is
    launched.
    """
    return [
        SamplingParams(max_tokens=6 + 5 * (i % 4), ignore_eos=True, seed=i, **fields)
        for i in range(len(PROMPTS))
    ]


def watch(engine: Engine, patch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that an engine is given from now on."""
    plans: list[StepPlan] = []
    step = engine.step

    def watched(plan: StepPlan) -> Pending:
        plans.append(plan)
        return step(plan)

    patch.setattr(engine, "step", watched)
    return plans


def mixed(plans: list[StepPlan]) -> list[StepPlan]:
    return [
        p for p in plans if any(r.decodes for r in p.rows) and not all(r.decodes for r in p.rows)
    ]


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("overlap", [True, False])
def test_the_loop_puts_decoding_rows_beside_chunks(
    monkeypatch: pytest.MonkeyPatch, *, overlap: bool
) -> None:
    tokens = {}
    for how in ("on", "off"):
        choices: dict[str, Any] = SIZES | {"mixed_steps": how, "overlap_execution": overlap}
        with LLM(TINY, **choices) as llm, monkeypatch.context() as patch:
            plans = watch(llm.engine, patch)
            outputs = llm.generate(PROMPTS, params(temperature=0.0))
            tokens[how] = [one.outputs[0].token_ids for one in outputs]
        assert bool(mixed(plans)) == (how == "on")
        for plan in mixed(plans):
            assert not plan.is_decode
            assert sum(row.num_tokens for row in plan.rows) <= SIZES["max_num_batched_tokens"]
            assert all(row.num_tokens == 1 and row.samples for row in plan.rows if row.decodes)
    assert tokens["on"] == tokens["off"]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["oengine", pytest.param("vinference", marks=pytest.mark.slow)])
def test_tokens_are_the_same_in_one_program_and_in_two(
    few_sizes_module: None, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    greedy = params(temperature=0.0)
    penalised = params(temperature=0.8, presence_penalty=1.5, frequency_penalty=0.5)
    some = [a if i % 2 else b for i, (a, b) in enumerate(zip(greedy, penalised, strict=True))]
    found = {}
    for how in ("on", "off"):
        with LLM(TINY, engine=engine, mixed_steps=how, **SIZES) as llm, monkeypatch.context() as p:
            plans = watch(llm.engine, p)
            found[how] = [
                [one.outputs[0].token_ids for one in llm.generate(PROMPTS, each)]
                for each in (greedy, some)
            ]
        assert bool(mixed(plans)) == (how == "on")
    assert found["on"] == found["off"]


def test_auto_is_the_platforms_choice_where_the_engine_can() -> None:
    parts = [Candidate("only", 0)]
    facts = ResolveInputs(parts, parts, parts, parts, "float32", 64, 1)
    able = dataclasses.replace(facts, mixing=["only"])
    prefers = dataclasses.replace(able, prefers_mixed_steps=True)
    cannot = dataclasses.replace(prefers, mixing=())
    auto, on = EngineConfig(), EngineConfig(mixed_steps="on")
    off = EngineConfig(mixed_steps="off")
    chosen = [resolve(auto, each)[0].mixed_steps for each in (facts, able, prefers, cannot)]
    assert chosen == ["off", "off", "on", "off"]
    assert [resolve(each, prefers)[0].mixed_steps for each in (on, off)] == ["on", "off"]
    assert resolve(on, able)[0].mixed_steps == "on"
    with pytest.raises(ConfigError, match="mixed_steps = 'on' with engine 'only'"):
        resolve(on, facts)
