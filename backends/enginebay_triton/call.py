"""One way to run a Triton kernel from a compiled step, whichever version of jax-triton is
installed.

A kernel's parameters come in one order: the arrays it reads, those it changes in place, a place
holder for each of these (never used: an older jax-triton hands the same address over twice), the
arrays it makes, constants as `tl.constexpr`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from enginebay.errors import UnsupportedError, explain

OLDEST_PTX: Mapping[int, int] = {90: 83, 101: 86, 103: 88, 110: 90, 120: 87}
"""The oldest PTX that is enough, by the highest compute capability it is for: Triton would take its
own assembler's, which XLA's, that is given the code, may not know.
"""

LATER_PTX = 88
"""For compute capabilities beyond those."""

INSTALL = 'Install the extra "gpu" on Python 3.12: pip install "enginebay[gpu]"'


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is run: programs in the grid, shapes of what it makes, constants, and the
    compiler's choices.

    The last `num_in_place` arrays that are handed over are changed in place and come back first.
    """

    grid: tuple[int, ...]
    out: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    num_in_place: int = 0


class Launcher(Protocol):
    """Runs a kernel inside jit: on the device (`launch`), or interpreted
    (`enginebay_triton.interpreter.interpret`).
    """

    def __call__(
        self, kernel: Any, arrays: Sequence[jax.Array], how: Launch
    ) -> tuple[jax.Array, ...]:
        """The arrays changed in place, then those that were made."""


def launch(kernel: Any, arrays: Sequence[jax.Array], how: Launch) -> tuple[jax.Array, ...]:
    """Run `kernel` (a function under `triton.jit`) on the GPU. See Launcher; UnsupportedError where
    it cannot.
    """
    library = load()
    options: dict[str, Any] = {
        "kernel": kernel,
        "grid": how.grid,
        "name": kernel.fn.__name__,
        "num_warps": how.num_warps,
        "num_stages": how.num_stages,
        **how.constants,
    }
    num_read = len(arrays) - how.num_in_place
    read, changed = list(arrays[:num_read]), list(arrays[num_read:])
    if _has_refs():
        refs = [jax.new_ref(array) for array in changed]
        # Fusion is said in so many words because Triton 3.9 warns that its default will change.
        made = library.triton_call(
            *read,
            *refs,
            *[0] * len(refs),
            out_type=how.out,
            backend_options={
                "enable_fp_fusion": True,
                "ptx_version": ptx_version(_compute_capability()),
            },
            **options,
        )
        return (*(jax.freeze(ref) for ref in refs), *made)
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed)
    aliases = {num_read + i: i for i in range(len(changed))}
    return tuple(
        library.triton_call(
            *arrays, out_shape=(*shapes, *how.out), input_output_aliases=aliases, **options
        )
    )


def ptx_version(compute_capability: int) -> int:
    """83 for PTX 8.3: what kernels for this compute capability (90 of sm_90) are written in."""
    fit = (version for most, version in OLDEST_PTX.items() if compute_capability <= most)
    return next(fit, LATER_PTX)


def _compute_capability() -> int:
    """Of the device that is lowered for, as jax-triton asks; that of Hopper where there is none,
    and nothing can be lowered.
    """
    library = importlib.import_module("jax._src.lib").gpu_triton
    try:
        return int(library.get_compute_capability(0))
    except RuntimeError:
        return 90


def _choose_ptx_version() -> None:
    """jax-triton 0.3.1 cannot be told the version of PTX: Triton itself then answers with ours,
    unless it is told another.
    """
    nvidia = importlib.import_module("triton.backends.nvidia.compiler")
    nvidia.get_ptx_version_from_options = lambda options, arch: (  # type: ignore[attr-defined]
        options.ptx_version or ptx_version(arch)
    )


@functools.cache
def load() -> Any:
    """The module jax_triton, fit to work with the Triton that is there. UnsupportedError says why
    there is none.
    """
    reason = why_not()
    if reason is not None:
        raise UnsupportedError(reason)
    if _has_refs():
        # jax-triton 0.4 asks for a constant that came with Triton 3.7; it matters for descriptors
        # alone, which we have none of.
        driver = importlib.import_module("triton.backends.nvidia.driver")
        if not hasattr(driver, "TMA_TF32"):
            driver.TMA_TF32 = 11  # type: ignore[attr-defined]
    else:
        _choose_ptx_version()
    try:
        library = importlib.import_module("jax_triton")
    except ImportError as error:
        raise UnsupportedError(
            f"jax-triton {version('jax-triton')} does not load ({error})",
            "jax with its CUDA plugin",
            INSTALL,
        ) from error
    if not hasattr(
        importlib.import_module("jax_triton.triton_lib").cb, "__file__"
    ):  # a stand-in for the module
        given = (
            f"jax_triton, imported before enginebay's kernels with triton {version('triton')}, "
            "has no NVIDIA backend"
        )
        raise UnsupportedError(
            given, "triton 3.7 or later, or enginebay_triton first", "Import it later."
        )
    return library


def why_not() -> str | None:
    """Why the installed versions cannot work together, or None when they can; nothing is imported
    for it.
    """
    found = {name: version(name) for name in ("jax-triton", "triton", "jax")}
    missing = [name for name, number in found.items() if number is None]
    if missing:
        return explain(
            f"{' and '.join(missing)} not installed", "jax-triton 0.3.1 or 0.4 and triton", INSTALL
        )
    given = ", ".join(f"{name} {number}" for name, number in found.items())
    jt, triton, jax_version = (
        _numbers(found[name] or "") for name in ("jax-triton", "triton", "jax")
    )
    if not (0, 3, 1) <= jt < (0, 5):
        return explain(given, "jax-triton 0.3.1 or 0.4", INSTALL)
    if not (3, 6) <= triton < (4,):
        return explain(given, "triton 3.6 to 3.9", INSTALL)
    if jt >= (0, 4) and (jax_version < (0, 11) or sys.version_info < (3, 12)):
        return explain(
            given,
            "jax-triton 0.4 with jax 0.11 on Python 3.12 or later, 0.3.1 with older ones",
            INSTALL,
        )
    return None


def require_versions() -> None:
    """UnsupportedError when the installed versions cannot work together: what a kernel's module
    does on import.
    """
    reason = why_not()
    if reason is not None:
        raise UnsupportedError(reason)


def version(distribution: str) -> str | None:
    """The installed version of a distribution, None when it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def graph_features() -> frozenset[str]:
    """The capability command_buffer where XLA takes this jax-triton's calls into CUDA graphs: those
    of 0.4, which are typed.
    """
    return frozenset({"command_buffer"} if _has_refs() else ())


@functools.cache
def _has_refs() -> bool:
    """Whether this jax-triton takes references to be changed in place; older ones take pairs of
    aliases.
    """
    return _numbers(version("jax-triton") or "") >= (0, 4)


def _numbers(text: str) -> tuple[int, ...]:
    """(3, 6) of "3.6.0+git1"; parts that are no numbers end it."""
    found = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)
