"""Trees of arrays, keys and plain values as strict JSON, and back, without losing anything.

    ====================  ==================================================
    value                 in JSON
    ====================  ==================================================
    array                 {"$array": {"dtype", "shape", "base64", "host", "crc32"}}
    NumPy scalar          {"$scalar": what "$array" holds}
    typed PRNG key        {"$key": {"impl", "data"}}
    inf, -inf, nan        {"$float": "-inf"}
    tuple                 {"$tuple": [...]}
    other mappings        {"$dict": [[key, value], ...]}
    precompile config     {"$precompile": {...}}
    ====================  ==================================================

A mapping whose keys are texts without a leading "$" is itself. "host" tells a NumPy array from one
on the device. "crc32" is the checksum of an array's dtype, shape and values, which is compared when
the array is read.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import InputError, explain, shown, shown_text
from enginebay_vinference.precompile import vInferencePreCompileConfig

StoreArray = Callable[[np.ndarray], dict[str, Any]]
"""What is written for an array's values; base64 by default."""

LoadArray = Callable[[Mapping[str, Any]], bytes]
"""The bytes of what StoreArray wrote."""


def to_plain(value: Any, store: StoreArray | None = None) -> Any:
    """`value` as JSON can hold it. InputError for a type that is none of the above."""
    keep = store or _as_base64
    match value:
        case None | bool() | int() | str() if type(value) in (type(None), bool, int, str):
            return value
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        case jax.Array() if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = to_plain(np.asarray(jax.random.key_data(value)), keep)
            return {"$key": {"impl": str(jax.random.key_impl(value)), "data": data}}
        case jax.Array() | np.ndarray() | np.generic():
            array = np.asarray(value)
            _check_dtype(array.dtype)
            head = {
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "host": not isinstance(value, jax.Array),
            }
            head["crc32"] = checksum(head, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            return {"$scalar" if isinstance(value, np.generic) else "$array": head | keep(array)}
        case vInferencePreCompileConfig():
            return {"$precompile": value.to_dict()}
        case tuple() if type(value) is tuple:  # one with names would come back without them
            return {"$tuple": [to_plain(v, keep) for v in value]}
        case list():
            return [to_plain(v, keep) for v in value]
        case Mapping():
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: to_plain(v, keep) for key, v in value.items()}
            return {"$dict": [[to_plain(k, keep), to_plain(v, keep)] for k, v in value.items()]}
    raise InputError(
        explain(
            f"a {type(value).__name__} in a state to be stored",
            "arrays, keys, numbers, texts, and lists, tuples and mappings of them",
            "Take it out, or store it beside the state.",
        )
    )


def from_plain(plain: Any, load: LoadArray | None = None) -> Any:
    """What to_plain() was called on. InputError for what it cannot have written."""
    read = load or _from_base64
    if isinstance(plain, list):
        return [from_plain(v, read) for v in plain]
    if not isinstance(plain, Mapping):
        return plain
    tag = next(iter(plain), "")
    if not tag.startswith("$"):
        return {key: from_plain(v, read) for key, v in plain.items()}
    content = plain[tag]
    try:
        return _READERS[tag](content, read)
    except InputError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise InputError(
            explain(
                f"a stored {shown(tag)} that cannot be read ({shown_text(str(error))})",
                "what a state was stored as",
                "Store it again.",
            )
        ) from error


def _check_dtype(dtype: np.dtype[Any]) -> None:
    """InputError for a dtype that its name does not give back: objects, texts, records, another
    byte order.
    """
    try:
        same = not dtype.hasobject and jnp.dtype(dtype.name) == dtype
    except TypeError:
        same = False
    if not same:
        raise InputError(
            explain(
                f"an array of dtype {dtype.str!r} in a state to be stored",
                "numbers, booleans and dates in this machine's byte order",
                "Convert it, or store it beside the state.",
            )
        )


def _as_base64(array: np.ndarray) -> dict[str, Any]:
    return {"base64": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}


def _from_base64(head: Mapping[str, Any]) -> bytes:
    return base64.b64decode(head["base64"], validate=True)


def checksum(head: Mapping[str, Any], values: bytes | np.ndarray) -> int:
    """CRC-32 of an array's dtype, shape and values: it finds damage, at a speed of more than a
    gigabyte a second.
    """
    return zlib.crc32(values, zlib.crc32(f"{head['dtype']} {head['shape']}".encode()))


def _read_array(head: Mapping[str, Any], load: LoadArray) -> Any:
    values = load(head)
    if "crc32" not in head:
        given = "a stored array without a checksum, as older versions wrote it"
        raise InputError(
            explain(given, "arrays with a crc32", "Store the state with this version.")
        )
    if checksum(head, values) != head["crc32"]:
        given = "a stored array whose checksum is not that of its values: it was damaged"
        raise InputError(
            explain(given, "values as they were stored", "Use another copy, or store it again.")
        )
    array = np.frombuffer(values, jnp.dtype(head["dtype"])).reshape(head["shape"])
    return array.copy() if head["host"] else jnp.asarray(array)


def _read_key(content: Mapping[str, Any], load: LoadArray) -> jax.Array:
    return jax.random.wrap_key_data(
        jnp.asarray(from_plain(content["data"], load)), impl=content["impl"]
    )


_READERS: dict[str, Callable[[Any, LoadArray], Any]] = {
    "$array": _read_array,
    "$scalar": lambda head, load: _read_array(head, load)[()],
    "$key": _read_key,
    "$float": lambda text, _: float(text),
    "$tuple": lambda values, load: tuple(from_plain(v, load) for v in values),
    "$dict": lambda pairs, load: {from_plain(k, load): from_plain(v, load) for k, v in pairs},
    "$precompile": lambda fields, _: vInferencePreCompileConfig.from_dict(fields),
}
