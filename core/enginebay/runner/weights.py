"""Other values for a model's weights, by path, where the compiled programs can take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from enginebay.errors import InputError, explain
from enginebay.model import Weights


def merge_weights(base: Weights, *changes: Any) -> Weights:
    """`base` with other values for the weights that `changes` name: dotted paths, or nested
    mappings (an nnx.State).

    They are laid out on the devices as those of `base`. InputError for a weight that the model does
    not have, or of another shape or dtype: the compiled programs fit only these.
    """
    named = {
        path: value for change in changes if change is not None for path, value in _flatten(change)
    }
    for path, value in named.items():
        if path not in base:
            raise InputError(
                explain(
                    f"weight {path!r}",
                    f"the model's own: {', '.join(sorted(base)[:3])}, ...",
                    "Correct it.",
                )
            )
        if not isinstance(value, jax.Array | np.ndarray):
            raise InputError(
                explain(
                    f"weight {path!r} of type {type(value).__name__}",
                    "an array",
                    "Convert it first.",
                )
            )
        if value.shape != base[path].shape or value.dtype != base[path].dtype:
            raise InputError(
                explain(
                    f"weight {path!r} as {value.dtype}{list(value.shape)}",
                    f"{base[path].dtype}{list(base[path].shape)}",
                    "Convert it first.",
                )
            )
    placed = {path: _place(value, base[path]) for path, value in named.items()}
    return {**base, **placed} if placed else base


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
    return [(prefix, tree)]
