"""Faulty engines: their steps wait, they forget, leak, compile too late, or move rows wrongly.

Each names the check that finds it, which runs first: the suite of an engine takes minutes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from enginebay.contracts.cache import Lease
from enginebay.contracts.engine import GroupState, Pending, RowState, StepPlan
from enginebay_runtime.engine import StepEngine
from enginebay_testing.engines import engine_checks
from enginebay_testing.subject import EngineSubject
from tests.brief import LATE

Check = tuple[str, Callable[[], None]]


@dataclasses.dataclass
class Turned(Pending):
    """A step whose rows come back in the opposite order."""

    pending: Pending

    def read(self) -> np.ndarray:
        return self.pending.read()[::-1]


class Waiting(StepEngine):
    """Waits until its step has run."""

    found_by = "steps_do_not_wait"

    def step(self, plan: StepPlan) -> Pending:
        pending = super().step(plan)
        self.executor.wait()
        return pending


class Reading(StepEngine):
    """Reads the lengths of its rows on the host after each step."""

    found_by = "steps_do_not_wait"

    def step(self, plan: StepPlan) -> Pending:
        pending = super().step(plan)
        self.lengths = np.asarray(self.executor.arrays().rows.length)
        return pending


class Turning(StepEngine):
    """Gives the tokens of a step's rows in the opposite order."""

    found_by = "alone_equals_batch"

    def step(self, plan: StepPlan) -> Pending:
        return Turned(super().step(plan))


class Cold(StepEngine):
    """Compiles nothing when it is asked to warm up."""

    found_by = "nothing_compiles_after_warmup"

    def warmup(self, progress: Any = None) -> int:
        return 1


class Lukewarm(StepEngine):
    """Compiles decode steps, and no prefill."""

    found_by = "nothing_compiles_after_warmup"

    def warmup(self, progress: Any = None) -> int:
        self._first = self.sizes.whole
        self._grow(self._first)
        steps = [key for key in self.geometry.all_steps() if key.kind != "prefill"]
        return self.executor.compile_all(steps, progress, copies=True)


class Uncounted(StepEngine):
    """Counts none of the programs that it compiles."""

    found_by = "nothing_compiles_after_warmup"

    def warmup(self, progress: Any = None) -> int:
        count = super().warmup(progress)
        self.compilations.count = 0
        return count


class Disobedient(StepEngine):
    """Compiles though that is forbidden."""

    found_by = "compiling_can_be_forbidden"

    def step(self, plan: StepPlan) -> Pending:
        self.compilations.forbidden = False
        return super().step(plan)


class Forgetful(StepEngine):
    """Takes a row's state without the last token's keys and values."""

    found_by = "state_moves_to_another_engine"

    def take(self, lease: Lease) -> RowState:
        state = super().take(lease)
        groups = {
            name: GroupState(one.first, {n: self._cut(x) for n, x in one.arrays.items()})
            for name, one in state.groups.items()
        }
        return dataclasses.replace(state, groups=groups)

    @staticmethod
    def _cut(values: np.ndarray) -> np.ndarray:
        cut = np.array(values)
        cut[:, -1] = 0
        return cut


class Rounding(StepEngine):
    """Puts a row's keys and values in with fewer bits."""

    found_by = "put_restores_the_bytes"

    def put(self, lease: Lease, state: RowState) -> None:
        groups = {
            name: GroupState(
                one.first, {n: x.astype(np.float16).astype(x.dtype) for n, x in one.arrays.items()}
            )
            for name, one in state.groups.items()
        }
        super().put(lease, dataclasses.replace(state, groups=groups))


class Unseeded(StepEngine):
    """Puts a row's state without what its sampling needs."""

    found_by = "state_moves_to_another_engine"

    def put(self, lease: Lease, state: RowState) -> None:
        empty = {name: np.zeros_like(column) for name, column in state.sampling.items()}
        super().put(lease, dataclasses.replace(state, sampling=empty))


class Remembering(StepEngine):
    """Finds prefixes in a cache that was dropped."""

    found_by = "arrays_can_be_dropped"

    def drop_arrays(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.ledger, "forget", lambda *_: None)
            super().drop_arrays()


class Leaking(StepEngine):
    """Keeps the rows of requests that have ended."""

    found_by = "everything_is_released"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        release = self.ledger.release
        kept: list[Lease] = []

        def leak(lease: Lease) -> None:
            if len(kept) or lease.row:
                release(lease)
            else:
                kept.append(lease)
                lease.released = True

        self.ledger.release = leak  # type: ignore[method-assign]


FAULTS: dict[str, type[StepEngine]] = {
    kind.__name__: kind
    for kind in (
        *(Waiting, Reading, Turning, Cold, Lukewarm, Uncounted),
        *(Disobedient, Forgetful, Rounding, Unseeded, Remembering, Leaking),
    )
}

RIGHT: dict[str, type[StepEngine]] = {}
"""The built-in engines pass the whole suite in tests/conformance."""


def checks(part: Any) -> Iterator[Check]:
    """The kit's suite, the check that should find the fault first; the engine stands in the place
    of the paged one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginebay_paged.engine.StepEngine", part)
        suite = engine_checks(EngineSubject("oengine", model=LATE))
        yield from sorted(suite, key=lambda check: check[0] != part.found_by)
