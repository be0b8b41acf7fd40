"""Activations of an MLP, by their names in config.json."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
from jax.nn import gelu, relu, silu

Activation = Callable[[jax.Array], jax.Array]


def _squared_relu(x: jax.Array) -> jax.Array:
    return jax.numpy.square(relu(x))


_tanh_gelu = functools.partial(gelu, approximate=True)

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "gelu": functools.partial(gelu, approximate=False),
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": relu,
    "relu2": _squared_relu,
}
"""Functions from f32 [...] to f32 [...]. `gelu` is exact (x times the normal distribution
function); the other two forms of it approximate it by tanh.
"""
