"""Reads the header of a GGUF file by memory map: its metadata, and where its tensors are. Nothing
in the header is trusted: counts and lengths are bounded by the bytes of the file.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.errors import CheckpointError, shown
from enginebay_models.gguf.block_types import BLOCK_TYPES, type_name

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_HEADER_BYTES = 200_000_000
# A vocabulary has 300,000 tokens, and about twice as many merges.
_MAX_ITEMS = 5_000_000
_MAX_DIMENSIONS = 4
_MAX_SIZE = 2**63
_MAX_NAME_BYTES = 65535
_PARTS_KEY = "split.count"
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 10_000
_FETCH_AGAIN = "Fetch the file again; it was probably cut short."
# Numbers of metadata types -> codes of the module struct.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_F32, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {number: struct.Struct(f"<{code}") for number, code in _CODES.items()}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclasses.dataclass(frozen=True)
class GgufTensorInfo:
    """Where a tensor is: its name, the number of its block type, its shape with the dimension whose
    values are adjacent last, its first byte, and the file and its mapped bytes.
    """

    name: str
    type_number: int
    shape: tuple[int, ...]
    start: int
    path: Path
    data: mmap.mmap = dataclasses.field(repr=False)

    @property
    def type_name(self) -> str:
        """Name of the block type, such as Q4_K."""
        return type_name(self.type_number)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The header of a file. Values of `metadata` are bool, int, float, str, a list of str, or a
    NumPy array of numbers.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensorInfo]


def is_gguf(path: Path) -> bool:
    """Return whether a path is no folder, and is named or begins as a GGUF file."""
    if path.is_dir():
        return False
    if path.suffix.lower() == ".gguf" or not path.is_file():
        return path.suffix.lower() == ".gguf"
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Map a file and read its header.

    CheckpointError when the file cannot be read, its header is malformed, or a tensor has an
    unsupported type, lies outside of the file, or is not where the tensor before it ends.
    """
    try:
        if not path.is_file():
            given = f"there is no file {path}"
            raise CheckpointError(given, "the path of a GGUF file", "Check the spelling.")
        if path.stat().st_size < len(MAGIC) + 20:
            raise _broken(path, "is too short for a header", "a GGUF file")
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise _broken(path, f"cannot be read ({error.strerror})", "a GGUF file") from error
    reader = _HeaderReader(path, data)
    num_tensors, num_values = reader.begin()
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string("a name of metadata", _MAX_NAME_BYTES)
        if key in metadata:
            raise _broken(path, f"names {shown(key)} twice", "each name once")
        metadata[key] = reader.value(key, reader.number(_U32, key))
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise _broken(
            path, f"has {_ALIGNMENT} = {shown(alignment)}", "a power of 2, from 8 to 2**20"
        )
    found = [reader.tensor() for _ in range(num_tensors)]
    start = -(-reader.at // alignment) * alignment
    tensors: dict[str, GgufTensorInfo] = {}
    for info in found:
        if info.name in tensors:
            raise _broken(path, f"has tensor {shown(info.name)} twice", "each tensor once")
        tensors[info.name] = _placed(info, start, alignment)
    _check_order(path, tensors, alignment)
    return GgufFile(path, metadata, tensors)


def read_parts(path: Path) -> GgufFile:
    """Read a file, and if it is one of several parts of a model, all parts. The metadata are those
    of the first part.

    CheckpointError as for `read_gguf`, and for a part that is missing or does not belong to others.
    """
    file = read_gguf(path)
    count = file.metadata.get(_PARTS_KEY, 1)
    if count in (0, 1):
        return file
    named = _PART_NAME.fullmatch(path.name)
    if type(count) is not int or named is None or int(named[3]) != count or count > _MAX_PARTS:
        given = f"{path} has {_PARTS_KEY} = {shown(count)}"
        allowed = f"a name such as model-00001-of-{shown(count):0>5}.gguf"
        raise CheckpointError(given, allowed, "Give the parts the names that they were made with.")
    parts = [
        read_gguf(path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf"))
        for number in range(1, count + 1)
    ]
    tensors: dict[str, GgufTensorInfo] = {}
    for part in parts:
        if twice := tensors.keys() & part.tensors.keys():
            given = f"has tensor {shown(min(twice))}, which another part has too"
            raise _broken(part.path, given, "each tensor in one part")
        tensors |= part.tensors
    return GgufFile(path, parts[0].metadata, tensors)


class _HeaderReader:
    """Reads values one after the other, and refuses to read past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = min(len(data), _MAX_HEADER_BYTES)
        self.at = 0

    def begin(self) -> tuple[int, int]:
        """Return the numbers of tensors and of metadata values."""
        if (magic := self._take(len(MAGIC), "the first bytes")) != MAGIC:
            raise _broken(self.path, f"begins with {magic!r}", f"a GGUF file, {MAGIC!r}")
        version = self.number(_U32, "the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            order = " in big-endian order" if swapped in _VERSIONS else ""
            given = f"{self.path} is GGUF version {swapped if order else version}{order}"
            raise CheckpointError(
                given, "version 2 or 3, little-endian", "Convert the model with a newer llama.cpp."
            )
        # A tensor takes 24 bytes and more, a value of metadata 13.
        return self._count("tensors", 24), self._count("values of metadata", 13)

    def _count(self, what: str, least_bytes: int) -> int:
        count = self.number(_U64, f"the number of {what}")
        room = (self.end - self.at) // least_bytes
        if count > min(room, _MAX_ITEMS):
            raise _broken(
                self.path,
                f"says that it has {count} {what}",
                f"at most {min(room, _MAX_ITEMS)}, by its size",
            )
        return int(count)

    def _take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            raise _broken(
                self.path,
                f"ends within {what}: {count} bytes at {self.at} of {self.end}",
                "a whole header",
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: struct.Struct, what: str) -> Any:
        """Return one number; `what` names it in errors."""
        return form.unpack(self._take(form.size, what))[0]

    def string(self, what: str, longest: int = _MAX_HEADER_BYTES) -> str:
        """Return a text of at most `longest` bytes."""
        length = self.number(_U64, what)
        if length > longest:
            raise _broken(self.path, f"gives {what} {length} bytes", f"at most {longest}")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise _broken(self.path, f"has {what} that is not UTF-8", "text in UTF-8") from None

    def strings(self, count: int, what: str) -> list[str]:
        """Return `count` texts. A vocabulary has 100,000 and more, so this loop makes no calls of
        its own while nothing is wrong.
        """
        data, at, end, read = self.data, self.at, self.end, _U64.unpack_from
        found: list[str] = []
        for _ in range(count):
            first = at + _U64.size
            after = first + read(data, at)[0] if first <= end else end + 1
            try:
                if after > end:
                    break
                found.append(data[first:after].decode())
            except UnicodeDecodeError:
                break
            at = after
        self.at = at
        if len(found) < count:
            self.string(what)  # raises the error of this text
            raise AssertionError("a text that is refused is no longer refused")
        return found

    def value(self, key: str, number: int) -> Any:
        """Return the value of a key, whose metadata type has this number."""
        what = shown(key)
        if number == _F32:
            # The shortest decimal number, which is that of config.json: 1e-05.
            return float(str(np.float32(self.number(_SCALARS[number], what))))
        if number in _SCALARS:
            return self.number(_SCALARS[number], what)
        if number == _STRING:
            return self.string(what)
        if number != _ARRAY:
            raise _broken(self.path, f"has {what} of type {number}", "metadata types 0 to 12")
        kind = self.number(_U32, what)
        if kind == _STRING:
            return self.strings(self._count(f"items in {what}", 8), what)
        if kind not in _SCALARS:
            raise _broken(self.path, f"has {what} with items of type {kind}", "numbers or texts")
        dtype = np.dtype(_SCALARS[kind].format)
        count = self._count(f"items in {what}", dtype.itemsize)
        return np.frombuffer(self._take(count * dtype.itemsize, what), dtype)

    def tensor(self) -> GgufTensorInfo:
        """Return a tensor whose `start` counts from the first byte of all tensors."""
        name = self.string("the name of a tensor", _MAX_NAME_BYTES)
        what = f"tensor {shown(name)}"
        num_dimensions = self.number(_U32, what)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            given = f"gives {what} {num_dimensions} dimensions"
            raise _broken(self.path, given, f"1 to {_MAX_DIMENSIONS}")
        sizes = [self.number(_U64, what) for _ in range(num_dimensions)]
        type_number = self.number(_U32, what)
        start = self.number(_U64, what)
        shape = tuple(reversed(sizes))
        if not all(1 <= size < _MAX_SIZE for size in shape) or start >= _MAX_SIZE:
            given = f"describes {what} ({type_name(type_number)}) with shape {shown(shape)}"
            raise _broken(self.path, given, "sizes from 1 up")
        return GgufTensorInfo(name, type_number, shape, start, self.path, self.data)


def _placed(info: GgufTensorInfo, start: int, alignment: int) -> GgufTensorInfo:
    """Return a tensor with its place in the file; CheckpointError for a wrong type or place."""
    path, num_bytes = info.path, len(info.data)
    what = f"tensor {shown(info.name)} of type {info.type_name}"
    form = BLOCK_TYPES.get(info.type_number)
    if form is None:
        allowed = ", ".join(one.name for one in BLOCK_TYPES.values())
        todo = "Choose a file of another quantisation, such as Q4_K_M or Q8_0."
        raise CheckpointError(f"{path} has {what}", allowed, todo)
    if info.shape[-1] % form.num_values:
        given = f"has {what} with rows of {info.shape[-1]} values"
        raise _broken(path, given, f"a multiple of {form.num_values}")
    if info.start % alignment:
        raise _broken(path, f"puts {what} at byte {info.start}", f"a multiple of {alignment}")
    first = start + info.start
    end = first + tensor_bytes(info)
    if end > num_bytes:
        given = f"is truncated: {what} ends at byte {end} of {num_bytes}"
        raise _broken(path, given, f"at least {end} bytes")
    return dataclasses.replace(info, start=first)


def tensor_bytes(info: GgufTensorInfo) -> int:
    """Return the bytes of a tensor of a supported type."""
    form = BLOCK_TYPES[info.type_number]
    return math.prod(info.shape) // form.num_values * form.num_bytes


def _check_order(path: Path, tensors: Mapping[str, GgufTensorInfo], alignment: int) -> None:
    """Raise CheckpointError for two tensors that share bytes, or that have bytes between them, as a
    tensor with the type of a smaller one has.
    """
    last: GgufTensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda info: info.start):
        if last is not None:
            end = last.start + tensor_bytes(last)
            after = -(-end // alignment) * alignment
            pair = (
                f"tensors {shown(last.name)} ({last.type_name}) and {shown(info.name)} "
                f"({info.type_name})"
            )
            if info.start < end:
                given = f"puts {pair} into the same bytes"
                raise _broken(path, given, "each tensor in bytes of its own")
            if info.start != after:
                given = f"has {info.start - end} bytes between {pair}"
                raise _broken(path, given, f"{after - end}, by the type and the shape of the first")
        last = info


def _broken(path: Path, what: str, allowed: str) -> CheckpointError:
    return CheckpointError(f"{path} {what}", allowed, _FETCH_AGAIN)
