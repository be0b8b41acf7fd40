"""Kernels of attention that have several configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.spec import AttnSpec, Bucket


@runtime_checkable
class Tunable(Protocol):
    """An attention implementation with several configurations, which `enginebay tune` measures."""

    def candidates(
        self, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
    ) -> Sequence[Any]:
        """Return the configurations that may be the fastest for a problem; () when there is no
        choice. They are frozen dataclasses of plain values, of the same type as the default.

        The method is called often, so it must be cheap. It leaves out configurations that, by an
        estimate, do not fit the device's memory.
        """


def candidates_of(
    impl: Any, env: Env, spec: AttnSpec, bucket: Bucket, layout: KVLayout
) -> Sequence[Any]:
    """Return the configurations of an implementation; () when it is not Tunable."""
    return impl.candidates(env, spec, bucket, layout) if isinstance(impl, Tunable) else ()
