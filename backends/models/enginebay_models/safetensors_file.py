"""Reads *.safetensors by memory map. Headers are checked first, and only tensors that are used are
read.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from enginebay.errors import CheckpointError, InputError, shown
from enginebay.json_text import parse_json

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
NUMBERS: Mapping[str, np.dtype] = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""The dtypes in which quantised checkpoints store numbers."""
# Sizes of all dtypes that a header may have, so that also tensors that are not read are checked.
_ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16,
              "BF16": 16, "I16": 16, "U16": 16, "BOOL": 8, "I8": 8, "U8": 8, "F8_E4M3": 8,
              "F8_E5M2": 8}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_MAX_DIMENSIONS = 16
_MAX_SIZE = 2**63
_DOWNLOAD_AGAIN = "Fetch the file again; it was probably cut short."


class StoredTensor:
    """One tensor of a file: name, dtype as in the header, shape, and a view of its bytes.

    `change` makes the tensor of the stored one; it keeps dtype and shape.
    """

    def __init__(
        self,
        data: mmap.mmap,
        path: Path,
        name: str,
        facts: Mapping[str, Any],
        start: int,
        change: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.path = path
        self.name = name
        self.dtype: str = facts["dtype"]
        self.shape = tuple(facts["shape"])
        begin, end = facts["data_offsets"]
        self.num_bytes: int = end - begin
        self._data = data
        self._start = start + begin
        self._change = change

    def view(self) -> np.ndarray:
        """Return the tensor, which is a read-only view of the file unless it is changed. Memory of
        a view is used when it is read.
        """
        if self.dtype not in DTYPES:
            given = f"tensor {self.name!r} in {self.path.name} is {self.dtype}"
            raise CheckpointError(
                given, ", ".join(DTYPES), "Convert the checkpoint to one of these."
            )
        stored = self._read(DTYPES[self.dtype])
        return stored if self._change is None else self._change(stored)

    def raw(self) -> np.ndarray:
        """Return the tensor's bytes as a read-only view of the file, uint8 [num_bytes]."""
        return np.frombuffer(self._data, np.uint8, self.num_bytes, self._start)

    def numbers(self) -> np.ndarray:
        """Return a tensor of one of NUMBERS, as stored, as a read-only view of the file."""
        return self._read(NUMBERS[self.dtype])

    def _read(self, dtype: np.dtype) -> np.ndarray:
        flat = np.frombuffer(self._data, dtype, int(np.prod(self.shape)), self._start)
        return flat.reshape(self.shape)

    def forget(self) -> None:
        """Release the memory of the tensor's pages; they stay in the system's file cache."""
        first = self._start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and self.num_bytes:
            self._data.madvise(mmap.MADV_DONTNEED, first, self._start + self.num_bytes - first)


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name.

    CheckpointError when the file cannot be read, its header is malformed, it is shorter than its
    header says, or two tensors have the same name or share bytes.
    """
    try:
        num_bytes, header_bytes, header, data = _open(path)
    except OSError as error:
        raise _broken(path, f"cannot be read ({error.strerror})", "a safetensors file") from error
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    for name, facts in header.items():
        _check(path, name, facts, num_bytes - start)
    _refuse_overlaps(path, header)
    return {name: StoredTensor(data, path, name, facts, start) for name, facts in header.items()}


def _open(path: Path) -> tuple[int, int, dict[str, Any], mmap.mmap]:
    """Return (size of the file, size of its header, header, the mapped file)."""
    num_bytes = path.stat().st_size
    if not path.is_file() or num_bytes < 8:
        raise _broken(
            path, f"is {num_bytes} bytes long, or no file", "a file with at least a header"
        )
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise _broken(
                path,
                f"says that its header has {header_bytes} bytes",
                f"at most {num_bytes - 8}, the rest of it",
            )
        header = _parse(path, file.read(header_bytes))
        return num_bytes, header_bytes, header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise _broken(path, f"names {shown(twice)} twice in its header", "each name once")
        return made

    try:
        header = parse_json(text, unique)
    except CheckpointError:
        raise
    except (InputError, UnicodeDecodeError):
        header = None
    if not isinstance(header, dict):
        raise _broken(path, "has a header that is not a JSON object", "a safetensors file")
    return header


def _check(path: Path, name: str, facts: object, room: int) -> None:
    match facts:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            given = f"describes tensor {shown(name)} as {shown(facts)}"
            raise _broken(path, given, "dtype, shape and data_offsets")
    sizes = [*shape, begin, end]
    if (
        len(shape) > _MAX_DIMENSIONS
        or not all(type(size) is int and 0 <= size < _MAX_SIZE for size in sizes)
        or begin > end
    ):
        raise _broken(
            path,
            f"describes tensor {shown(name)} with shape {shown(shape)} at "
            f"{shown(begin)}:{shown(end)}",
            "sizes and offsets from 0 up",
        )
    count = 1
    for size in shape:
        count *= size
    if dtype in _ITEM_BITS and count * _ITEM_BITS[dtype] != (end - begin) * 8:
        raise _broken(
            path,
            f"gives tensor {shown(name)} {end - begin} bytes",
            f"what {dtype} of shape {shape} takes",
        )
    if end > room:
        raise _broken(
            path,
            f"is truncated: tensor {shown(name)} of type {shown(dtype)} ends at byte {end} "
            f"of {room}",
            f"at least {end} bytes of data",
        )


def _refuse_overlaps(path: Path, header: Mapping[str, Any]) -> None:
    """Raise CheckpointError for two tensors that share bytes."""
    places = sorted((*facts["data_offsets"], name) for name, facts in header.items())
    last_end, last = 0, ""
    for begin, end, name in places:
        if begin < min(last_end, end):
            given = f"puts tensors {shown(last)} and {shown(name)} into the same bytes"
            raise _broken(path, given, "each tensor in bytes of its own")
        if end > last_end:
            last_end, last = end, name


def _broken(path: Path, what: str, allowed: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}", allowed, _DOWNLOAD_AGAIN)
