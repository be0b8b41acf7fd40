"""What the loop makes of rows that have their last token, when a scheduler decodes them too."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from enginebay.contracts.scheduler import Decision
from enginebay.serving.planning import StepPlanner


@dataclasses.dataclass
class Row:
    """What a decode step asks of a request that has a row."""

    num_new_left: int
    num_tokens: int = 8
    constraint: Any = None
    request: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(sampling=SimpleNamespace(returns_all=False))
    )

    def max_steps(self, steps: int) -> int:
        return min(steps, self.num_new_left)


def planner_of(rows: dict[str, Row]) -> StepPlanner:
    requests = SimpleNamespace(running=rows)
    made: Any = SimpleNamespace(requests=requests, reserve=lambda *_: True)
    config: Any = SimpleNamespace(decode_steps=8, overlap_execution=True, mixed_steps="off")
    engine: Any = None
    return StepPlanner(engine, config, made, None, lambda: None)


def test_a_row_that_has_its_last_token_is_left_out_of_the_step() -> None:
    rows = {"ended": Row(0), "goes on": Row(5)}
    found: Any = planner_of(rows).reserve(Decision(decode=("ended", "goes on"), decode_steps=4))
    assert found == (4, [rows["goes on"]])


def test_rows_that_have_their_last_token_make_no_step_at_all() -> None:
    _, able = planner_of({"ended": Row(0)}).reserve(Decision(decode=("ended",), decode_steps=4))
    assert able == []
