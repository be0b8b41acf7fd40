"""Other parts for a running engine: the command SetParts for what has a name, and parts that stay
in the process for what has none. No program is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import pytest

from enginebay.compose.composition import make_engine, make_plan
from enginebay.compose.override import overridden_plan
from enginebay.compose.plan import Plan
from enginebay.config import make_config
from enginebay.contracts.commands import ExecutorCommand, SetParts
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.executor import EngineParts, Executor, Report
from enginebay.contracts.sampler import SamplingState
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.errors import ConfigError, IncorrectError, UnknownNameError, UnsupportedError
from enginebay_runtime.background import Background
from enginebay_runtime.engine import StepEngine
from enginebay_samplers import greedy, standard
from tests.brief import BRIEF
from tests.fakes import SIZES

Result = TypeVar("Result")
SAMPLER = "tests.unit.test_swapping_parts:least"
PHASES = ("prefill", "mixed", "decode")


def least(logits: jax.Array, state: SamplingState) -> jax.Array:
    """A sampler that nobody registers: always the worst token."""
    return jnp.argmin(logits, axis=-1).astype(jnp.int32)


class Listener(Executor):
    """Runs nothing; keeps commands in order, and parts without names."""

    def __init__(self) -> None:
        self.compilations = Compilations()
        self.heard: list[Any] = []

    def run(self, command: ExecutorCommand[Result]) -> Result:
        self.heard.append(command if isinstance(command, SetParts) else type(command).__name__)
        return None  # type: ignore[return-value]  # no command here has a result

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        self.heard.append(parts)
        return lambda: self.heard.append("back")

    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        raise NotImplementedError

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        raise NotImplementedError

    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> Background:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(make_config({"model": BRIEF, "engine": "oengine", **SIZES}))


@pytest.fixture
def engine(plan: Plan) -> Iterator[StepEngine]:
    """An engine whose commands a Listener is given."""
    made = make_engine(plan)
    assert isinstance(made, StepEngine)
    made.executor = Listener()
    made.make_arrays()
    yield made
    made.close()


def heard(engine: StepEngine) -> list[Any]:
    assert isinstance(engine.executor, Listener)
    commands, engine.executor.heard = engine.executor.heard, []
    return commands


def test_names_and_import_paths_go_to_the_executor_as_a_command(engine: StepEngine) -> None:
    assert heard(engine) == ["Make"]
    names = {"attention.decode": "xla", "linear": "xla", "sampler": SAMPLER}
    undo = engine.swap(names)
    inner = engine.swap({**names, "sampler": "standard"})
    changed = SetParts({**names, "sampler": "standard"})
    assert heard(engine) == [SetParts(names), "Drop", "Make", changed, "Drop", "Make"]
    inner()
    undo()
    assert heard(engine) == ["Drop", SetParts({}), "Make"] * 2


def test_what_has_no_name_stays_in_the_process(engine: StepEngine) -> None:
    heard(engine)
    undo = engine.swap({"linear": "xla", "sampler": least})
    parts, *rest = heard(engine)
    assert (parts.sampler, rest) == (least, ["Drop", "Make"])
    undo()
    assert heard(engine) == ["Drop", "back", "Make"]
    engine.swap({}, returns_logits=True)
    assert heard(engine)[0].returns_logits


def test_parts_of_names_are_the_same_in_every_process(plan: Plan, engine: StepEngine) -> None:
    given = {"attention": {"decode": "xla"}, "rms_norm": "xla", "sampler": SAMPLER}
    swapped = overridden_plan(plan, given, check=True).swapped
    assert swapped == {"attention.decode": "xla", "rms_norm": "xla", "sampler": SAMPLER}
    parts = engine.parts.changed(swapped)
    # The import path has this file as a module of its own.
    assert getattr(parts.sampler, "__name__", "") == "least"
    assert not parts.has_greedy
    assert parts.kernels["attention.decode"] == parts.kernels["rms_norm"] == "xla"
    back = overridden_plan(
        overridden_plan(plan, given, check=True), {"sampler": "standard"}, check=True
    )
    assert back.swapped["sampler"] == "standard"
    assert engine.parts.changed(back.swapped).has_greedy


def test_a_kernel_given_within_a_block_takes_a_fused_one_apart_again(plan: Plan) -> None:
    fused = next(
        op for op in plan.kernels.ops.values() if op.made_of and op.name in plan.kernels.plain
    )
    outer = overridden_plan(plan, {fused.name: "xla"}, check=True)
    [part, *_] = fused.made_of
    inner = overridden_plan(outer, {part: "xla"}, check=True)
    assert fused.name in outer.swapped
    assert dict(inner.swapped) == {part: "xla"}


@pytest.mark.parametrize(
    ("sampler", "error", "match"),
    [
        ("greedy", UnsupportedError, "greedy only"),
        ("greeedy", UnknownNameError, "greedy"),
        ("tests.brief:missing", ConfigError, "missing"),
        (lambda logits, _: logits, IncorrectError, "int32"),
        (len, IncorrectError, "check=False"),
    ],
)
def test_a_sampler_that_cannot_serve_is_refused(
    plan: Plan, sampler: object, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        overridden_plan(plan, {"sampler": sampler}, check=True)


def test_plans_say_which_sampler_runs(plan: Plan) -> None:
    [reason] = [
        one
        for one in overridden_plan(plan, {"sampler": SAMPLER}, check=True).reasons
        if one.setting == "sampler"
    ]
    assert (reason.chosen, "can be traced" in reason.why) == (SAMPLER, True)
    greedy_plan = overridden_plan(plan, {"sampler": greedy.sample}, check=False)
    assert greedy_plan.sampler is greedy.sample is not standard.sample
