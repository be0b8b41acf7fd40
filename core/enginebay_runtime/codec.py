"""Commands as bytes, versioned and without pickle: a JSON header, then the bytes of the arrays.

A record is ``magic, version, header length`` (4, 2 and 4 bytes), the header in UTF-8, and the
arrays' bytes one after the other. The header has the record's fields in the order of its class,
with the dtype and shape in the place of each array.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import struct
import types
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import (
    COMMANDS,
    DecodeInputs,
    ExecutorCommand,
    KnownTokens,
    PrefillInputs,
    RowUpdate,
    VerifyInputs,
)
from enginebay.contracts.engine import GroupState, RowState
from enginebay.contracts.processor import RowValues
from enginebay.contracts.step_key import StepKey
from enginebay.errors import InputError
from enginebay.ops.spec import Bucket

MAGIC = b"EBcm"
VERSION = 3
HEAD = struct.Struct("<4sHI")
RECORDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        *COMMANDS,
        StepKey,
        Bucket,
        CacheShape,
        KnownTokens,
        RowUpdate,
        PrefillInputs,
        DecodeInputs,
        VerifyInputs,
        RowValues,
        RowState,
        GroupState,
    )
}
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float16", "bfloat16", "float32", "float64", "int4", "uint4", "float8_e4m3fn",
          "float8_e5m2")  # fmt: skip


def encode(command: ExecutorCommand[Any]) -> bytes:
    """The bytes of a command."""
    arrays: list[np.ndarray] = []
    header = json.dumps(_plain(command, arrays), separators=(",", ":")).encode()
    buffers = (np.ascontiguousarray(array).tobytes() for array in arrays)
    return b"".join((HEAD.pack(MAGIC, VERSION, len(header)), header, *buffers))


def decode(data: bytes) -> ExecutorCommand[Any]:
    """The command in these bytes. InputError for bytes that `encode` of this version does not
    write.
    """
    try:
        magic, version, length = HEAD.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise ValueError(f"magic {magic!r}, version {version}")
        header = json.loads(data[HEAD.size : HEAD.size + length])
        arrays = _Arrays(data, HEAD.size + length)
        command = _record(header, tuple(kind.__name__ for kind in COMMANDS), arrays)
        if arrays.offset != len(data):
            raise ValueError(f"{len(data) - arrays.offset} bytes too many")
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise InputError(
            f"{len(data)} bytes that are no command ({error})",
            f"a command as version {VERSION} of this format writes it",
            "Record the commands again with this version of enginebay.",
        ) from None
    return typing.cast("ExecutorCommand[Any]", command)


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """A value as JSON can hold it; its arrays are appended to `arrays`."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        arrays.append(np.asarray(value))
        return [value.dtype.name, *value.shape]
    if isinstance(value, Mapping):
        return {str(name): _plain(each, arrays) for name, each in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(each, arrays) for each in value]
    if dataclasses.is_dataclass(value):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value))
        return [type(value).__name__, *(_plain(each, arrays) for each in fields)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a command holds a {type(value).__name__}, which has no bytes")


@dataclasses.dataclass
class _Arrays:
    """Reads the arrays after a header, one after the other."""

    data: bytes
    offset: int

    def take(self, dtype: Any, shape: list[Any]) -> np.ndarray:
        if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"an array of {dtype!r} {shape!r}")
        kind, count = jnp.dtype(dtype), math.prod(shape)
        array = np.frombuffer(self.data, kind, count, self.offset).reshape(shape)
        self.offset += array.nbytes
        return array


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    """The types of a record's fields, in order."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _record(plain: Any, names: tuple[str, ...], arrays: _Arrays) -> Any:
    if not isinstance(plain, list) or not plain or plain[0] not in names:
        raise ValueError(f"{str(plain)[:40]!r} where one of {', '.join(names)} belongs")
    kind = RECORDS[plain[0]]
    hints = _hints(kind)
    if len(plain) != 1 + len(hints):
        raise ValueError(f"{len(plain) - 1} fields of a {plain[0]}, which has {len(hints)}")
    values = (
        _value(each, hint, arrays) for each, hint in zip(plain[1:], hints.values(), strict=True)
    )
    return kind(*values)


def _value(plain: Any, hint: Any, arrays: _Arrays) -> Any:
    """The value of a field with the type `hint`. ValueError when `plain` has another type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if plain is None and type(None) in args:
            return None
        records = tuple(kind.__name__ for kind in args if kind.__name__ in RECORDS)
        return _record(plain, records, arrays) if records else _value(plain, args[0], arrays)
    if hint is np.ndarray and isinstance(plain, list) and plain:
        return arrays.take(plain[0], plain[1:])
    if origin in (Mapping, dict) and isinstance(plain, dict):
        return {name: _value(each, args[1], arrays) for name, each in plain.items()}
    if origin is frozenset and isinstance(plain, list):
        return frozenset(_value(each, args[0], arrays) for each in plain)
    if origin is tuple and isinstance(plain, list):
        kinds = [args[0]] * len(plain) if args[-1] is ... else args
        return tuple(_value(*each, arrays) for each in zip(plain, kinds, strict=True))
    if origin is typing.Literal and plain in args:
        return plain
    if dataclasses.is_dataclass(hint):
        return _record(plain, (typing.cast("type", hint).__name__,), arrays)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(plain)
    if hint in (bool, int, float, str) and type(plain) is hint:
        return plain
    raise ValueError(f"{str(plain)[:40]!r} where {hint} belongs")
