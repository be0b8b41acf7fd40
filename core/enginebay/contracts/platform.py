"""The platform contract: a platform has the devices of one kind, and the facts about them that
other parts need.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginebay.errors import InternalError
from enginebay.ops.caps import Env


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Measured figures of one device.

    bytes_per_s: bytes read from memory in a second. flops_per_s: floating-point operations in a
    second, by dtype. memory_bytes: the memory. measured_on: the name of the measured device.
    """

    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    memory_bytes: int
    measured_on: str


Compiled = Callable[[Callable[[], jax.Array]], Callable[[], jax.Array]]
"""Returns the compiled program of a function without arguments."""


class Platform(ABC):
    """The devices of one kind, with defaults that suit them. A vendor's plugin registers a
    platform; the core itself names no kind of device.

    Invariants: `why_not()` is None if and only if `devices()` is not empty; every op that plans
    need has an implementation that supports `default_layout` and `default_dtype` (fused ops may
    have none); all methods except `hardware` are cheap.
    """

    name: str
    """The name for `--platform`, and in the `platforms` of kernels."""

    default_layout: str
    """The cache layout that `layout = "auto"` chooses."""

    default_dtype: str
    """The dtype that `dtype = "auto"` chooses."""

    priority: int = 0
    """`platform = "auto"` chooses the platform with the highest priority among those with
    devices.
    """

    rows_at_once: int | None = None
    """How many rows a step passes to a logits processor at a time. With a number, the step skips
    rows that do not use the processor (good for CPUs). None: one call with all rows (good where a
    launch costs more than the computation).
    """

    one_prefill_width: bool = False
    """Whether a prefill program for many rows runs a single row as fast as a program for one row.
    If so, only one program is compiled for any number of rows.
    """

    mixed_steps: bool = False
    """The value of the setting `mixed_steps` when it is "auto": whether decoding rows run in the
    same program as a prefill, which then reads the weights once for both.
    """

    runtime_bytes: int = 0
    """Bytes that a process takes besides the arrays of its engine, if the devices use the memory of
    the host, which other programs need too: the default size of a cache is then smaller. 0: the
    devices have memory of their own.
    """

    demand_memory: bool = False
    """Whether the memory of `zeros` becomes resident only where an array is written, and `clear`
    gives it back. The whole cache is then made at once.
    """

    @abstractmethod
    def why_not(self) -> str | None:
        """Return why this platform cannot be used on this machine, and what the user should do, or
        None when it can.
        """

    @abstractmethod
    def devices(self) -> Sequence[jax.Device]:
        """Return the local devices, in JAX's order."""

    @abstractmethod
    def env(self) -> Env:
        """Return the facts about the device that kernels use to decide what they support."""

    @abstractmethod
    def hardware(self) -> Hardware:
        """Return the measured figures of one device, for memory plans and rooflines. May measure
        them, which takes time.
        """

    @abstractmethod
    def min_rows(self, dtype: str) -> int:
        """Return the min number of rows of a decode step that uses the device fully in this dtype.
        Smaller batches are padded to this number.
        """

    @abstractmethod
    def compile_options(self) -> Mapping[str, str | bool | int]:
        """Return the XLA options for every compiled step, as `jax.jit` accepts them in
        compiler_options.
        """

    def zeros(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sharding: Sharding,
        compiled: Compiled | None = None,
    ) -> jax.Array:
        """Return an array of zeros for a cache, placed by `sharding`. `compiled` returns the
        program of a function without arguments whose result is placed by `sharding`; None:
        `jax.jit` makes it.
        """
        program = compiled or functools.partial(jax.jit, out_shardings=sharding)
        return program(functools.partial(jnp.zeros, shape, dtype))()

    def clear(self, array: jax.Array, first: int, last: int) -> None:
        """Set the entries `first` to `last` - 1 of the first axis of an array to 0, in place, and
        give their memory back to the system. The array was made by `zeros`. Called only with
        `demand_memory`, while no program uses the array.
        """
        raise InternalError(f"{type(self).__name__} cannot clear arrays in place")
