"""The configuration names an executor by its import path, and an engine needs no more of it than
its contract.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay.compose.composition import Plan, make_engine, make_plan
from enginebay.config import EngineConfig
from enginebay.contracts.commands import (
    Drop,
    ExecutorCommand,
    Make,
    SetWeights,
    Step,
    Take,
    WriteRows,
)
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.engine import RowPlan, StepPlan
from enginebay.contracts.executor import EngineParts, Executor, Report
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.errors import (
    ConfigError,
    InternalError,
    PluginError,
    UnknownNameError,
    UnsupportedError,
)
from enginebay.plugins.registry import load_registry
from enginebay_esurge.weights import swap
from enginebay_runtime.background import Background
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.local import LocalExecutor
from enginebay_testing.cases import part_cases, select_parts, with_path
from enginebay_testing.driver import request_of
from enginebay_testing.suites import label

Result = TypeVar("Result")


class Listing(Executor):
    """Notes the commands that it is given, and has no device."""

    def __init__(self, parts: EngineParts) -> None:
        self.compilations, self.commands = Compilations(), list[ExecutorCommand[Any]]()

    def run(self, command: ExecutorCommand[Result]) -> Result:
        self.commands.append(command)
        none: Any = None
        return none

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        raise NotImplementedError

    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        return key

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        return len(keys)

    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> Background:
        raise NotImplementedError

    def close(self) -> None:
        self.commands.clear()


LISTING = f"{__name__}:Listing"


def plan_of(**changes: Any) -> Plan:
    sizes: Any = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    return make_plan(EngineConfig(dtype="float32", **sizes, **changes))


@pytest.mark.parametrize("name", ["oengine", "vinference"])
def test_an_engine_steps_by_a_plugins_executor_that_has_no_device(name: str) -> None:
    engine = make_engine(plan_of(engine=name, executor=LISTING))
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.executor, Listing)
    engine.make_arrays()
    prompt = np.arange(5, 9, dtype=np.int32)
    row = engine.rows.add_request(request_of(prompt.tolist(), SamplingParams(max_tokens=4), "a"))
    lease = engine.ledger.admit(row, prompt, len(prompt))
    assert lease is not None
    engine.step(StepPlan((RowPlan(row, lease, 0, len(prompt), samples=True),)))
    make, write, step = engine.executor.commands
    assert isinstance(make, Make)
    assert isinstance(write, WriteRows)
    assert isinstance(step, Step)
    assert step.inputs.token_ids[: len(prompt)].tolist() == prompt.tolist()
    assert engine.warmup() == len(engine.geometry.all_steps())
    assert engine.shadow_report is None
    with pytest.raises(UnsupportedError, match="the weights and programs of a Listing"):
        engine.executor.weights()
    engine.ledger.release(lease)
    engine.rows.remove_request("a")
    engine.drop_arrays()
    assert isinstance(engine.executor.commands[-1], Drop)
    engine.close()


@pytest.mark.parametrize("name", ["oengine", "vinference"])
def test_no_weight_is_replaced_and_no_cache_dropped_under_a_row(name: str) -> None:
    engine = make_engine(plan_of(engine=name, executor=LISTING))
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.executor, Listing)
    engine.make_arrays()
    engine.rows.add_request(request_of([5, 6], SamplingParams(max_tokens=4), "a"))
    with pytest.raises(InternalError, match="weights are replaced while 1 rows are running"):
        engine.set_weights({"a": np.zeros(2)})
    with pytest.raises(InternalError, match="the cache is dropped while 1 rows are running"):
        engine.drop_arrays()
    assert [type(one) for one in engine.executor.commands] == [Make]
    engine.rows.remove_request("a")
    engine.set_weights({"a": np.zeros(2)})
    assert isinstance(engine.executor.commands[-1], SetWeights)
    engine.close()


class Lending(Listing):
    """A Listing that has weights."""

    def weights(self) -> dict[str, Any]:
        return {}


LENDING = f"{__name__}:Lending"


def test_a_plugins_executor_with_weights_keeps_files_of_prefixes(tmp_path: Path) -> None:
    options = {"name": "oengine", "prefix_host_bytes": 2**24, "prefix_disk_dir": str(tmp_path)}
    sizes: Any = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    config = EngineConfig(dtype="float32", engine=options, executor=LENDING, **sizes)
    engine = make_engine(make_plan(config))
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.executor, Lending)
    engine.close()


def test_an_executor_without_weights_is_refused_by_name_and_can_be_waited_for() -> None:
    engine = make_engine(plan_of(executor=LISTING))
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.executor, Listing)
    for use in (lambda: swap(engine, lambda base: base), engine.executor.arrays):
        with pytest.raises(UnsupportedError, match="of a Listing"):
            use()
    engine.executor.wait()
    assert isinstance(engine.executor.commands[-1], Take)
    engine.close()


def test_the_executor_of_this_process_is_the_default() -> None:
    engine = make_engine(plan_of())
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.executor, LocalExecutor)
    assert engine.executor.weights() is engine.executor.model_weights


def test_an_executor_that_is_not_installed_is_refused_before_anything_is_made() -> None:
    with pytest.raises(UnknownNameError, match="executor") as caught:
        plan_of(executor="far")
    assert "local" in str(caught.value)
    assert "package.module:attribute" in str(caught.value)
    with pytest.raises(ConfigError, match=r"has no 'Listening'.*Did you mean 'Listing'"):
        plan_of(executor=f"{__name__}:Listening")
    with pytest.raises(ConfigError, match=r"is of type str. Allowed: a callable"):
        plan_of(executor=f"{__name__}:LISTING")


def no_executor(parts: Any) -> None:
    """Return nothing."""


def takes_nothing() -> None:
    """Take no parts."""


def leaves(parts: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_executor", "returns an object of type NoneType. Allowed: .* an Executor"),
        ("takes_nothing", "cannot be made: TypeError.*Allowed: .* EngineParts"),
        ("leaves", "cannot be made: SystemExit"),
    ],
)
def test_what_makes_no_executor_is_refused_with_its_name(name: str, reason: str) -> None:
    plan = plan_of(executor=f"{__name__}:{name}")
    with pytest.raises(PluginError, match=rf"{name}'.*{reason}"):
        make_engine(plan)


def test_an_executor_is_an_argument_of_the_engine_in_python_too() -> None:
    plan = dataclasses.replace(plan_of(), make_executor=Listing)
    engine = make_engine(plan)
    assert isinstance(engine, StepEngine)
    assert isinstance(engine.executor, Listing)
    engine.close()


@pytest.mark.parametrize(("name", "why"), [("local", "this process"), (LISTING, "import path")])
def test_the_plan_names_the_executor(name: str, why: str) -> None:
    [reason] = [one for one in plan_of(executor=name).reasons if one.setting == "executor"]
    assert reason.chosen == name
    assert why in reason.why


def test_the_kit_checks_an_engine_with_the_executor_of_a_path() -> None:
    selector = f"executor:{LISTING}"
    registry = with_path(load_registry(), selector)
    [entry] = select_parts(registry, selector)
    assert label(entry) == selector
    cases = {case.name: case for case in part_cases(registry, entry)}
    assert {"declaration_holds", "greedy_tokens_are_the_models"} <= set(cases)
    cases["declaration_holds"].run()
    with pytest.raises(UnknownNameError, match="executor:MODULE:ATTRIBUTE"):
        select_parts(registry, "executor:local")
