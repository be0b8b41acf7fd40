"""Reading *.safetensors by memory map: headers are checked first, and no tensor is copied that nobody asked for."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from enginebay.errors import CheckpointError, explain

DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Sizes of the dtypes that may stand in a header, so that a file is checked whole even where a tensor is not read.
_ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16, "BOOL": 8, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E5M2": 8}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000
_DOWNLOAD_AGAIN = "Fetch the file again; it was probably cut short."


class StoredTensor:
    """One tensor of a file: name, dtype as the header spells it, shape, and its bytes by view."""

    def __init__(self, data: mmap.mmap, path: Path, name: str, facts: Mapping[str, Any], start: int) -> None:
        self.path = path
        self.name = name
        self.dtype: str = facts["dtype"]
        self.shape = tuple(facts["shape"])
        begin, end = facts["data_offsets"]
        self.num_bytes: int = end - begin
        self._data = data
        self._start = start + begin

    def view(self) -> np.ndarray:
        """The tensor as it lies in the file, read-only; pages come in as they are touched."""
        if self.dtype not in DTYPES:
            given = f"tensor {self.name!r} in {self.path.name} is {self.dtype}"
            raise CheckpointError(
                explain(given, ", ".join(DTYPES), "Convert the checkpoint to one of these.")
            )
        flat = np.frombuffer(self._data, DTYPES[self.dtype], int(np.prod(self.shape)), self._start)
        return flat.reshape(self.shape)

    def forget(self) -> None:
        """Take the tensor's pages out of this process's memory; they stay in the system's file cache."""
        first = self._start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED") and self.num_bytes:
            self._data.madvise(mmap.MADV_DONTNEED, first, self._start + self.num_bytes - first)


def read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. CheckpointError when the header is broken or the file is shorter than it says."""
    num_bytes = path.stat().st_size
    if num_bytes < 8:
        raise _broken(path, f"is {num_bytes} bytes long", "at least a header")
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise _broken(
                path,
                f"says that its header has {header_bytes} bytes",
                f"at most {num_bytes - 8}, the rest of it",
            )
        header = _parse(path, file.read(header_bytes))
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    for name, facts in header.items():
        _check(path, name, facts, num_bytes - start)
    return {name: StoredTensor(data, path, name, facts, start) for name, facts in header.items()}


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise _broken(path, "has a header that is not a JSON object", "a safetensors file")
    return header


def _check(path: Path, name: str, facts: object, room: int) -> None:
    match facts:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise _broken(path, f"describes tensor {name!r} as {facts!r}", "dtype, shape and data_offsets")
    if not all(isinstance(size, int) and size >= 0 for size in shape) or not 0 <= begin <= end:
        raise _broken(
            path,
            f"describes tensor {name!r} with shape {shape} at {begin}:{end}",
            "sizes and offsets from 0 up",
        )
    count = 1
    for size in shape:
        count *= size
    if dtype in _ITEM_BITS and count * _ITEM_BITS[dtype] != (end - begin) * 8:
        raise _broken(
            path, f"gives tensor {name!r} {end - begin} bytes", f"what {dtype} of shape {shape} takes"
        )
    if end > room:
        raise _broken(
            path,
            f"is truncated: tensor {name!r} ends at byte {end} of {room}",
            f"at least {end} bytes of data",
        )


def _broken(path: Path, what: str, allowed: str) -> CheckpointError:
    return CheckpointError(explain(f"{path} {what}", allowed, _DOWNLOAD_AGAIN))
