"""Compiles programs for TPUs that this machine does not have, with the compiler in libtpu."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from enginebay.errors import UnsupportedError, unknown_name
from enginebay.jax_config import keeping_nothing
from enginebay_testing.toolchains import CompileReport

TOPOLOGIES: Mapping[str, Mapping[int, str]] = {
    "v5e": {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"},
    "v6e": {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"},
    "7x": {8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"},
    "v5p": {4: "v5p:2x2x1", 8: "v5p:2x2x2"},
    "v4": {8: "v4:2x2x1", 16: "v4:2x2x2"},
}
"""For each target, numbers of devices and libtpu's name of the slice. A 7x chip is two devices."""

WITHOUT_A_TPU = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables that libtpu reads when it is loaded on a machine without a TPU. They
replace the metadata server, and allow other processes of the machine to load libtpu too.
"""

USED_VMEM = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)
"""Finds, in compiled text, the VMEM (memory space 1) of a custom call."""


@contextlib.contextmanager
def environment_without_a_tpu() -> Iterator[None]:
    """In the block, set those of the variables above that are not set.

    Does nothing on a machine that has a TPU.
    """
    alone = (
        os.environ.get("TPU_SKIP_MDS_QUERY") == "1"
    )  # JAX sets it on import when it finds no TPU
    missing = {
        name: value for name, value in WITHOUT_A_TPU.items() if alone and name not in os.environ
    }
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


@dataclasses.dataclass(frozen=True)
class TpuCompiler:
    """A KernelCompiler that uses JAX's ahead-of-time topologies."""

    targets: Sequence[str] = tuple(TOPOLOGIES)
    platform: str = "tpu"

    def why_not(self, target: str) -> str | None:
        """Return why it cannot compile for a target on this machine, or None."""
        _known(target)
        if importlib.util.find_spec("libtpu") is None:
            return "libtpu is not installed; install enginebay[tpu]"
        try:
            self.devices(target, 1)
        except (jax.errors.JaxRuntimeError, RuntimeError) as error:
            return f"libtpu describes no {target}: {str(error).splitlines()[0]}"
        return None

    def devices(self, target: str, num_devices: int) -> Sequence[Any]:
        """Return the first `num_devices` devices of the smallest slice that has as many."""
        slices = _known(target)
        size = next((n for n in sorted(slices) if n >= num_devices), None)
        if size is None:
            allowed = f"at most {max(slices)}"
            raise UnsupportedError(
                f"{num_devices} devices of {target}", allowed, "Compile for fewer."
            )
        with environment_without_a_tpu():
            jax.local_devices(backend="cpu")  # the start of JAX loads libtpu too
            slice_ = topologies.get_topology_desc(platform="tpu", topology_name=slices[size])
        return list(slice_.devices[:num_devices])

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

        Arguments without a sharding are replicated. The report's figures are argument_bytes,
        output_bytes, temp_bytes, alias_bytes and code_bytes per device, and vmem_bytes of the
        Pallas kernel that takes most.
        """
        mesh = _mesh(arguments, self.devices(target, num_devices))
        whole = NamedSharding(mesh, PartitionSpec())
        placed = jax.tree.map(lambda leaf: _placed(leaf, whole), tuple(arguments))
        start_s = time.perf_counter()
        with (
            keeping_nothing(),
            warnings.catch_warnings(),
            jax.set_mesh(mesh),
        ):  # kernels may read the kind of device
            warnings.filterwarnings(
                "ignore", "Error reading persistent compilation cache"
            )  # its owner keeps it
            compiled = jax.jit(function, donate_argnums=tuple(donated)).lower(*placed).compile()
        seconds = time.perf_counter() - start_s
        memory: Any = compiled.memory_analysis()
        text = compiled.as_text() or ""
        figures = {
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "alias_bytes": memory.alias_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
            "vmem_bytes": max(map(int, USED_VMEM.findall(text)), default=0),
        }
        return CompileReport(
            target, seconds, {name: int(number) for name, number in figures.items()}, text
        )


def _known(target: str) -> Mapping[int, str]:
    if target not in TOPOLOGIES:
        raise unknown_name("TPU target", target, TOPOLOGIES)
    return TOPOLOGIES[target]


def _mesh(arguments: Sequence[Any], devices: Sequence[Any]) -> Mesh:
    """Return the mesh of the first argument that has one, or a mesh of all devices."""
    for leaf in jax.tree.leaves(tuple(arguments)):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return Mesh(np.array(devices), ("devices",), axis_types=(AxisType.Auto,))


def _placed(leaf: Any, otherwise: NamedSharding) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or otherwise)


compiler = TpuCompiler()
