"""The runs of one compiled case: arrays with several score ranges, an empty step, other neighbours,
and repeats of the same step.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from enginebay.contracts.cache import KVLayout
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay_testing import kernels
from enginebay_testing.attention_cases import AttentionCase
from enginebay_testing.attention_inputs import AttentionInputs, make_problem
from enginebay_testing.attention_numbers import OtherNumbers, extreme_numbers
from enginebay_testing.attention_program import AttentionProgram, AttentionResult
from enginebay_testing.attention_values import ATTENTION
from enginebay_testing.case_runs import FEW_REPEATS, turns


@dataclasses.dataclass(frozen=True)
class AttentionRuns:
    """How often the program of a case runs. All `repeats` of a step must give the same bits;
    `all_scores` adds other score ranges and extreme numbers.
    """

    repeats: int = 20
    spares: bool = True
    """Whether a case runs with one of the other score ranges and one extreme only, a step
    SOME_REPEATS times, and a heavy step FEW_REPEATS times.
    """
    all_scores: bool = True
    neighbours: bool = True
    num_seeds: int = 1
    """Sets of arrays with the scores of the case. A program whose case has no other scores runs
    with a second set in any event.
    """
    seed: int = 1
    """Seed of the second set of arrays; the first set has the seed 0."""
    quickly: bool = False
    """Whether XLA compiles the step with few optimizations on a CPU, in half the time."""


DEVICE_RUNS = AttentionRuns()
INTERPRETED_RUNS = AttentionRuns(repeats=1, all_scores=False, neighbours=False)
OFTEN_INTERPRETED = AttentionRuns(all_scores=False)
"""Runs of the shortest case only, because each repeat is interpreted again."""

HEAVY_WORK, HEAVY_BYTES = 2e7, 1 << 22
"""Operations of a step, and bytes of its cache, above which it runs with its own scores only."""

REPEATED_WORK, REPEATED_BYTES = 5e7, 1 << 23
"""Operations and bytes above which the repeats of a step take a second."""

SOME_REPEATS = 10


def check_case(
    impl: AttentionImpl,
    case: AttentionCase,
    layout_type: type[KVLayout],
    env: Env,
    runs: AttentionRuns,
) -> None:
    """Raise AssertionError where a result of the case breaks the contract in any run."""
    quickly = runs.quickly and _work(case) < REPEATED_WORK  # quick programs run slowly
    program = AttentionProgram(impl, case, layout_type, env, quickly=quickly)
    light = _work(case) < HEAVY_WORK and case.layout(layout_type).num_bytes() < HEAVY_BYTES
    others = other_numbers(case, runs) if runs.all_scores and light else []
    for seed in (0, *range(runs.seed, runs.seed + runs.num_seeds - 1)):
        problem = make_problem(case, layout_type, seed=seed)
        first = program(problem)
        _check(problem, first)
        if seed == 0 and runs.repeats > 1:
            _check_repeated(program, problem, first, repeats_of(case, layout_type, runs))
        for number, numbers in enumerate(others):  # and other pages
            other = dataclasses.replace(case, scores=numbers.scores, values=numbers.values)
            problem = make_problem(other, layout_type, seed=seed + number + runs.seed)
            _check(problem, program(problem))
    if runs.num_seeds == 1 and not others:
        problem = make_problem(case, layout_type, seed=runs.seed)
        _check(problem, program(problem))
    empty = make_problem(case, layout_type, empty=True)
    _check(empty, program(empty))
    if runs.neighbours and light:
        _check_neighbours(program, case, layout_type)


def other_numbers(case: AttentionCase, runs: AttentionRuns) -> list[OtherNumbers]:
    """Return the other numbers with which the program of a case runs: other scores of the axis, and
    extreme numbers; one of each with `spares`, because the cases have all of them together.
    """
    scores = [str(each) for each in ATTENTION.values["scores"] if each != case.scores]
    others = [OtherNumbers(each, case.values) for each in scores]
    extremes = extreme_numbers(case.spec, case.name, case.values)
    if runs.spares:
        return [*others[zlib.crc32(case.name.encode()) % 3 :][:1], *extremes[:1]]
    return [*others, *extremes[:2]]


def repeats_of(case: AttentionCase, layout_type: type[KVLayout], runs: AttentionRuns) -> int:
    """Return how often the step of a case runs with the same arrays."""
    num_bytes = case.layout(layout_type).num_bytes()
    is_heavy = _work(case) >= REPEATED_WORK or num_bytes >= REPEATED_BYTES
    if not runs.spares:
        return runs.repeats
    return FEW_REPEATS if is_heavy else min(SOME_REPEATS, runs.repeats)


def _check(problem: AttentionInputs, result: AttentionResult) -> None:
    kernels.check_result(problem, result.out, result.cache, result.lse)


def _check_repeated(
    program: AttentionProgram, problem: AttentionInputs, first: AttentionResult, repeats: int
) -> None:
    wanted = _bits(problem, first)
    for turn in turns(repeats):
        again = program(problem)
        # Places without a token may differ in what the layout does not read.
        same = _bits(problem, again) == wanted and (
            _bytes(again.cache.values()) == _bytes(first.cache.values())
            or _bytes(again.read) == _bytes(first.read)
        )
        assert same, (
            f"{problem.case.name}: run {turn + 1} of the same step returned other bits than run 1"
        )


def _bits(problem: AttentionInputs, result: AttentionResult) -> tuple[bytes, ...]:
    real = problem.token_rows >= 0
    lse = b"" if result.lse is None else result.lse[real].tobytes()
    return result.out.tobytes(), lse


def _bytes(arrays: Iterable[Any]) -> tuple[bytes, ...]:
    return tuple(np.asarray(array).tobytes() for array in arrays)


def _check_neighbours(
    program: AttentionProgram, case: AttentionCase, layout_type: type[KVLayout]
) -> None:
    problem, mixed = kernels.with_other_neighbours(case, layout_type)
    mine = problem.token_rows == 0
    first, second = (program(each).out[mine] for each in (problem, mixed))
    assert first.tobytes() == second.tobytes(), (
        f"{case.name}: the output of row 0 depends on the other rows"
    )


def _work(case: AttentionCase) -> float:
    spec = case.spec
    pairs = sum(q * kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    return 4.0 * pairs * spec.num_q_heads * spec.head_dim
