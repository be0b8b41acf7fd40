"""The process that interprets kernels: `python -m enginebay_triton.interpreter_worker`, with
TRITON_INTERPRET=1.

It reads launches from its standard input until the end, and writes the results to its standard
output. Each array has an address space of its own, 2**44 bytes wide, and every access is checked
against it. So an access outside of its array is found, whatever lies beside the array in memory.
Two programs of a grid that access the same element, at least one of them to write, have a race: a
device runs programs in any order.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np

SPACE_BITS = 44
START = 1 << 20
"""Offset of an array in its address space: a multiple of every alignment, far from the space
before.
"""

LENGTH = struct.Struct("<Q")
TYPE_NAMES = {
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "bool": "i1",
}


def write_message(stream: IO[bytes], message: Any) -> None:
    """Send one picklable value."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive_value(stream: IO[bytes]) -> Any:
    """Receive one value; EOFError at the end. The sender is our own process, so it is trusted."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(LENGTH.unpack(header)[0]))  # noqa: S301


class Fault(Exception):  # noqa: N818  # the launching process receives its text
    """A forbidden access of a kernel."""


class Space:
    """One array in its own address space, with the programs that read and wrote each element."""

    def __init__(self, name: str, array: np.ndarray, number: int) -> None:
        self.name = name
        self.array = array
        self.flat = array.reshape(-1)
        self.base = ((number + 1) << SPACE_BITS) + START
        self.writers = np.zeros(array.size, np.int32)
        self.readers = np.zeros(array.size, np.int32)

    def places(self, addresses: np.ndarray, what: str, program: GridProgram) -> np.ndarray:
        """Return the indices of the elements at addresses; Fault for an address outside."""
        offsets = addresses.astype(np.int64) - self.base
        index, rest = np.divmod(offsets, self.array.itemsize)
        wrong = (index < 0) | (index >= self.flat.size) | (rest != 0)
        if wrong.any():
            first = int(index[wrong][0])
            raise Fault(
                f"{program}: {what} {int(wrong.sum())} places outside of {self.name} "
                f"{self.array.dtype}{list(self.array.shape)}, "
                f"the first at element {first} of {self.flat.size}"
            )
        return index

    def note_read(self, index: np.ndarray, program: GridProgram) -> None:
        """Record a read; Fault when another program of the grid has written the element."""
        writers = self.writers[index]
        if ((writers != 0) & (writers != program.number)).any():
            raise Fault(f"{program}: reads what another program writes, in {self.name}: a race")
        readers = self.readers[index]
        self.readers[index] = np.where(
            (readers == 0) | (readers == program.number), program.number, -1
        )

    def note_write(self, index: np.ndarray, program: GridProgram) -> None:
        """Record a write; Fault when another program has read or written the element."""
        for what, others in (("writes", self.writers[index]), ("reads", self.readers[index])):
            if ((others != 0) & (others != program.number)).any():
                raise Fault(
                    f"{program}: writes what another program {what}, in {self.name}: a race"
                )
        self.writers[index] = program.number


class GridProgram:
    """The program that runs now: its kernel and its place in the grid."""

    def __init__(self, kernel: str, builder: Any) -> None:
        self.kernel = kernel
        self.builder = builder

    @property
    def number(self) -> int:
        """Counted from 1."""
        _, ny, nz = self.builder.grid_dim
        x, y, z = self.builder.grid_idx
        return (x * ny + y) * nz + z + 1

    def __str__(self) -> str:
        return f"kernel {self.kernel}, program {self.builder.grid_idx}"


class Memory:
    """Replaces the interpreter's own loads and stores, which follow raw addresses."""

    def __init__(self, original: Any, program: GridProgram, spaces: Sequence[Space]) -> None:
        self._original = original
        self._program = program
        self._spaces = {(space.base >> SPACE_BITS): space for space in spaces}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def load(
        self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype
    ) -> np.ndarray:
        """Return the values at addresses where the mask is set, and `other` elsewhere."""
        result = np.array(np.broadcast_to(other, addresses.shape), dtype=dtype)
        for space, chosen in self._split(addresses, mask, "reads"):
            index = space.places(addresses[chosen], "reads", self._program)
            space.note_read(index, self._program)
            result[chosen] = space.flat[index].view(dtype)
        return result

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        """Store values at addresses where the mask is set."""
        values = np.broadcast_to(values, addresses.shape)
        for space, chosen in self._split(addresses, mask, "writes"):
            index = space.places(addresses[chosen], "writes", self._program)
            space.note_write(index, self._program)
            space.flat[index] = values[chosen].view(space.flat.dtype)

    def atomic_rmw(self, *_: Any) -> Any:
        raise Fault(f"{self._program}: atomic operations are not interpreted")

    def atomic_cas(self, *_: Any) -> Any:
        raise Fault(f"{self._program}: atomic operations are not interpreted")

    def _split(self, addresses: np.ndarray, mask: np.ndarray, what: str) -> Any:
        mask = np.broadcast_to(mask, addresses.shape).astype(bool)
        numbers = addresses >> np.uint64(SPACE_BITS)
        for number in np.unique(numbers[mask]).tolist():
            if number not in self._spaces:
                raise Fault(f"{self._program}: {what} outside of every array")
            yield self._spaces[number], mask & (numbers == number)


class Pointer:
    """An array with the methods of torch tensors that the interpreter calls."""

    def __init__(self, space: Space) -> None:
        self.dtype = TYPE_NAMES[space.array.dtype.name]
        self._base = space.base

    def data_ptr(self) -> int:
        """The array's address."""
        return self._base

    def untyped_storage(self) -> Pointer:
        return self

    def cpu(self) -> Pointer:
        return self

    def new_empty(self, *_: Any, **__: Any) -> Pointer:
        return self

    def set_(self, *_: Any) -> None:
        """There is one host only: nothing to move."""

    def copy_(self, *_: Any) -> None:
        """There is one host only: nothing to move."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return ()

    def stride(self) -> tuple[int, ...]:
        return ()


def mend_index(interpreter: Any) -> None:
    """Mend Triton 3.6, which uses an array of one element as an index; NumPy refuses that."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
        scope.set_attr(
            tensor,
            "__bool__",
            lambda self: self.handle.data.size != 1 or bool(self.handle.data.squeeze()),
        )

    interpreter._patch_lang_tensor = patched


def find_kernel(module: str, file: str, name: str) -> Any:
    """Return a kernel by its name. A module of a package is imported by name; if the package is not
    on the path, its folder is added. Another module is loaded from its file.
    """
    found: ModuleType | None = sys.modules.get(module)
    if found is None and "." in module:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            sys.path.append(str(Path(file).parents[module.count(".")]))
        found = importlib.import_module(module)
    if found is None:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None, f"{file} is a module"
        assert spec.loader is not None, f"{file} is a module"
        found = importlib.util.module_from_spec(spec)
        sys.modules[module] = found
        spec.loader.exec_module(found)
    return getattr(found, name)


def interpret_grid(
    place: tuple[str, str, str],
    grid: tuple[int, ...],
    arrays: Sequence[np.ndarray],
    num_in_place: int,
    out: Sequence[tuple[tuple[int, ...], str]],
    constants: Mapping[str, Any],
) -> list[np.ndarray]:
    """Interpret every program of the grid.

    Returns the arrays that were changed in place, then the outputs. Elements of outputs that no
    program wrote are NaN.
    """
    from triton.runtime import interpreter

    kernel = find_kernel(*place)
    changed = [array.copy() for array in arrays[len(arrays) - num_in_place :]]
    made = [poisoned(shape, dtype) for shape, dtype in out]
    held = [*arrays[: len(arrays) - num_in_place], *changed]
    names = kernel.arg_names[: len(held)] + kernel.arg_names[len(held) + len(changed) :]
    spaces = [
        Space(name, np.ascontiguousarray(array), number)
        for number, (name, array) in enumerate(zip(names, [*held, *made], strict=False))
    ]
    pointers = [Pointer(space) for space in spaces]
    arguments = [*pointers[: len(held)], *[0] * len(changed), *pointers[len(held) :]]
    program = GridProgram(place[2], interpreter.interpreter_builder)
    original = interpreter._interpreter
    interpreter._interpreter = Memory(original, program, spaces)
    try:
        kernel[grid](*arguments, **constants)
    finally:
        interpreter._interpreter = original
    return [*changed, *made]


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of NaN, or of a conspicuous value for integer dtypes."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return np.full(shape, np.nan, kind)
    return np.full(shape, np.iinfo(kind).max if kind.kind in "iu" else True, kind)


def cause(error: BaseException) -> str:
    """Return the text of the first cause of an error of the interpreter."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) if isinstance(error, Fault) else f"{type(error).__name__}: {error}"


def serve_launches(orders: IO[bytes], answers: IO[bytes]) -> None:
    """Answer every launch with its results, or with the text of its error."""
    from triton.runtime import interpreter

    np.seterr(all="ignore")  # a kernel may overflow in masked elements
    mend_index(interpreter)
    for _ in itertools.count():
        try:
            order = receive_value(orders)
        except EOFError:
            return
        answer: Any
        try:
            answer = interpret_grid(*order)
        except Exception as error:  # noqa: BLE001  # any error of a kernel goes to the launching process
            answer = cause(error)
        write_message(answers, answer)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # output that a kernel prints must not mix with answers
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve_launches(sys.stdin.buffer, channel)
