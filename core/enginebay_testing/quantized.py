"""Quantised weights for checks of kernels: random numbers of every form, and rounded inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from enginebay.ops.activations import GROUP_SIZE, INT8_GROUP
from enginebay.weights import FLOAT, QuantizedArray

FORMS: Mapping[str, str] = {
    "int8": "int8",
    "int8_group": "int8",
    "int4": "int4",
    "uint4": "uint4",
    "fp8": "float8_e4m3fn",
}
"""Method of the built-in forms of weights -> dtype of the values; docs/quantization.md."""

NUMBERS = ("plain", "scales_apart", "one_sign", "zeros")
"""Kinds of numbers of random weights."""

ROUNDINGS = ("int8", "int8_group")
"""Roundings of inputs that kernels may do."""

STORAGES = ("int8", "uint4", "fp8")
"""Storages of quantised caches."""

ONE_SCALE = ("int8", "fp8")
"""Methods with one f32 scale for each output."""

LARGEST = 127
"""Largest rounded input; rounding is symmetric around 0."""


def random_weight(
    method: str,
    shape: tuple[int, ...],
    num_inputs: int,
    groups: int,
    *,
    activations: str = FLOAT,
    scale_dtype: str = "float32",
    seed: int = 0,
    numbers: str = "plain",
) -> QuantizedArray:
    """Return a weight of random numbers, as NumPy arrays. Numbers of every size occur, with both
    ends of the range of a method. `groups` and `scale_dtype` are for methods with groups.

    `numbers` is one of NUMBERS: "scales_apart": scales that differ by 1e4; "one_sign": no number is
    negative; "zeros": the numbers of every second output are 0, and every third scale is 0.
    """
    rng = np.random.default_rng([seed, 11, *shape])
    low, high = {"uint4": (0, 15), "int4": (-8, 7)}.get(method, (-128, 127))
    values = rng.integers(low, high + 1, shape)
    if method == "fp8":
        spread = rng.normal(size=shape) * np.exp2(rng.integers(-6, 6, shape))
        values = spread.clip(-448, 448)
    outputs = shape[: len(shape) - num_inputs]
    if method in ONE_SCALE:
        groups, scale_dtype = 1, "float32"
    dtype = jnp.dtype(scale_dtype)
    scales = (rng.uniform(0.25, 1, (*outputs, groups)) / (high - low)).astype(dtype)
    points = None
    if method in ("uint4", "int8_group"):
        points = rng.uniform(low, high, scales.shape).astype(dtype)
    if numbers == "scales_apart":
        scales = (scales * 10.0 ** rng.uniform(-2, 2, scales.shape)).astype(dtype)
    elif numbers == "one_sign":
        values = np.abs(values) if points is None else values
        values = values.clip(None, high) if method != "fp8" else values
        points = None if points is None else np.full_like(points, low)
    elif numbers == "zeros" and scales.size:
        flat = values.reshape(-1, math.prod(shape[len(outputs) :]))
        flat[::2] = 0 if points is None else high
        if points is not None:
            points.reshape(len(flat), -1)[::2] = high
        scales.reshape(-1)[::3] = 0
    return QuantizedArray(
        values.astype(jnp.dtype(FORMS[method])), scales, points, method, activations
    )


def rounded_inputs(x: np.ndarray, activations: str) -> np.ndarray:
    """Return x [T, ...] with each row, or each group of a row, rounded to int8 numbers times one
    f32 scale, f64; see `QuantizedArray.activations`.
    """
    flat = x.astype(np.float32).reshape(x.shape[0], math.prod(x.shape[1:]))
    scales = input_scales(flat, activations)
    whole = np.rint(flat / np.where(scales > 0, scales, np.float32(1))).clip(-LARGEST, LARGEST)
    return (whole.astype(np.float64) * scales).reshape(x.shape)


def input_scales(flat: np.ndarray, activations: str) -> np.ndarray:
    """Return the scale of each of the inputs [T, inputs], in their dtype: [T, 1] or [T, inputs]."""
    if activations != INT8_GROUP:
        return np.asarray(np.abs(flat).max(axis=1, keepdims=True, initial=0) / LARGEST, flat.dtype)
    number = flat.shape[1]
    padded = np.pad(np.abs(flat), ((0, 0), (0, -number % GROUP_SIZE)))
    groups = padded.reshape(len(flat), padded.shape[1] // GROUP_SIZE, GROUP_SIZE)
    largest = groups.max(axis=2, initial=0)
    scales = np.asarray(largest / LARGEST, flat.dtype)
    return scales.repeat(GROUP_SIZE, axis=1)[:, :number]
