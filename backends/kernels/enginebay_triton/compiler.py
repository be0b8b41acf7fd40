"""Compiles programs with Triton kernels for GPUs that this machine does not have.

A program is lowered for "cuda", which turns its kernels into PTX. The assembler of Triton's wheel
reports the registers and the shared memory of each kernel. Where jax's CUDA plugin is fully
installed, XLA also compiles the program for a described device and reports its memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.util
import re
import subprocess
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import tree_util
from jax.sharding import SingleDeviceSharding

from enginebay.errors import InternalError, UnsupportedError, explain, unknown_name
from enginebay_testing.toolchains import CompileReport
from enginebay_triton import call
from enginebay_triton.targets import TARGETS

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
RUNTIMES = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
KERNEL_CALLS = ("triton_kernel_call_ffi", "triton_kernel_call")
ASSEMBLING_TIMEOUT_S = 300.0

_compute_capability: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "_compute_capability", default=None
)
"""The compute capability that this thread lowers for, while it compiles for an absent GPU. Outside
of that, lowering is for the present device.
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel in a lowered program: name, code, and shared memory per launch in bytes."""

    name: str
    ptx: str
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class AssemblerReport:
    """What the assembler reports about a kernel.

    `spill_bytes` counts stores and loads. `copies_in_flight` comes from the PTX: the largest number
    of groups of asynchronous copies that run while the kernel waits for an older group.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    copies_in_flight: int


class TritonCompiler:
    """enginebay_testing.toolchains.KernelCompiler for NVIDIA's architectures."""

    platform = "cuda"
    targets: Sequence[str] = tuple(TARGETS)

    def why_not(self, target: str) -> str | None:
        """Return why it cannot compile for a target on this machine, or None."""
        if target not in TARGETS:
            return explain(f"target {target}", ", ".join(TARGETS), "Choose one of these.")
        reason = call.why_not_usable()
        if reason is not None:
            return reason
        if _first_installed(PLUGINS) is None:
            return explain("jax's CUDA plugin is not installed", "jax-cuda12-plugin", call.INSTALL)
        if not _assembler().exists():
            return explain(
                f"{_assembler()} is not there", "the assembler of Triton's wheel", call.INSTALL
            )
        return None

    def devices(self, target: str, num_devices: int) -> Sequence[Any]:
        """Return descriptions of `num_devices` GPUs of a target on one host."""
        if target not in TARGETS:
            raise unknown_name("target", target, TARGETS)
        return _devices(target, num_devices)

    def compile(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        *,
        target: str,
        donated: Sequence[int] = (),
        num_devices: int = 1,
    ) -> CompileReport:
        """Compile to machine code; KernelCompiler describes the arguments.

        Raises UnsupportedError where `why_not` returns a reason.
        """
        reason = self.why_not(target)
        if reason is not None:
            raise UnsupportedError(reason)
        start = time.perf_counter()
        whole = _first_installed(RUNTIMES) is not None

        def program(
            *given: Any,
        ) -> Any:  # a new function for each call, so that JAX does not reuse an older trace
            return function(*given)

        jitted = jax.jit(program, donate_argnums=tuple(donated))
        with lowering_for(TARGETS[target].compute_capability):
            if whole:
                sharding = SingleDeviceSharding(self.devices(target, num_devices)[0])
                placed = tree_util.tree_map(functools.partial(_placed, sharding), tuple(arguments))
                lowered = jitted.lower(*placed)
            else:
                lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
        text, figures = "", _kernel_figures(assemble(kernels_in(lowered), target))
        if whole:
            with warnings.catch_warnings():
                # JAX can write a program for an absent device into its compile cache, but cannot
                # read it back.
                warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
                compiled = lowered.compile()
            memory, text = compiled.memory_analysis(), compiled.as_text() or ""
            for name in ("argument", "output", "temp", "alias"):
                figures[f"{name}_bytes"] = int(getattr(memory, f"{name}_size_in_bytes"))
        return CompileReport(target, time.perf_counter() - start, figures, text)


compiler = TritonCompiler()


def _placed(sharding: SingleDeviceSharding, leaf: Any) -> Any:
    """Return the shape of `leaf` with `sharding`, or with the sharding that the leaf has."""
    if getattr(leaf, "sharding", None) is not None:
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _kernel_figures(kernels: Sequence[AssemblerReport]) -> dict[str, int]:
    names = ("registers", "spill_bytes", "shared_bytes", "copies_in_flight")
    return {name: max(getattr(kernel, name) for kernel in kernels) for name in names if kernels}


def _first_installed(modules: Sequence[str]) -> str | None:
    for name in modules:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:  # its parent package is not installed
            continue
    return None


@contextlib.contextmanager
def lowering_for(compute_capability: int) -> Iterator[None]:
    """In the block, kernels are lowered for this architecture and not for the present device."""
    call.import_jax_triton()
    _answer_for_absent_devices()
    token = _compute_capability.set(compute_capability)
    try:
        yield
    finally:
        _compute_capability.reset(token)


@functools.cache
def _answer_for_absent_devices() -> None:
    """Replace the function that jax-triton calls for the compute capability while it lowers.

    Inside `lowering_for` it returns our architecture, otherwise that of the device.
    """
    library = _jax_library("gpu_triton")
    of_device = library.get_compute_capability

    def get_compute_capability(device: int) -> int:
        wanted = _compute_capability.get()
        return of_device(device) if wanted is None else wanted

    library.get_compute_capability = get_compute_capability


def _jax_library(name: str) -> Any:
    """Import a module of jaxlib in the way that jax does."""
    return getattr(importlib.import_module("jax._src.lib"), name)


@functools.cache
def _devices(target: str, num_devices: int) -> tuple[Any, ...]:
    """Make compile-only devices of the CUDA plugin.

    The start-up code of the plugin is not used, because it needs a driver.
    """
    from jax.experimental import topologies

    xla_client = _jax_library("xla_client")

    name = _first_installed(RUNTIMES)
    if name is None:
        raise UnsupportedError(
            "jax's CUDA runtime is not installed", "jax-cuda12-pjrt", call.INSTALL
        )
    jax.devices()  # first, because jax loads the plugin itself where it can
    shape = {"topology": f"1x1x{num_devices}", "target_config": TARGETS[target].config}
    if xla_client.pjrt_plugin_loaded("cuda") and _plugin_api.cache_info().currsize == 0:
        found = topologies.get_topology_desc(TARGETS[target].name, "cuda", **shape)
    else:
        api = _plugin_api(name)
        topology: Any = xla_client.make_c_api_device_topology(api, TARGETS[target].name, **shape)
        found = topologies.TopologyDescription(topology._make_compile_only_devices())
    return tuple(found.devices)


@functools.cache
def _plugin_api(name: str) -> Any:
    """Load JAX's CUDA plugin on a machine without a driver, where jax itself would skip it.

    Registers the types and custom calls that the plugin's start-up code would register, those of
    Triton kernels included.
    """
    xla_client = _jax_library("xla_client")
    plugin = importlib.import_module(name)
    api = xla_client.load_pjrt_plugin_dynamically("cuda", str(plugin._get_library_path()))
    xla_client.initialize_pjrt_plugin("cuda")
    extension = importlib.import_module(f"{_first_installed(PLUGINS)}.cuda_plugin_extension")
    xla_client.register_custom_type_handler(
        "CUDA", functools.partial(extension.register_custom_type, api)
    )
    xla_client.register_custom_call_handler(
        "CUDA", functools.partial(extension.register_custom_call_target, api)
    )
    for kind, value in extension.ffi_types().items():
        xla_client.register_custom_type(kind, value, platform="CUDA")
    for target, value in extension.ffi_handlers().items():
        xla_client.register_custom_call_target(target, value, platform="CUDA", api_version=1)
    return api


def kernels_in(lowered: jax.stages.Lowered) -> list[Kernel]:
    """Return the distinct Triton kernels of a lowered program."""
    found: dict[str, Kernel] = {}
    module = lowered.compiler_ir("stablehlo")
    assert module is not None, "JAX lowers to StableHLO"
    for operation in _operations(module.operation):
        attributes = operation.attributes
        if operation.name != "stablehlo.custom_call":
            continue
        if str(attributes["call_target_name"]).strip('"') not in KERNEL_CALLS:
            continue
        payload = zlib.decompress(_payload(attributes))
        kernel = _fields(_fields(_fields(payload)[1])[1])
        ptx = bytes(kernel[4]).decode()
        found[ptx] = Kernel(bytes(kernel[1]).decode(), ptx, int(kernel.get(3, 0)))
    return list(found.values())


def _payload(attributes: Any) -> bytes:
    """Return the serialised call; typed custom calls have it in a dictionary."""
    from jaxlib.mlir import ir

    if "mhlo.backend_config" in attributes:
        return bytes(
            ir.StringAttr(ir.DictAttr(attributes["mhlo.backend_config"])["opaque"]).value_bytes
        )
    return bytes(ir.StringAttr(attributes["backend_config"]).value_bytes)


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                yield child.operation
                yield from _operations(child.operation)


def _fields(message: bytes) -> dict[int, Any]:
    """Return the fields of a protocol buffer by number; of repeated fields the first.

    The encoding is described at protobuf.dev.
    """
    found: dict[int, Any] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            value: Any = varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            value = message[at : at + size]
            at += size
        found.setdefault(key >> 3, value)
    return found


def _assembler() -> Path:
    """Return the newest ptxas of Triton's wheel.

    The one for Blackwell also knows older architectures and versions of PTX.
    """
    spec = importlib.util.find_spec("triton")
    assert spec is not None, "asked when triton is installed"
    assert spec.origin is not None, "triton is no namespace"
    folder = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    newest = folder / "ptxas-blackwell"
    return newest if newest.exists() else folder / "ptxas"


def assemble(kernels: Sequence[Kernel], target: str) -> list[AssemblerReport]:
    """Assemble each kernel and return the reports; InternalError when one is refused."""
    found = []
    with tempfile.TemporaryDirectory(prefix="enginebay-ptx-") as folder:
        source = Path(folder) / "kernel.ptx"
        for kernel in kernels:
            source.write_text(kernel.ptx)
            match = re.search(r"^\.target (\w+)", kernel.ptx, re.MULTILINE)
            assert match is not None, "PTX says what it is for"
            command = [str(_assembler()), "-v", f"--gpu-name={match[1]}", str(source)]
            done = subprocess.run(
                [*command, "-o", str(source.with_suffix(".cubin"))],
                capture_output=True,
                text=True,
                timeout=ASSEMBLING_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                raise InternalError(
                    f"{kernel.name} for {target}: the assembler refuses it: {done.stderr}"
                )
            found.append(_told(kernel, done.stderr))
    return found


def _told(kernel: Kernel, text: str) -> AssemblerReport:
    def largest(pattern: str) -> int:
        return max((int(number) for number in re.findall(pattern, text)), default=0)

    spills = largest(r"(\d+) bytes spill stores") + largest(r"(\d+) bytes spill loads")
    fixed = largest(r"(\d+) bytes smem")
    waits = re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.ptx)
    flying = max(map(int, waits), default=0)
    return AssemblerReport(
        kernel.name, largest(r"Used (\d+) registers"), spills, fixed + kernel.shared_bytes, flying
    )
