"""Configurations of kernels: what an implementation offers to choose from, and the contract of what
chooses.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from enginebay.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket, Mode

ConfigSource = Literal["tuned", "tuned for a larger bucket", "default"]


@runtime_checkable
class Tunable(Protocol):
    """An implementation with a configuration that is worth searching."""

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> Sequence[Any]:
        """Configurations that may be the fastest for a problem: frozen dataclasses of the default's
        type, of plain values.

        Empty where nothing can be chosen. It is asked often, so it must be cheap; what would not
        fit the device's memory is left out by an estimate.
        """


def candidates_of(
    impl: Any, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
) -> Sequence[Any]:
    """The implementation's candidates, none where it is not tunable."""
    return impl.candidates(env, spec, bucket, layout) if isinstance(impl, Tunable) else ()


@dataclasses.dataclass(frozen=True)
class OpProblem:
    """What a configuration of an op without phases is chosen by: rows, of which an entry for more
    serves fewer, and the sizes and dtypes that must be equal, by the names that the implementation
    gives them.
    """

    rows: int
    sizes: tuple[tuple[str, int | str], ...]


@runtime_checkable
class TunableOp(Protocol):
    """An implementation of an op without phases with a configuration that is worth searching."""

    name: str
    version: str

    def default_config(self, env: Env, problem: OpProblem) -> Any:
        """The frozen configuration to use when nothing better is known."""

    def candidates(self, env: Env, problem: OpProblem) -> Sequence[Any]:
        """As of Tunable."""

    def tuned(self, choose: Callable[[OpProblem], Any]) -> Any:
        """The same implementation, which asks `choose` for the configuration of each call while the
        call is traced.
        """


class Tuning(ABC):
    """Knows the configuration of a kernel for each problem. What a plugin's part of kind "tuning"
    makes for an engine; `Untuned` where no plugin is asked.
    """

    @abstractmethod
    def config(
        self, op: str, impl: Any, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> tuple[Any, ConfigSource]:
        """The configuration of an implementation of attention for a problem, and where it is from.
        UnsupportedError where the engine requires a tuned one and there is none.
        """

    @abstractmethod
    def op_config(
        self, op: str, impl: TunableOp, env: Env, problem: OpProblem
    ) -> tuple[Any, ConfigSource]:
        """The same for an op without phases."""

    @abstractmethod
    def faster_than(
        self, op: str, impls: Sequence[Any], env: Env, specs: Sequence[AttnSpec], mode: Mode
    ) -> tuple[Any, str] | None:
        """The implementation that was measured to be the fastest in steps of a mode, and the
        reason, where it is not the first of `impls`.
        """

    def bound(self, op: str, impl: Any, env: Env) -> Any:
        """An implementation of an op without phases, which takes its configurations from here if it
        has some.
        """
        if not isinstance(impl, TunableOp):
            return impl
        return impl.tuned(lambda problem: self.op_config(op, impl, env, problem)[0])


class Untuned(Tuning):
    """Every implementation's own defaults."""

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
        """None: nothing was measured."""
