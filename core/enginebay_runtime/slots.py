"""SlotWriter: writes adapters to their slots in the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.adapters import ADAPTER_WEIGHTS
from enginebay.contracts.commands import SetAdapter
from enginebay.errors import CompilationError, InputError
from enginebay_runtime.small_programs import compiled_program
from enginebay_runtime.view import ExecutorView


def write_slot(
    held: Mapping[str, jax.Array], slot: jax.Array, values: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Adapter weights [slots, ...] by path, with `values` [...] written to one slot."""
    return {path: array.at[slot].set(values[path]) for path, array in held.items()}


class SlotWriter:
    """Writes adapters to slots, each with one launch that follows the launched steps."""

    def __init__(self, executor: ExecutorView) -> None:
        self._executor = executor
        self._program: Any = None

    def _held(self) -> dict[str, jax.Array]:
        weights: Mapping[str, Any] = self._executor.model_weights
        return {path: one for path, one in weights.items() if path.startswith(ADAPTER_WEIGHTS)}

    def compile(self) -> int:
        """Compile the program, unless it is compiled. Returns the number of programs: 0 for a model
        without adapters.
        """
        held, executor = self._held(), self._executor
        if held and self._program is None:
            outputs = None
            if executor.placement.mesh is not None:
                # Donated arrays are reused only when they are returned with the same sharding.
                outputs = {path: array.sharding for path, array in held.items()}
            values = {p: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for p, a in held.items()}
            self._program = compiled_program(
                executor,
                ("slot writer",),
                write_slot,
                (held, jax.ShapeDtypeStruct((), jnp.int32), values),
                donated=0,
                outputs=outputs,
            )
            executor.compilations.add()
        return int(self._program is not None)

    def write(self, command: SetAdapter) -> None:
        """Write an adapter. InputError for a slot or an array that the weights have no room for."""
        held, executor = self._held(), self._executor
        num_slots = min((len(array) for array in held.values()), default=0)
        if not 0 <= command.slot < num_slots:
            raise InputError(
                f"slot {command.slot} for an adapter", f"0 to {num_slots - 1}", "Raise max_loras."
            )
        for path, given in command.arrays.items():
            room = held[path].shape[1:] if path in held else ()
            fits = all(size <= most for size, most in zip(given.shape, room, strict=False))
            if len(given.shape) != len(room) or not fits:
                raise InputError(
                    f"{path!r} of shape {given.shape} in an adapter",
                    f"an adapter weight of the model, {room or 'which it does not have'}",
                    "Make the adapter for this model, with a rank of at most max_lora_rank.",
                )
        if self._program is None and executor.compilations.forbidden:
            raise CompilationError(
                "program not compiled: an adapter's slot",
                "programs that warmup() compiled",
                "Call warmup() first, or set forbid_compiling = false.",
            )
        self.compile()
        values = {path: np.zeros(a.shape[1:], a.dtype) for path, a in held.items()}
        for path, given in command.arrays.items():
            values[path][tuple(map(slice, given.shape))] = given
        executor.model_weights = {
            **executor.model_weights,
            **self._program(held, np.int32(command.slot), values),
        }
