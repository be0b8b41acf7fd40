"""The platform contract: the devices to run on, and the facts that other parts need of them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import jax

from enginebay.ops.caps import Env


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Measured figures of one device: bytes/s read from memory, floating-point operations/s by
    dtype, memory in bytes.
    """

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    measured_on: str


class Platform(ABC):
    """Devices and the defaults that suit them. A vendor's plugin supplies one; nothing in the core
    names a device.

    Invariants: `why_not()` is None if and only if `devices()` is not empty; `default_layout` and
    `default_dtype` are served by at least one registered implementation of every op; all methods
    are cheap but `hardware`.
    """

    name: str
    default_layout: str
    default_dtype: str
    priority: int = 0
    """Among the platforms that have devices, "auto" takes the one with the highest priority."""

    rows_at_once: int | None = None
    """How many rows logits processors are given at a time, where only those rows cost anything that
    use them; None: all in one go, where launches cost more than rows.
    """

    one_prefill_width: bool = False
    """Whether a prefill with room for many rows is as fast for one row as a program for one row
    would be, so that one program serves any number of rows.
    """

    mixed_steps: bool = False
    """Whether decoding rows share the program of a prefill, which reads the weights once for both,
    where the configuration says "auto".
    """

    @abstractmethod
    def why_not(self) -> str | None:
        """Why this platform cannot be used on this machine, or None when it can."""

    @abstractmethod
    def devices(self) -> Sequence[jax.Device]:
        """The local devices, in JAX's order."""

    @abstractmethod
    def env(self) -> Env:
        """What kernels are told of the device."""

    @abstractmethod
    def hardware(self) -> Hardware:
        """Figures of one device, for memory plans and rooflines; measured figures of this kind of
        device.
        """

    @abstractmethod
    def min_rows(self, dtype: str) -> int:
        """Fewest rows of a decode step that run at full speed in this dtype; smaller batches are
        padded to it.
        """

    @abstractmethod
    def compile_options(self) -> Mapping[str, str | bool | int]:
        """XLA options for every compiled step, as `jax.jit` takes them in compiler_options."""
