"""Lengths and repeats of attention's cases: from the sizes that a kernel names, within its time."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops.caps import Env
from enginebay_testing import attention_program, case_runs
from enginebay_testing.attention_axes import ATTENTION, DEVICE, case_of
from enginebay_testing.attention_cases import AttentionCase
from enginebay_testing.attention_runs import SOME_REPEATS, AttentionRuns, check_case, repeats_of
from enginebay_testing.case_runs import FEW_REPEATS
from tests.layouts import BUILTIN_LAYOUTS
from tests.zoo.right import attentions
from tests.zoo.right.split_attention import SplitAttention

HND = BUILTIN_LAYOUTS["hnd"]
ORDINARY = {axis: values[0] for axis, values in ATTENTION.values.items() if values}


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """What a kernel without choices branches on."""

    block: int


@dataclasses.dataclass(frozen=True)
class Unchanging(SplitAttention):
    """A kernel whose only configuration names its fixed sizes, or nothing."""

    block: int = 0

    def default_config(self, *problem: Any) -> Any:
        return Fixed(self.block) if self.block else None


def case_for(block: int, **values: Any) -> AttentionCase:
    row = {**ORDINARY, "layout": HND.__name__, **values}
    kernel: Any = Unchanging(block=block)
    return case_of(row, kernel, Env("cpu"), HND, DEVICE)


def test_contexts_have_three_of_the_blocks_that_a_fixed_configuration_names() -> None:
    page = int(ORDINARY["page"] or 0)
    for named, block in ((40, 40), (256, 256), (0, 128)):
        lengths = case_for(named).kv_lens
        assert max(lengths) == 3 * block + page // 2 + 1
        assert {block - 1, block + 1, 2 * block} <= set(lengths)


def slow_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on each look at the clock of repeats is so many seconds after the one before."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(case_runs, "time", SimpleNamespace(monotonic=lambda: next(clock)))


@pytest.mark.parametrize(("seconds", "num_runs"), [(0.0, 20), (2.0, 8), (11.0, FEW_REPEATS)])
def test_a_slow_step_is_repeated_less_often(
    seconds: float, num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right kernel that takes seconds for a step would reach the time limit of a case."""
    slow_clock(monkeypatch, seconds)
    taken = MagicMock(wraps=case_runs.taken)
    monkeypatch.setattr(case_runs, "taken", taken)
    case_runs.CaseRuns()(jnp.negative, [np.arange(4.0)], 20, others=[np.ones(4)])
    assert taken.call_count == 1 + num_runs


def test_a_slow_step_of_attention_is_repeated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for seconds in (0.0, 11.0):
        slow_clock(monkeypatch, seconds)
        taken = MagicMock(wraps=case_runs.taken)
        monkeypatch.setattr(attention_program, "taken", taken)
        runs = AttentionRuns(all_scores=False, neighbours=False)
        check_case(attentions.every, case_for(40), HND, Env("cpu"), runs)
        counts.append(taken.call_count)
    assert counts[0] - counts[1] == SOME_REPEATS - FEW_REPEATS


def test_a_step_is_repeated_as_often_as_wanted_unless_it_is_long() -> None:
    decode = case_for(128)
    assert repeats_of(decode, HND, AttentionRuns()) == SOME_REPEATS
    heavy = case_for(128, phase="mixed", group=16, head_dim=256)
    assert repeats_of(heavy, HND, AttentionRuns()) == FEW_REPEATS
    assert repeats_of(heavy, HND, AttentionRuns(spares=False)) == 20
    middle = case_for(128, phase="decode", group=16)
    assert repeats_of(middle, HND, AttentionRuns()) == SOME_REPEATS
