"""Contracts for configurations of kernels: kernels may have several, and `Tuning` is the part that
chooses one of them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket, Mode

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


class Tuning(ABC):
    """Chooses the configuration of a kernel for each problem. A plugin registers it as kind
    "tuning"; without one, `Untuned` is used.
    """

    @abstractmethod
    def config(
        self, op: str, impl: Any, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> tuple[Any, ConfigSource]:
        """Return the configuration of an attention implementation for a problem, and its source.
        UnsupportedError with tuned = "require" when there is no tuned configuration.
        """

    @abstractmethod
    def op_config(
        self, op: str, impl: TunableOp, env: Env, problem: OpProblem
    ) -> tuple[Any, ConfigSource]:
        """Return the configuration of an implementation of an op without phases for a problem, and
        its source. UnsupportedError as for config().
        """

    @abstractmethod
    def faster_than(
        self, op: str, impls: Sequence[Any], env: Env, specs: Sequence[AttnSpec], mode: Mode
    ) -> tuple[Any, str] | None:
        """Return the implementation that was measured as the fastest for steps of a mode, and the
        reason; None when it is the first of `impls`, or when there are no measurements.
        """

    def bound(self, op: str, impl: Any, env: Env) -> Any:
        """Return an implementation of an op without phases that uses the configurations of this
        object. An implementation without configurations is returned as it is.
        """
        if not isinstance(impl, TunableOp):
            return impl
        return impl.tuned(lambda problem: self.op_config(op, impl, env, problem)[0])


class Untuned(Tuning):
    """Chooses the default configuration of every implementation."""

    def config(
        self, op: str, impl: Any, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> tuple[Any, ConfigSource]:
        return impl.default_config(env, spec, bucket, layout), "default"

    def op_config(
        self, op: str, impl: TunableOp, env: Env, problem: OpProblem
    ) -> tuple[Any, ConfigSource]:
        return impl.default_config(env, problem), "default"

    def faster_than(
        self, op: str, impls: Sequence[Any], env: Env, specs: Sequence[AttnSpec], mode: Mode
    ) -> None:
        """Return None: there are no measurements."""
