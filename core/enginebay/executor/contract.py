"""Executor: runs commands in the order in which they come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from enginebay.background import Background
from enginebay.engine import Compilations
from enginebay.executor.commands import Command
from enginebay.executor.keys import StepKey, StepNeeds
from enginebay.executor.parts import EngineParts
from enginebay.ops.shadow import ShadowReport

Result = TypeVar("Result")

Report = Callable[[int, int, str], None]
"""Called after each program that is compiled: how many there are now, of how many, and its name."""


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
    def shadow_report(self) -> ShadowReport | None:
        """What shadow mode has found so far; None without it."""
        return None
