"""The side of a CompileProcess that compiles: makes the parts of the engine again, and compiles
their steps into the program store.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginebay.contracts.executor import EngineParts
    from enginebay.contracts.step_key import StepKey
    from enginebay_runtime.compiling import StepShapes
    from enginebay_runtime.stored_programs import ProgramStore

NICE = 10
"""What is added to the nice value of the process."""


def make_worker(settings: dict[str, str]) -> CompileWorker:
    """Return what answers the requests of `enginebay.text.worker`. `settings`: the configuration of
    the engine as JSON, and the digest of its parts.
    """
    os.nice(NICE)
    if hasattr(os, "SCHED_IDLE"):  # on Linux, where it costs steps half as much as a nice value
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return CompileWorker(settings["config"], settings["digest"])


class CompileWorker:
    """Compiles steps of one engine. JAX is imported for the first of them."""

    def __init__(self, config: str, digest: str) -> None:
        self._config, self._digest = config, digest
        self._made: tuple[EngineParts, ProgramStore] | None = None

    def __call__(self, request: Any) -> str:
        """Refuse a request that is no pickle."""
        raise TypeError(f"a step is sent as bytes, not as {type(request).__name__}")

    def answer_bytes(self, request: bytes) -> bytes:
        """Compile what `encoded` has written. Returns why it cannot be compiled here, or ""."""
        if self._made is None:
            self._made = self._make()
        parts, store = self._made
        return self._compile(decoded(request, parts), parts, store).encode()

    def _make(self) -> tuple[EngineParts, ProgramStore]:
        from enginebay.compose.composition import make_parts, make_plan
        from enginebay.config import EngineConfig
        from enginebay.jax_config import stored_programs_folder
        from enginebay_runtime.stored_programs import ProgramStore

        parts = make_parts(make_plan(EngineConfig.model_validate_json(self._config)))
        folder = stored_programs_folder()
        if parts.program_digest != self._digest or folder is None:
            raise ValueError("its parts or its folder of programs are others here")
        return parts, ProgramStore(folder, parts)

    def _compile(
        self, step: tuple[StepShapes, StepKey], parts: EngineParts, store: ProgramStore
    ) -> str:
        from enginebay.contracts.compilations import Compilations
        from enginebay_runtime.compiling import StepCompiler, StepSource, release_memory

        shapes, part = step
        source = StepSource(parts, shapes, Compilations(), store)
        compiler = StepCompiler(source, {}, layered=shapes.layered)
        if compiler.settings != shapes.settings:
            return "JAX has other settings"
        if compiler.load(part) is None:
            compiler.compile(part, compiler.lower(part))
        release_memory()
        name = compiler.stored_name(part)
        is_stored = store.has(*name, True) or store.has(*name, False)
        return "" if is_stored else "it cannot be stored"


def encoded(shapes: StepShapes, part: StepKey) -> bytes:
    """A part of a step as a message; devices are written by their numbers."""
    from jax.experimental import serialize_executable

    file = io.BytesIO()
    serialize_executable._JaxPjrtPickler(file).dump((shapes, part))
    return file.getvalue()


def decoded(message: bytes, parts: EngineParts) -> tuple[StepShapes, StepKey]:
    """What `encoded` has written, on the devices of these parts."""
    from jax.experimental import serialize_executable

    devices = tuple(parts.placement.devices)
    loader = serialize_executable._JaxPjrtUnpickler(io.BytesIO(message), devices[0].client, devices)
    shapes, part = loader.load()
    return shapes, part
