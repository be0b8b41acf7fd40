"""One way to run a Triton kernel from a compiled step, whichever version of jax-triton is
installed.

The parameters of a kernel have this order: arrays that it reads, arrays that it changes in place,
one unused parameter for each of those (older versions of jax-triton pass the address twice), arrays
that it creates, constants as `tl.constexpr`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from enginebay.errors import UnsupportedError, explain

OLDEST_PTX: Mapping[int, int] = {90: 83, 101: 86, 103: 88, 110: 90, 120: 87}
"""(highest compute capability, oldest sufficient version of PTX) pairs. Triton would choose the
version of its own assembler, but XLA's assembler compiles the code and may be older.
"""

LATER_PTX = 88
"""The version of PTX for later compute capabilities."""

INSTALL = 'Install the extra "gpu" on Python 3.12: pip install "enginebay[gpu]"'


@dataclasses.dataclass(frozen=True)
class Launch:
    """The grid, output shapes, constants and compiler options of one kernel call.

    The last `num_in_place` input arrays are changed in place and are the first results.
    """

    grid: tuple[int, ...]
    out: tuple[jax.ShapeDtypeStruct, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    num_in_place: int = 0


class Launcher(Protocol):
    """A function that runs a kernel inside jit.

    `launch` runs it on the device, `enginebay_triton.interpreter.interpret` interprets it.
    """

    def __call__(
        self, kernel: Any, arrays: Sequence[jax.Array], how: Launch
    ) -> tuple[jax.Array, ...]:
        """Return the arrays that were changed in place, then the arrays that were created."""


def launch(kernel: Any, arrays: Sequence[jax.Array], how: Launch) -> tuple[jax.Array, ...]:
    """Run `kernel` (a function under `triton.jit`) on the GPU. This function is a Launcher.

    Raises UnsupportedError where the installed packages cannot run it.
    """
    library = import_jax_triton()
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
        # Triton 3.9 warns that the default of this option will change, so it is given.
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
    """Return the version of PTX for a compute capability (90 for sm_90); 83 means PTX 8.3."""
    fit = (version for most, version in OLDEST_PTX.items() if compute_capability <= most)
    return next(fit, LATER_PTX)


def _compute_capability() -> int:
    """Return the compute capability that jax-triton lowers for.

    Without a device nothing can be lowered; then it is the one of Hopper.
    """
    library = importlib.import_module("jax._src.lib").gpu_triton
    try:
        return int(library.get_compute_capability(0))
    except RuntimeError:
        return 90


def _choose_ptx_version() -> None:
    """Make Triton use our version of PTX where its caller names none.

    jax-triton 0.3.1 has no parameter for the version.
    """
    nvidia = importlib.import_module("triton.backends.nvidia.compiler")
    nvidia.get_ptx_version_from_options = lambda options, arch: (  # type: ignore[attr-defined]
        options.ptx_version or ptx_version(arch)
    )


def _accept_live_inputs(library: Any) -> None:
    """Let jax 0.12 call the rule with which jax-triton 0.4 keeps its calls from being left out.

    jax 0.12 passes a third argument, which inputs are used later; the rule needs every input.
    """
    rules = importlib.import_module("jax._src.interpreters.partial_eval").dce_rules
    rule = rules.get(library.triton_kernel_call_p)
    if (
        rule is not None
        and _numbers(version("jax") or "") >= (0, 12)
        and len(inspect.signature(rule).parameters) == 2
    ):
        rules[library.triton_kernel_call_p] = lambda used, _live, equation: rule(used, equation)


@functools.cache
def import_jax_triton() -> Any:
    """Import jax_triton, adapted to the installed Triton.

    Raises UnsupportedError with the reason when the two cannot work together.
    """
    reason = why_not_usable()
    if reason is not None:
        raise UnsupportedError(reason)
    if _has_refs():
        # jax-triton 0.4 reads a constant that Triton has from 3.7 on. It matters for descriptors
        # only, and our kernels have none.
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
    ):  # an incomplete module
        given = (
            f"jax_triton, imported before enginebay's kernels with triton {version('triton')}, "
            "has no NVIDIA backend"
        )
        raise UnsupportedError(
            given, "triton 3.7 or later, or enginebay_triton first", "Import it later."
        )
    if _has_refs():
        _accept_live_inputs(importlib.import_module("jax_triton.triton_lib"))
    return library


def why_not_usable() -> str | None:
    """Return why the installed versions cannot work together, or None when they can.

    Imports nothing.
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
            "jax-triton 0.4 with jax 0.11 or 0.12 on Python 3.12 or later, 0.3.1 with older ones",
            INSTALL,
        )
    return None


def require_versions() -> None:
    """Raise UnsupportedError when the installed versions cannot work together.

    Modules with kernels call it when they are imported.
    """
    reason = why_not_usable()
    if reason is not None:
        raise UnsupportedError(reason)


def version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def graph_features() -> frozenset[str]:
    """Return {"command_buffer"} when XLA can put calls of this jax-triton into CUDA graphs.

    XLA can from version 0.4 on, whose custom calls are typed.
    """
    return frozenset({"command_buffer"} if _has_refs() else ())


@functools.cache
def _has_refs() -> bool:
    """Return whether this jax-triton takes references for arrays that change in place.

    Older versions take pairs of aliases.
    """
    return _numbers(version("jax-triton") or "") >= (0, 4)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (3, 6, 0) for "3.6.0+git1"."""
    found = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)
