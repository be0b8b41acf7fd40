"""Compares all implementations of an op on named shapes: first their results, then their times,
next to the roofline of the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.op import Op
from enginebay.ops.select import Candidate
from enginebay.ops.tuning import TunableOp
from enginebay_bench.cost import Cost
from enginebay_bench.op_problems import problems_of
from enginebay_bench.problem import (
    BenchSetting,
    Inputs,
    Parity,
    Problem,
    asked_for,
    with_config,
)
from enginebay_bench.roofline import Roofline
from enginebay_bench.shapes import Shape
from enginebay_bench.timing import (
    Rotation,
    TimedCandidate,
    Timing,
    compile_step,
    num_sets,
    time_in_turn,
)
from enginebay_testing.traced_cases import TracedShape
from enginebay_testing.trial import FIRST, WRITES

COPIES_TO_CHECK = 6
"""Sets of inputs that a check holds at once: on the host, poisoned, donated, expected, returned."""

POISON = float("nan")
WRONG = "wrong"
"""Start of the reason why a configuration with a wrong result is not timed."""

CHEAT = "cheat"
"""Start of the reason why a kernel that cheats has no figures."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """The result of one implementation on one shape: figures, or the `reason` why there are none.

    `share` is the share of the measured roofline, `bound` names what limits the op (see `judged`),
    and `parity` compares the same step on poisoned inputs. A wrong result is timed too.
    """

    op: str
    shape: str
    dtype: str
    implementation: str
    reason: str | None = None
    config: Mapping[str, Any] | None = None
    config_source: str | None = None
    timing: Timing | None = None
    cost: Cost | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    share: float | None = None
    bound: str | None = None
    parity: Parity | None = None


@dataclasses.dataclass(frozen=True)
class ShapeLimits:
    """Limits of a shape: memory, and seconds per call at the roofline."""

    free_bytes: int
    call_s: float


@dataclasses.dataclass(frozen=True)
class Bench:
    """The settings of a run."""

    roofline: Roofline
    options: Mapping[str, Any]
    rounds: int
    limits: ShapeLimits
    device: jax.Device


def measure_shape(
    bench: Bench,
    op: Op[Any],
    shape: Shape | TracedShape,
    setting: BenchSetting,
    candidates: Sequence[Candidate],
) -> list[Figure]:
    """Return a figure per implementation, in candidate order, for each problem that it serves."""
    problems = problems_of(op, shape, setting)
    figure = Figure(op.name, shape.name, setting.dtype, "")
    reason = why_not_measured(problems[0], bench, setting.dtype)
    refused: dict[str, str] = {}
    contestants: list[TimedCandidate] = []
    for candidate in candidates:
        why = candidate.unavailable or reason or problems[0].why_not(candidate.impl)
        if why is not None:
            refused[candidate.name] = why
            continue
        for problem in (p for p in problems if p.is_for(candidate.impl)):
            label = f"{candidate.name} {problem.label}".rstrip()
            found = _configured(op.name, candidate.impl, setting, problem)
            contestants.append(_contestant(label, *found))
    results = run_contestants(bench, contestants)
    figures = [
        dataclasses.replace(figure, implementation=n, reason=why) for n, why in refused.items()
    ]
    for contestant in contestants:
        result = results[contestant.label]
        named = dataclasses.replace(
            figure,
            implementation=contestant.label,
            config=None if contestant.config is None else dataclasses.asdict(contestant.config),
            config_source=None if contestant.config is None else contestant.source,
        )
        figures.append(
            dataclasses.replace(named, reason=result)
            if isinstance(result, str)
            else _figures(named, contestant.problem, *result)
        )
    return figures


def _configured(op: str, impl: Any, setting: BenchSetting, problem: Problem) -> tuple[Any, Problem]:
    """Return an implementation and a problem with its configuration. For an op without phases, the
    tables are looked up for this problem.
    """
    if not isinstance(impl, TunableOp) or not setting.tuned.of(op, impl, setting.env):
        return impl, problem
    asked = asked_for(impl, setting.env, problem)
    if asked is None:
        return impl, problem
    found = setting.tuned.op_config(op, impl, setting.env, asked)
    return with_config(impl, found[0]), dataclasses.replace(problem, config=lambda _: found)


def _contestant(label: str, impl: Any, problem: Problem) -> TimedCandidate:
    return TimedCandidate(label, impl, *problem.config(impl), problem)


def _figures(figure: Figure, problem: Problem, parity: Parity, timing: Timing) -> Figure:
    cost, seconds = problem.cost, timing.median_s
    return dataclasses.replace(
        figure,
        timing=timing,
        cost=cost,
        bytes_per_s=(cost.bytes_read + cost.bytes_written) / seconds,
        flops_per_s=cost.flops / seconds,
        parity=parity,
    )


def is_faulty(figure: Figure) -> bool:
    """Whether an implementation is wrong or cheats."""
    is_wrong = figure.parity is not None and not figure.parity.is_right
    return is_wrong or (figure.reason or "").startswith(CHEAT)


def judged(figure: Figure, roofline: Roofline) -> Figure:
    """Return the figure with its share of the roofline and its bound."""
    if figure.timing is None or figure.cost is None:
        return figure
    seconds = figure.timing.median_s
    return dataclasses.replace(
        figure,
        share=roofline.ideal_s(figure.cost, figure.dtype) / seconds,
        bound=roofline.bound(figure.cost, figure.dtype, seconds),
    )


def why_not_measured(problem: Problem, bench: Bench, dtype: str) -> str | None:
    """Return why a problem is too large for this machine, or None."""
    needed = COPIES_TO_CHECK * problem.num_bytes
    if needed > bench.limits.free_bytes:
        return (
            f"needs {needed / 2**30:.1f} GiB with its check, "
            f"{bench.limits.free_bytes / 2**30:.1f} are free"
        )
    ideal = bench.roofline.ideal_s(problem.cost, dtype)
    if ideal > bench.limits.call_s:
        return f"a call takes at least {ideal:.1f} s here, the limit is {bench.limits.call_s:g} s"
    return None


def run_contestants(
    bench: Bench,
    contestants: Sequence[TimedCandidate],
    *,
    only_right: bool = False,
    drop_slower_than: float | None = None,
) -> dict[str, str | tuple[Parity, Timing]]:
    """Return parity and timing by label, or the reason why there are none. With `only_right`, wrong
    results are not timed; with `drop_slower_than`, slow ones of each group are dropped early, see
    `time_in_turn`.
    """
    failed: dict[str, str | tuple[Parity, Timing]] = {}
    parities: dict[str, Parity] = {}
    steps: dict[str, Any] = {}
    with jax.default_device(bench.device):
        for problem, group in _by_problem(contestants):
            inputs = problem.make(POISON)
            kept = _copied(inputs)
            for contestant in group:
                try:
                    step = compile_step(contestant, inputs, bench.options)
                    parity = _parity(step, problem, inputs)
                except Exception as error:  # noqa: BLE001  # a failing kernel is a result; the others continue
                    failed[contestant.label] = " ".join(f"{type(error).__name__}: {error}".split())[
                        :300
                    ]
                    continue
                if _are_changed(inputs, kept):
                    failed[contestant.label] = f"{CHEAT}: {WRITES}"
                    inputs = problem.make(POISON)
                    continue
                if only_right and not parity.is_right:
                    failed[contestant.label] = (
                        f"{WRONG}: off by {parity.error:.3g}, {parity.share:.3g} of allowed"
                    )
                    continue
                parities[contestant.label], steps[contestant.label] = parity, step
        rotations: dict[str, Rotation] = {}
        for problem, group in _by_problem([c for c in contestants if c.label in steps]):
            count = num_sets(problem.num_bytes, bench.limits.free_bytes)
            rotation = Rotation(problem.make(0.0), count)
            rotations |= dict.fromkeys((contestant.label for contestant in group), rotation)
        groups = {contestant.label: contestant.group for contestant in contestants}
        timings = time_in_turn(
            steps, rotations, bench.rounds, drop_slower_than=drop_slower_than, groups=groups
        )
        for problem, group in _by_problem([c for c in contestants if c.label in timings]):
            for contestant in group:
                label = contestant.label
                why = _why_not_believed(steps[label], problem) if parities[label].is_right else None
                if why is not None:
                    failed[label] = why
    good = {label: (parities[label], timing) for label, timing in timings.items()}
    return good | failed


def _why_not_believed(step: Any, problem: Problem) -> str | None:
    """Return how a step cheats that was right before it was timed, or None: it runs once more, on
    other numbers, and may not change them.
    """
    if problem.other is None:
        return None
    inputs = problem.other.make(POISON)
    kept = _copied(inputs)
    parity = _parity(step, problem.other, inputs)
    if _are_changed(inputs, kept):
        return f"{CHEAT}: {WRITES}"
    return None if parity.is_right else f"{CHEAT}: {FIRST}"


def _copied(inputs: Inputs) -> list[np.ndarray]:
    return [np.array(array) for array in jax.tree.leaves(inputs.arrays)]


def _are_changed(inputs: Inputs, kept: Sequence[np.ndarray]) -> bool:
    """Whether the inputs, without the state, differ from copies in any bit."""
    pairs = zip(jax.tree.leaves(inputs.arrays), kept, strict=True)
    flat = ((np.asarray(now).reshape(-1), before.reshape(-1)) for now, before in pairs)
    return any((a.view(np.uint8) != b.view(np.uint8)).any() for a, b in flat)


def _by_problem(
    contestants: Sequence[TimedCandidate],
) -> list[tuple[Problem, list[TimedCandidate]]]:
    """Group the contestants that share inputs."""
    groups: dict[int, list[TimedCandidate]] = {}
    for contestant in contestants:
        groups.setdefault(id(contestant.problem), []).append(contestant)
    return [(group[0].problem, group) for group in groups.values()]


def _parity(step: Any, problem: Problem, inputs: Inputs) -> Parity:
    out, state = step(jax.tree.map(jnp.copy, inputs.state), *inputs.arrays)
    return problem.check(inputs, out, state)
