"""Arrays and nested plain values as strict JSON, and back, without losing anything.

    ====================  ====================================================
    value                 in JSON
    ====================  ====================================================
    array                 {"$array": {"dtype", "shape", "base64", "host"}}
    inf, -inf, nan        {"$float": "-inf"}
    tuple, set            {"$tuple": [...]}, {"$set": [...]}
    mapping               {"$dict": [[key, value], ...]}
    ====================  ====================================================

The rest is itself. "host" tells a NumPy array from one on the device.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.errors import InputError, explain


def to_stored(value: Any) -> Any:
    """`value` as JSON can hold it. InputError for a type that is none of the above."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
        case jax.Array() | np.ndarray() | np.generic():
            return {"$array": _store_array(value)}
        case list():
            return [to_stored(v) for v in value]
        case tuple():
            return {"$tuple": [to_stored(v) for v in value]}
        case set() | frozenset():
            return {"$set": [to_stored(v) for v in sorted(value)]}
        case Mapping():
            return {"$dict": [[to_stored(k), to_stored(v)] for k, v in value.items()]}
    raise InputError(
        explain(
            f"a value of type {type(value).__name__} to store",
            "arrays, numbers, texts, and lists, tuples, sets and mappings of them",
            "Take it out.",
        )
    )


def from_stored(stored: Any) -> Any:
    """What to_stored() was called on. InputError for what it cannot have written."""
    if isinstance(stored, list):
        return [from_stored(v) for v in stored]
    if not isinstance(stored, Mapping):
        return stored
    try:
        ((tag, content),) = stored.items()
        return _READERS[tag](content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        given = f"a stored value that cannot be read ({type(error).__name__}: {error})"
        raise InputError(
            explain(given, "what was stored by this release", "Store it again.")
        ) from error


def _store_array(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        "base64": base64.b64encode(array.tobytes()).decode(),
        "host": not isinstance(value, jax.Array),
    }


def _load_array(head: Mapping[str, Any]) -> Any:
    data = base64.b64decode(head["base64"], validate=True)
    array = np.frombuffer(data, jnp.dtype(head["dtype"])).reshape(head["shape"]).copy()
    return array if head["host"] else jnp.asarray(array)


_READERS: dict[str, Callable[[Any], Any]] = {
    "$array": _load_array,
    "$float": float,
    "$tuple": lambda values: tuple(from_stored(v) for v in values),
    "$set": lambda values: {from_stored(v) for v in values},
    "$dict": lambda pairs: {from_stored(k): from_stored(v) for k, v in pairs},
}
