"""Kernels of ops without phases that have several configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from enginebay.ops.caps import Env

ConfigSource = Literal["tuned", "tuned for a larger bucket", "default"]


@dataclasses.dataclass(frozen=True)
class OpProblem:
    """The key of a tuned configuration of an op without phases. `rows`: number of rows; the entry
    for a larger number is used for a smaller one. `sizes`: pairs (name, size or dtype) that must be
    equal; the implementation defines the names.
    """

    rows: int
    sizes: tuple[tuple[str, int | str], ...]


@runtime_checkable
class TunableOp(Protocol):
    """An implementation of an op without phases that has several configurations."""

    name: str
    version: str

    def default_config(self, env: Env, problem: OpProblem) -> Any:
        """Return the frozen configuration to use without a tuned one."""

    def candidates(self, env: Env, problem: OpProblem) -> Sequence[Any]:
        """Return the configurations to measure, as attention does (enginebay.ops.tunable)."""

    def tuned(self, choose: Callable[[OpProblem], Any]) -> Any:
        """Return the same implementation, which calls `choose` for the configuration whenever a
        call of it is traced.
        """
