"""Records all commands of an engine, with the tokens of its steps, into a file that
`enginebay_testing.replay` can run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax
import numpy as np

from enginebay.contracts.commands import ExecutorCommand, Step
from enginebay.contracts.engine import LaterCompilation, Pending, TokenLogprobs
from enginebay.contracts.executor import EngineParts, Executor, Report
from enginebay.contracts.model import Weights
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.errors import InputError, UnsupportedError
from enginebay_runtime.codec import decode, encode
from enginebay_runtime.engine import StepEngine

Result = TypeVar("Result")
FRAME = struct.Struct("<cI")
CONFIG, COMMAND, TOKENS, DIGEST = b"c", b"C", b"T", b"D"
"""Kinds of frames in a file: the engine's configuration as JSON (first); a command; a step's number
and tokens (an int32, then int32 [rows * steps]); the digest of the arrays (last).
"""


class RecordingExecutor(Executor):
    """Runs commands with another executor, and writes each command that has run to a file."""

    def __init__(self, inner: Executor, file: BinaryIO) -> None:
        self._inner, self._file = inner, file
        self.compilations = inner.compilations
        self.num_steps = 0

    def run(self, command: ExecutorCommand[Result]) -> Result:
        result: Any = self._inner.run(command)
        self.write(COMMAND, encode(command))  # not after a failed command: the engine resets
        if isinstance(command, Step):
            result = RecordedStep(result, self.num_steps, self.write)
            self.num_steps += 1
        return result

    def write(self, kind: bytes, data: bytes) -> None:
        """Append a frame to the file."""
        self._file.write(FRAME.pack(kind, len(data)) + data)

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        raise UnsupportedError(
            "override() with a function while commands are recorded",
            "a name or an import path, which another process can load",
            "Pass an import path such as package.module:function.",
        )

    def close(self) -> None:
        self._inner.close()

    def weights(self) -> Weights:
        return self._inner.weights()

    def arrays(self) -> Any:
        return self._inner.arrays()

    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        return self._inner.choose(key, need)

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        return self._inner.compile_all(keys, progress, copies=copies)

    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> LaterCompilation | None:
        return self._inner.compile_first(keys, progress, copies=copies)

    def serves(self, key: StepKey) -> bool:
        return self._inner.serves(key)


@dataclasses.dataclass
class RecordedStep(Pending):
    """A launched step; read() also writes its tokens to the file."""

    pending: Pending
    number: int
    write: Callable[[bytes, bytes], None]

    def __post_init__(self) -> None:
        self.bucket = self.pending.bucket

    def read(self) -> np.ndarray:
        tokens = self.pending.read()
        self.write(TOKENS, np.asarray([self.number, *tokens.ravel()], np.int32).tobytes())
        return tokens

    def read_logprobs(self) -> TokenLogprobs:
        return self.pending.read_logprobs()

    def read_all_logprobs(self, row: int) -> np.ndarray:
        return self.pending.read_all_logprobs(row)

    def read_prompt_logprobs(self, row: int) -> TokenLogprobs:
        return self.pending.read_prompt_logprobs(row)

    def read_logits(self) -> np.ndarray:
        return self.pending.read_logits()


@contextlib.contextmanager
def recorded(engine: StepEngine, path: Path) -> Iterator[None]:
    """Within the block, write all commands of an engine to a file, then a digest of cache and rows.
    The engine must have no rows; its cache is cleared first.
    """
    inner = engine.executor
    engine.drop_arrays()
    with path.open("wb") as file:
        engine.executor = recording = RecordingExecutor(inner, file)
        try:
            recording.write(CONFIG, engine.parts.config.model_dump_json().encode())
            engine.make_arrays()
            yield
            recording.write(DIGEST, digest_of(recording))
        finally:
            engine.executor = inner


def digest_of(executor: Executor) -> bytes:
    """Return the SHA-256 of an executor's cache and rows, in tree order."""
    digest = hashlib.sha256()
    for array in jax.tree.leaves(executor.arrays()):
        digest.update(np.asarray(array).tobytes())
    return digest.digest()


def frames(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and data of each frame. InputError for a file that is cut short or not a
    recording.
    """
    with path.open("rb") as file:
        while head := file.read(FRAME.size):
            kind, length = FRAME.unpack(head) if len(head) == FRAME.size else (b"", 0)
            data = file.read(length)
            if kind not in (CONFIG, COMMAND, TOKENS, DIGEST) or len(data) != length:
                raise InputError(
                    f"{path}, which is not a recording or is cut short",
                    "a complete file that `recorded` has written",
                    "Record the commands again.",
                )
            yield kind, data


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The result of a replay: numbers of commands and steps, the steps whose tokens differ, and
    whether the final arrays are equal bit by bit.
    """

    num_commands: int
    num_steps: int
    different_steps: tuple[int, ...]
    arrays_are_equal: bool


def replay(path: Path, executor: Executor) -> Replayed:
    """Run the commands of a recording in order, with an executor that has no arrays yet."""
    steps: dict[int, Pending] = {}
    different: list[int] = []
    num_commands = num_steps = 0
    arrays_are_equal = None
    for kind, data in frames(path):
        if kind == COMMAND:
            command = decode(data)
            result = executor.run(command)
            num_commands += 1
            if isinstance(command, Step):
                steps[num_steps] = result
                num_steps += 1
        elif kind == TOKENS:
            number, *wanted = np.frombuffer(data, np.int32).tolist()
            if steps.pop(number).read().ravel().tolist() != wanted:
                different.append(number)
        elif kind == DIGEST:
            arrays_are_equal = digest_of(executor) == data
    if arrays_are_equal is None:
        raise InputError(f"{path}, which ends too early", "a complete recording", "Record again.")
    return Replayed(num_commands, num_steps, tuple(different), arrays_are_equal)
