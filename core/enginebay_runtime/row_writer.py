"""RowWriter: writes to rows what no step brings: known first tokens, and fields of logits
processors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.commands import KnownTokens, WriteRows
from enginebay.contracts.processor import IS_USED, ProcessorState, RowValues
from enginebay.errors import CompilationError, InternalError
from enginebay_runtime import device
from enginebay_runtime.small_programs import compiled_program
from enginebay_runtime.view import ExecutorView

HISTORY = "history"
"""The program that writes a row's token history; the others are named after processors."""


class RowWriter:
    """Writes single rows of an executor's step state, each with a small compiled program that is
    launched like a step.

    Rows without processors cost nothing: fields are reset only when they were written and the row
    belongs to another request.
    """

    def __init__(self, executor: ExecutorView) -> None:
        self._executor = executor
        self._programs: dict[str, Any] = {}
        self._used: dict[int, frozenset[str]] = {}

    def write(self, command: WriteRows) -> None:
        """Write what a command brings."""
        for known in command.known:
            self._write_known(known)
        for used in command.used:
            self.write_all(used.row, used.values)
        for update in command.updates:
            for value in update.values:
                self._write(value.name, update.row, value.values, is_used=True)

    def _write_known(self, known: KnownTokens) -> None:
        """Write the first tokens of a row to its history."""
        padded = np.zeros(self._executor.max_model_len, np.int32)
        padded[: len(known.token_ids)] = known.token_ids
        state = self._executor.state
        rows = self._program(HISTORY)(state.rows, np.int32(known.row), padded)
        self._executor.state = dataclasses.replace(state, rows=rows)

    def write_all(self, row: int, values: Iterable[RowValues]) -> None:
        """Make a row use these processors with these fields, and no others."""
        used = frozenset(value.name for value in values)
        for name in self._used.get(row, frozenset()) - used:
            processor_state = self._executor.state.processor_state[name]
            blank = {
                n: np.zeros(a.shape[1:], a.dtype)
                for n, a in processor_state.items()
                if n != IS_USED
            }
            self._write(name, row, blank, is_used=False)
        for value in values:
            self._write(value.name, row, value.values, is_used=True)
        if used:
            self._used[row] = used
        else:
            self._used.pop(row, None)

    def read(self, row: int) -> tuple[RowValues, ...]:
        """The fields of the processors that a row uses, read to the host."""
        processor_state = self._executor.state.processor_state
        return tuple(
            RowValues(
                name,
                {n: np.asarray(a[row]) for n, a in processor_state[name].items() if n != IS_USED},
            )
            for name in sorted(self._used.get(row, frozenset()))
        )

    def forget(self) -> None:
        """The arrays are new: no row uses any processor."""
        self._used.clear()

    def compile_all(self) -> int:
        """Compile every program. Returns their number."""
        names = [HISTORY, *(name for name, _ in self._executor.parts.processors)]
        for name in names:
            self._program(name, ahead=True)
        return len(names)

    def _write(
        self, name: str, row: int, values: Mapping[str, np.ndarray], *, is_used: bool
    ) -> None:
        state = self._executor.state
        if name not in state.processor_state:
            raise InternalError(
                f"a row uses the logits processor {name!r}, which is none of the engine's"
            )
        whole = {**values, IS_USED: np.bool_(is_used)}
        processor_state = self._program(name)(state.processor_state[name], np.int32(row), whole)
        self._executor.state = dataclasses.replace(
            state, processor_state={**state.processor_state, name: processor_state}
        )

    def _program(self, name: str, *, ahead: bool = False) -> Any:
        found = self._programs.get(name)
        if found is None:
            compilations = self._executor.compilations
            if compilations.forbidden and not ahead:
                given = f"program not compiled: {name} of a row"
                fix = "Call warmup() first, or set forbid_compiling = false."
                raise CompilationError(given, "programs that warmup() compiled", fix)
            found = self._programs[name] = self._compiled(name)
            compilations.add()
        return found

    def _compiled(self, name: str) -> Any:
        state, row = self._executor.state, jax.ShapeDtypeStruct((), jnp.int32)
        held: Any
        function: Callable[..., Any]
        if name == HISTORY:
            held, function = state.rows, device.write_history
            values: Any = jax.ShapeDtypeStruct(state.rows.token_ids.shape[1:], jnp.int32)
        else:
            held, function = state.processor_state[name], write_fields
            values = {n: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for n, a in held.items()}
        outputs = (
            None if self._executor.placement.mesh is None else self._executor.placement.replicated
        )
        return compiled_program(
            self._executor,
            ("row writer", name),
            function,
            (held, row, values),
            donated=0,
            outputs=outputs,
        )


def write_fields(
    processor_state: ProcessorState, row_id: jax.Array, values: ProcessorState
) -> ProcessorState:
    """A processor's fields [R, ...], with `values` written to one row."""
    return {name: array.at[row_id].set(values[name]) for name, array in processor_state.items()}
