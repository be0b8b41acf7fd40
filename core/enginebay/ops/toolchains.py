"""Kernels away from their device: interpreted on the host, or compiled for a device that is not
there.

Both are optional for a kernel, and both are what makes it checkable on any machine:

- an implementation with a method `interpreted()` can be interpreted (`Interpretable`);
- a declaration with the capability `compiler = "module:attribute"` names a `KernelCompiler`, shared
  by the kernels of
  its package, that compiles any program which calls them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Interpretable(Protocol):
    """An implementation of an op that can do without its device, slowly, to be checked."""

    def interpreted(self) -> Any:
        """The same implementation by interpretation: by the same op's contract, and it serves
        platform "cpu".

        It finds faults that a device would hide where its interpreter can: races, reads out of
        bounds, scratch memory that nobody wrote. Raises UnsupportedError, with the reason, where
        the interpreter is not installed.
        """


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """What a compiler told of one program for one target.

    `figures` holds what is known of: registers (of the kernel that needs most), spill_bytes,
    shared_bytes, copies_in_flight (groups of asynchronous copies under way while an older one is
    waited for), vmem_bytes, smem_bytes, argument_bytes, output_bytes, temp_bytes and alias_bytes
    (of output that lies in donated arguments).
    """

    target: str
    seconds: float
    figures: Mapping[str, int]
    text: str = ""
    """The compiled program as XLA writes it; "" where a compiler has none."""


class KernelCompiler(Protocol):
    """Compiles programs for devices that are not there."""

    targets: Sequence[str]
    """The architectures it compiles for, as `Env.arch` names them: "v6e", "sm_90"."""

    platform: str
    """The platform of all of them."""

    def why_not(self, target: str) -> str | None:
        """Why it cannot compile for a target on this machine (what is not installed), or None when
        it can.
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
        """Compile `function` of `arguments` (trees of ShapeDtypeStruct) for a target, to machine
        code.

        `donated` are the places of arguments that results may overwrite. With several devices,
        arguments may carry shardings over `devices(target)`. Raises what the compiler raises when
        it refuses the program.
        """

    def devices(self, target: str, num_devices: int) -> Sequence[Any]:
        """That many stand-in devices of a target, to make meshes and shardings of."""
