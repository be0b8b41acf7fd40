"""Executor: runs commands in the order in which they come. LocalExecutor runs them in this process."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from enginebay.background import Background
from enginebay.engine import Compilations
from enginebay.errors import InternalError, UnsupportedError
from enginebay.runner.commands import (
    Command,
    CopyPages,
    Drop,
    Grow,
    Make,
    PageIn,
    PageOut,
    Put,
    SetParts,
    SetTables,
    SetWeights,
    Step,
    Take,
    WriteRows,
)
from enginebay.runner.keys import StepKey
from enginebay.runner.pages import PageMover
from enginebay.runner.parts import EngineParts
from enginebay.runner.resize import CacheMaker
from enginebay.runner.rowio import put_row, take_row
from enginebay.runner.runner import Report, Runner
from enginebay.runner.scoping import StepNeeds
from enginebay.runner.weights import merge_weights

Result = TypeVar("Result")


class Executor(ABC):
    """Runs an engine's commands. `run` never waits for the device, but for commands that return
    what the device holds (Take, PageOut) and for arrays that are made.
    """

    compilations: Compilations

    @abstractmethod
    def run(self, command: Command[Result]) -> Result:
        """Run a command after all before it."""

    @abstractmethod
    def swap(self, parts: EngineParts) -> Callable[[], None]:
        """Run steps with the ops and the sampler of other parts, which are those of the SetParts
        that `parts.swapped` makes; the function that comes back returns to the former ones.
        """

    @abstractmethod
    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        """The program that a Step for `key` should name: one that is compiled, if any serves."""

    @abstractmethod
    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        """Compile all programs for these steps that are missing, and those of the other commands;
        how many there are. `copies`: there will be CopyPages.
        """

    @abstractmethod
    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> Background:
        """Compile the fewest programs that serve all these steps; what comes back compiles the
        others once it is started.
        """

    @abstractmethod
    def close(self) -> None:
        """Free weights, cache and programs, for good."""

    @property
    def runner(self) -> Runner:
        """What the executor holds in this process, for faces that share its weights and programs.
        UnsupportedError when it holds nothing here.
        """
        raise UnsupportedError(
            f"the weights and programs of a {type(self).__name__}",
            "an engine whose executor runs commands in this process",
            "Make the engine with a LocalExecutor.",
        )


class LocalExecutor(Executor):
    """Runs commands in this process."""

    def __init__(
        self, parts: EngineParts, resolve: Callable[[Mapping[str, str]], EngineParts] | None = None
    ) -> None:
        """`resolve` finds the parts of a SetParts; None: they come by `swap` alone."""
        self._resolve, self._undo = resolve, list[Callable[[], None]]()
        self.compilations = Compilations()
        self._runner = runner = Runner(parts, self.compilations)
        self.mover = mover = PageMover(runner)
        maker = CacheMaker(runner)
        self._run: Mapping[type[Any], Callable[[Any], Any]] = {
            Step: runner.launch,
            WriteRows: runner.writer.write,
            SetTables: maker.set_tables,
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
        }

    @property
    def runner(self) -> Runner:
        return self._runner

    def run(self, command: Command[Result]) -> Result:
        return cast("Result", self._run[type(command)](command))

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        return self._runner.swap(parts.program())

    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        return self._runner.choose(key, need)

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        if copies:
            self.mover.compile()
        return self._runner.compile_all(keys, progress) + copies

    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> Background:
        if copies:
            self.mover.compile()
        return self._runner.compile_first(keys, progress)

    def close(self) -> None:
        self._runner.close()
        self.mover.forget()

    def _set_parts(self, command: SetParts) -> None:
        if not command.names:
            self._undo.pop()()
        elif self._resolve is None:
            raise InternalError("an executor without a composition root is given names of parts")
        else:
            self._undo.append(self.swap(self._resolve(command.names)))

    def _set_weights(self, command: SetWeights) -> None:
        self._runner.weights = merge_weights(self._runner.weights, command.weights)
