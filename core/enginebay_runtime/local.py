"""LocalExecutor: runs commands in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax

from enginebay.contracts.commands import (
    CopyPages,
    Drop,
    ExecutorCommand,
    Grow,
    Make,
    PageIn,
    PageOut,
    Put,
    SetAdapter,
    SetParts,
    SetWeights,
    Step,
    Take,
    WriteRows,
)
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.executor import EngineParts, Executor, Report
from enginebay.contracts.model import Weights
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.shadow_report import ShadowReport
from enginebay.weights import merge_weights
from enginebay_runtime.background import Background
from enginebay_runtime.pages import PageMover
from enginebay_runtime.resize import CacheMaker
from enginebay_runtime.rowio import put_row, take_row
from enginebay_runtime.runner import Runner
from enginebay_runtime.slots import SlotWriter
from enginebay_runtime.step import Program, StepState

Result = TypeVar("Result")


class LocalExecutor(Executor):
    """Runs commands in this process."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._undo = parts, list[Callable[[], None]]()
        self.compilations = Compilations()
        self.runner = runner = Runner(parts, self.compilations)
        self.mover = mover = PageMover(runner)
        self.slots = slots = SlotWriter(runner)
        maker = CacheMaker(runner)
        self._run: Mapping[type[Any], Callable[[Any], Any]] = {
            Step: runner.launch,
            WriteRows: runner.writer.write,
            CopyPages: mover.copy,
            PageOut: mover.page_out,
            PageIn: mover.page_in,
            Make: maker.make,
            Grow: maker.grow,
            Drop: maker.drop,
            Take: functools.partial(take_row, runner),
            Put: functools.partial(put_row, runner),
            SetParts: self._set_parts,
            SetWeights: self._set_weights,
            SetAdapter: slots.write,
        }

    def run(self, command: ExecutorCommand[Result]) -> Result:
        return cast("Result", self._run[type(command)](command))

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        return self.runner.swap(Program.of(parts), parts.title)

    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        return self.runner.choose(key, need)

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        if copies:
            self.mover.compile()
        return self.runner.compile_all(keys, progress) + copies + self.slots.compile()

    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> Background:
        if copies:
            self.mover.compile()
        self.slots.compile()
        return self.runner.compile_first(keys, progress)

    def wait(self) -> None:
        jax.block_until_ready(self.runner.state)

    def weights(self) -> Weights:
        return self.runner.weights

    def arrays(self) -> StepState:
        return self.runner.state

    @property
    def shadow_report(self) -> ShadowReport | None:
        shadow = self.runner.shadow
        return None if shadow is None else shadow.report()

    def close(self) -> None:
        self.runner.close()
        self.mover.forget()

    def _set_parts(self, command: SetParts) -> None:
        if command.names:
            self._undo.append(self.swap(self._parts.changed(command.names)))
        else:
            self._undo.pop()()

    def _set_weights(self, command: SetWeights) -> None:
        self.runner.weights = merge_weights(self.runner.weights, command.weights)
