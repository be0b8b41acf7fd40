"""Times compiled steps in turn: each round runs all of them, on rotating sets of inputs."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from enginebay.ops.tuning import ConfigSource
from enginebay_bench.problem import Inputs, Problem

SAMPLE_S = 0.005
"""Seconds of a sample, which is the mean of many calls: a single call of a small op would mostly
measure the clock and the launch.
"""

MAX_CALLS = 200
ROTATED_BYTES = 256 << 20
MAX_SETS = 16
"""Max number of input sets; they rotate so that together they exceed the processor's cache."""

ROUNDS_BEFORE_DROPPING = 2


@dataclasses.dataclass(frozen=True)
class TimedCandidate:
    """An implementation with a configuration on a problem; `label` is unique in a run.

    Contestants of one `group` are alternatives; the slow ones need not be timed for long.
    """

    label: str
    impl: Any
    config: Any
    source: ConfigSource
    problem: Problem
    group: str = ""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: median, quartiles, and every sample (the mean of several calls)."""

    median_s: float
    quartiles_s: tuple[float, float]
    samples_s: tuple[float, ...]
    calls_per_sample: int

    @staticmethod
    def of(samples: Sequence[float], calls: int) -> Timing:
        """Return the statistics of samples; a single sample is its own quartiles."""
        if len(samples) > 1:
            first, median, third = statistics.quantiles(samples, n=4, method="inclusive")
        else:
            first = median = third = samples[0]
        return Timing(median, (first, third), tuple(samples), calls)


def compile_step(contestant: TimedCandidate, inputs: Inputs, options: Mapping[str, Any]) -> Any:
    """Compile the contestant's step for these inputs with a donated state, as engines do."""
    step = contestant.problem.bind(contestant.impl, contestant.config)
    jitted = jax.jit(step, donate_argnums=0, compiler_options=dict(options))
    return jitted.lower(inputs.state, *inputs.arrays).compile()


def num_sets(num_bytes: int, free: int) -> int:
    """Return the number of input sets to rotate: enough to exceed the processor's cache, within
    half of the free memory.
    """
    wanted = math.ceil(ROTATED_BYTES / max(1, num_bytes))
    return max(1, min(MAX_SETS, wanted, free // (2 * max(1, num_bytes))))


class Rotation:
    """Input sets of one problem, used in turn; a step's result replaces the donated state."""

    def __init__(self, inputs: Inputs, count: int) -> None:
        self._sets = [inputs, *(inputs.copy() for _ in range(count - 1))]
        self._next = 0

    def run(self, step: Any, calls: int) -> float:
        """Return the seconds per call of `calls` calls, launched one after the other and awaited at
        the end.
        """
        out = None
        start = time.perf_counter()
        for _ in range(calls):
            current = self._sets[self._next]
            out, state = step(current.state, *current.arrays)
            self._sets[self._next] = Inputs(state, current.arrays)
            self._next = (self._next + 1) % len(self._sets)
        jax.block_until_ready((out, [inputs.state for inputs in self._sets]))
        return (time.perf_counter() - start) / calls


def time_in_turn(
    steps: Mapping[str, Any],
    rotations: Mapping[str, Rotation],
    rounds: int,
    *,
    drop_slower_than: float | None = None,
    groups: Mapping[str, str] | None = None,
) -> dict[str, Timing]:
    """Time each step on its own rotation; every round runs all steps and begins with another one.

    With `drop_slower_than` x, a step is dropped after two rounds if its best time is more than x
    times the best of its group; the first of a group stays. `groups` None: one group.
    """
    calls = {name: _calls(step, rotations[name]) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    running = list(steps)
    for number in range(rounds if steps else 0):
        if number == ROUNDS_BEFORE_DROPPING and drop_slower_than is not None:
            running = _worth_timing(samples, groups or dict.fromkeys(steps, ""), drop_slower_than)
        first = number % len(running)
        for name in running[first:] + running[:first]:
            samples[name].append(rotations[name].run(steps[name], calls[name]))
    return {name: Timing.of(values, calls[name]) for name, values in samples.items()}


def _worth_timing(
    samples: Mapping[str, Sequence[float]], groups: Mapping[str, str], factor: float
) -> list[str]:
    best: dict[str, float] = {}
    for name, values in samples.items():
        best[groups[name]] = min(best.get(groups[name], math.inf), *values)
    firsts = {group: name for name, group in reversed([(name, groups[name]) for name in samples])}
    return [
        name
        for name, values in samples.items()
        if firsts[groups[name]] == name or min(values) <= factor * best[groups[name]]
    ]


def _calls(step: Any, rotation: Rotation) -> int:
    rotation.run(step, 1)  # touch the memory
    return max(1, min(MAX_CALLS, math.ceil(SAMPLE_S / rotation.run(step, 1))))
