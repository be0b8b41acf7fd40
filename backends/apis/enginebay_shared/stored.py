"""Lossless storage of trees of arrays, keys and plain values as strict JSON.

    ====================  ==================================================
    value                 in JSON
    ====================  ==================================================
    array                 {"$array": {"dtype", "shape", "base64", "host", "crc32"}}
    NumPy scalar          {"$scalar": the same fields as "$array"}
    typed PRNG key        {"$key": {"impl", "data"}}
    inf, -inf, nan        {"$float": "-inf"}
    tuple, set            {"$tuple": [...]}, {"$set": [...]}
    other mappings        {"$dict": [[key, value], ...]}
    record of an API      {its tag: its to_dict()}
    ====================  ==================================================

A mapping is stored as a JSON object when every key is a string that does not begin with "$". "host"
is true for a NumPy array and false for a device array. "crc32" is the checksum of an array's dtype,
shape and values, which reading compares.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import InputError, shown, shown_text

StoreArray = Callable[[np.ndarray], dict[str, Any]]
"""Stores an array's values; by default as base64."""

LoadArray = Callable[[Mapping[str, Any]], bytes]
"""Returns the bytes that StoreArray stored."""

ANY_OTHER = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors that malformed JSON may cause while it is read."""


def _as_base64(array: np.ndarray) -> dict[str, Any]:
    return {"base64": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}


def _from_base64(head: Mapping[str, Any]) -> bytes:
    return base64.b64decode(head["base64"], validate=True)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Stores the trees of one API. `what` names them in errors; `records` are the API's classes by
    tag.
    """

    what: str
    records: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_plain(self, value: Any, keep: StoreArray = _as_base64) -> Any:
        """Return `value` as values for JSON. InputError for an unsupported type."""

        def each(values: Any) -> list[Any]:
            return [self.to_plain(one, keep) for one in values]

        match value:
            case None | bool() | int() | str() if type(value) in (type(None), bool, int, str):
                return value
            case float() if type(value) is float:
                return value if math.isfinite(value) else {"$float": repr(value)}
            case jax.Array() if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                data = self.to_plain(np.asarray(jax.random.key_data(value)), keep)
                return {"$key": {"impl": str(jax.random.key_impl(value)), "data": data}}
            case jax.Array() | np.ndarray() | np.generic():
                return self._array_to_plain(value, keep)
            case tuple() if type(value) is tuple:  # a named tuple would lose its names
                return {"$tuple": each(value)}
            case set() | frozenset():
                return {"$set": each(sorted(value))}
            case list():
                return each(value)
            case Mapping():
                if all(isinstance(key, str) and not key.startswith("$") for key in value):
                    return dict(zip(value, each(value.values()), strict=True))
                return {"$dict": [each(pair) for pair in value.items()]}
        for tag, kind in self.records.items():
            if isinstance(value, kind):
                return {tag: value.to_dict()}
        raise InputError(
            f"a value of type {type(value).__name__} in {self.what} to be stored",
            "arrays, keys, numbers, strings, and lists, tuples, sets and mappings of these",
            f"Remove it, or store it separately from {self.what}.",
        )

    def from_plain(self, plain: Any, load: LoadArray = _from_base64) -> Any:
        """Return the value that to_plain() stored. InputError for other data."""
        if isinstance(plain, list):
            return [self.from_plain(one, load) for one in plain]
        if not isinstance(plain, Mapping):
            return plain
        tag = next(iter(plain), "")
        if not tag.startswith("$"):
            return {key: self.from_plain(one, load) for key, one in plain.items()}
        try:
            return self._read(tag, plain[tag], load)
        except InputError:
            raise
        except ANY_OTHER as error:
            raise InputError(
                f"a stored {shown(tag)} that cannot be read ({shown_text(str(error))})",
                f"{self.what} as stored, unchanged",
                f"Store {self.what} again.",
            ) from error

    def _read(self, tag: str, content: Any, load: LoadArray) -> Any:
        match tag:
            case "$array":
                return _read_array(content, load)
            case "$scalar":
                return _read_array(content, load)[()]
            case "$key":
                data = jnp.asarray(self.from_plain(content["data"], load))
                return jax.random.wrap_key_data(data, impl=content["impl"])
            case "$float":
                return float(content)
            case "$tuple":
                return tuple(self.from_plain(one, load) for one in content)
            case "$set":
                return {self.from_plain(one, load) for one in content}
            case "$dict":
                return {self.from_plain(k, load): self.from_plain(v, load) for k, v in content}
        return self.records[tag].from_dict(content)

    def _array_to_plain(self, value: Any, keep: StoreArray) -> dict[str, Any]:
        """InputError for a dtype without a portable name: objects, strings, records, or another
        byte order.
        """
        array = np.asarray(value)
        dtype = array.dtype
        try:
            same = not dtype.hasobject and jnp.dtype(dtype.name) == dtype
        except TypeError:
            same = False
        if not same:
            raise InputError(
                f"an array of dtype {dtype.str!r} in {self.what} to be stored",
                "numbers, booleans and dates in this machine's byte order",
                f"Convert it, or store it separately from {self.what}.",
            )
        is_host = not isinstance(value, jax.Array)
        head = {"dtype": dtype.name, "shape": list(array.shape), "host": is_host}
        head["crc32"] = checksum(head, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return {"$scalar" if isinstance(value, np.generic) else "$array": head | keep(array)}


def checksum(head: Mapping[str, Any], values: bytes | np.ndarray) -> int:
    """Return the CRC-32 of an array's dtype, shape and values. It detects damage at more than 1
    GB/s.
    """
    return zlib.crc32(values, zlib.crc32(f"{head['dtype']} {head['shape']}".encode()))


def _read_array(head: Mapping[str, Any], load: LoadArray) -> Any:
    values = load(head)
    if "crc32" not in head:
        given = "a stored array without a checksum, written by an older version"
        raise InputError(given, "arrays with a crc32", "Store the state with this version.")
    if checksum(head, values) != head["crc32"]:
        given = "a damaged array, whose values do not match their checksum"
        raise InputError(given, "unchanged values", "Use another copy, or store the array again.")
    array = np.frombuffer(values, jnp.dtype(head["dtype"])).reshape(head["shape"])
    return array.copy() if head["host"] else jnp.asarray(array)
