"""The contract of compilers that check a kernel on a machine without its device. A declaration of a
kernel names its compiler in the capability `compiler = "module:attribute"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What a compiler reports about one program for one target.

    `figures` has the known ones of: registers (max over the kernels of the program), spill_bytes,
    shared_bytes, copies_in_flight (groups of asynchronous copies that are running while an older
    group is waited for), vmem_bytes, smem_bytes, argument_bytes, output_bytes, temp_bytes, and
    alias_bytes (bytes of output in donated arguments).
    """

    target: str
    seconds: float
    figures: Mapping[str, int]
    text: str = ""
    """The compiled program as XLA prints it; "" when the compiler does not print it."""


class KernelCompiler(Protocol):
    """Compiles programs for devices that this machine does not have."""

    targets: Sequence[str]
    """The architectures that it compiles for, named as in `Env.arch`: "v6e", "sm_90"."""

    platform: str
    """The platform of all these architectures."""

    def why_not(self, target: str) -> str | None:
        """Return why it cannot compile for a target on this machine, such as a missing package; or
        None when it can.
        """

    def compile(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        target: str,
        donated: Sequence[int] = (),
        num_devices: int = 1,
    ) -> CompileReport:
        """Compile `function` with `arguments` (pytrees of ShapeDtypeStruct) to machine code for a
        target.

        `donated`: indices of arguments that results may overwrite. With several devices, arguments
        may have shardings over `devices(target, num_devices)`. Errors of the compiler pass through.
        """

    def devices(self, target: str, num_devices: int) -> Sequence[Any]:
        """Return descriptions of `num_devices` devices of a target, for meshes and shardings."""
