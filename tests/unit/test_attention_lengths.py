"""Lengths and repeats of attention's cases: from the sizes that a kernel names, within its time."""

from __future__ import annotations

import dataclasses
from typing import Any

from enginebay.ops.caps import Env
from enginebay_testing.attention_axes import ATTENTION, DEVICE, case_of
from enginebay_testing.attention_cases import AttentionCase
from enginebay_testing.attention_runs import FEW_REPEATS, SOME_REPEATS, AttentionRuns, repeats_of
from tests.layouts import BUILTIN_LAYOUTS
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


def test_a_step_is_repeated_as_often_as_wanted_unless_it_is_long() -> None:
    decode = case_for(128)
    assert repeats_of(decode, HND, AttentionRuns()) == SOME_REPEATS
    heavy = case_for(128, phase="mixed", group=16, head_dim=256)
    assert repeats_of(heavy, HND, AttentionRuns()) == FEW_REPEATS
    assert repeats_of(heavy, HND, AttentionRuns(spares=False)) == 20
    middle = case_for(128, phase="decode", group=16)
    assert repeats_of(middle, HND, AttentionRuns()) == SOME_REPEATS
