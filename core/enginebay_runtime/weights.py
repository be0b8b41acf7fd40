"""merge_weights: replaces weights of a model by path, keeping shapes and shardings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from enginebay.contracts.model import Weights
from enginebay.errors import InputError
from enginebay.weights import QuantizedArray, Weight


def merge_weights(base: Weights, *changes: Any) -> Weights:
    """`base` with the values of `changes`: mappings from dotted paths, or nested mappings (an
    nnx.State).

    The new values get the shardings of `base`. InputError for a weight that the model does not
    have, or of another shape or dtype, because the compiled programs accept only these.
    """
    own = flat_weights(base)
    named = dict(leaf for change in changes if change is not None for leaf in _flatten(change))
    for path, value in named.items():
        if path not in own and path not in base:
            raise InputError(
                f"weight {path!r}",
                f"the model's own: {', '.join(sorted(own)[:3])}, ...",
                "Rename or remove this weight.",
            )
        if not isinstance(value, jax.Array | np.ndarray):
            raise InputError(
                f"weight {path!r} of type {type(value).__name__}",
                "an array",
                "Convert it to an array.",
            )
        given, allowed = _describe(value), _describe(own.get(path, base.get(path)))
        if given != allowed:
            raise InputError(
                f"weight {path!r} as {given}", allowed, "Convert it to this shape and dtype."
            )
    placed = {path: _place(value, own[path]) for path, value in named.items()}
    if not placed:
        return base
    return {path: _changed(path, weight, placed) for path, weight in base.items()}


def flat_weights(weights: Weights) -> dict[str, jax.Array]:
    """Every array by its path. A quantised weight has "PATH.values", "PATH.scales" and, if it has
    zero points, "PATH.zero_points".
    """
    return {
        name: array for path, weight in weights.items() for name, array in _arrays(path, weight)
    }


def _arrays(path: str, weight: Any) -> list[tuple[str, Any]]:
    if not isinstance(weight, QuantizedArray):
        return [(path, weight)]
    names = ("values", "scales", "zero_points")
    found = [(f"{path}.{name}", getattr(weight, name)) for name in names]
    return [(name, array) for name, array in found if array is not None]


def _changed(path: str, weight: Weight, placed: Mapping[str, jax.Array]) -> Weight:
    """A weight with its arrays from `placed`; the same object when none is in it."""
    if not isinstance(weight, QuantizedArray):
        return placed.get(path, weight)
    mine: dict[str, Any] = {
        name.rpartition(".")[2]: placed[name] for name, _ in _arrays(path, weight) if name in placed
    }
    return dataclasses.replace(weight, **mine) if mine else weight


def _describe(weight: Any) -> str:
    if not isinstance(weight, QuantizedArray):
        return f"{weight.dtype}{list(weight.shape)}"
    return f"a QuantizedArray by {weight.method} of {list(weight.shape)}"


def _place(value: Any, like: jax.Array) -> jax.Array:
    if isinstance(value, jax.Array) and value.sharding == like.sharding:
        return value
    return jax.device_put(value, like.sharding)


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    from flax import nnx

    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    if isinstance(tree, Mapping):
        return [
            leaf
            for key, value in tree.items()
            for leaf in _flatten(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return _arrays(prefix, tree)
