"""Writes quantised checkpoints by the layouts of GPTQ, AWQ and compressed-tensors. The numbers are
packed here one by one, independently of the code that reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.unit.checkpoints import CONFIG, Tensors, model_of, random_tensors, write

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(numbers: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Words int32 of consecutive numbers of the last axis; `order`: the number at each place."""
    in_word = 32 // bits
    words = numbers.reshape(*numbers.shape[:-1], -1, in_word).astype(np.uint64)
    out = np.zeros(words.shape[:-1], np.uint64)
    for place in range(in_word):
        number = order[place] if order else place
        out |= words[..., number] << np.uint64(place * bits)
    return out.astype(np.uint32).view(np.int32)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's numbers [outputs, inputs] from 0 up, scales and zero points [outputs, groups]."""

    numbers: np.ndarray
    scales: np.ndarray
    points: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """The weight that they stand for, f32."""
        groups = self.numbers.reshape(*self.scales.shape, -1).astype(np.float32)
        shifted = groups - self.points[..., None].astype(np.float32)
        return np.asarray(
            (shifted * self.scales[..., None].astype(np.float32)).reshape(self.numbers.shape)
        )


def layer_of(
    shape: tuple[int, int], bits: int, groups: int, *, is_symmetric: bool, dtype: str, seed: int
) -> Layer:
    """Random numbers of a layer. Asymmetric zero points include 0 and the largest number."""
    rng, most = np.random.default_rng(seed), (1 << bits) - 1
    scales = rng.uniform(0.2, 1, (shape[0], groups)) / (most * np.sqrt(shape[1]))
    points = np.full(scales.shape, (most + 1) // 2)
    if not is_symmetric:
        points = rng.integers(1, most + 1, scales.shape)
    numbers = rng.integers(0, most + 1, shape)
    return Layer(numbers, scales.astype(jnp.dtype(dtype)), points)


def gptq(layer: Layer, bits: int, *, is_v1: bool = True) -> Tensors:
    """The tensors of a GPTQ layer."""
    inputs, groups = layer.numbers.shape[1], layer.scales.shape[1]
    return {
        "qweight": np.ascontiguousarray(pack(layer.numbers, bits).T),
        "qzeros": pack(layer.points.T - int(is_v1), bits),
        "scales": np.ascontiguousarray(layer.scales.T),
        "g_idx": (np.arange(inputs) // (inputs // groups)).astype(np.int32),
    }


def awq(layer: Layer) -> Tensors:
    """The tensors of an AWQ layer of the version gemm."""
    return {
        "qweight": pack(np.ascontiguousarray(layer.numbers.T), 4, AWQ_ORDER),
        "qzeros": pack(np.ascontiguousarray(layer.points.T), 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(layer.scales.T),
    }


def packed(layer: Layer, bits: int, *, is_symmetric: bool) -> Tensors:
    """The tensors of a pack-quantized layer of compressed-tensors."""
    made = {
        "weight_packed": pack(layer.numbers, bits),
        "weight_shape": np.array(layer.numbers.shape, np.int64),
        "weight_scale": layer.scales,
    }
    if not is_symmetric:
        points = pack(np.ascontiguousarray(layer.points.T), bits)
        made["weight_zero_point"] = np.ascontiguousarray(points.T)
    return made


def int_quantized(layer: Layer) -> Tensors:
    """The tensors of an int-quantized layer of compressed-tensors: 8 bits, symmetric."""
    return {"weight": (layer.numbers - 128).astype(np.int8), "weight_scale": layer.scales}


def write_quantized(
    folder: Path,
    fields: Mapping[str, Any],
    make: Callable[[Layer], Tensors],
    layers: Callable[[tuple[int, int], int], Layer],
    *,
    tied: bool = False,
    **more: Any,
) -> tuple[Path, Path]:
    """Write a checkpoint whose linear layers are quantised, and one with their plain weights.

    `layers(shape, seed)` makes the numbers of a layer, and `make` its tensors.
    """
    config = CONFIG | SIZES | {"tie_word_embeddings": tied} | more
    plain, quantized = random_tensors(model_of(**SIZES, tie_word_embeddings=tied)), {}
    for seed, (name, tensor) in enumerate(list(plain.items())):
        prefix = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            quantized[name] = tensor
            continue
        layer = layers((tensor.shape[0], tensor.shape[1]), seed)
        plain[name] = layer.weight
        quantized |= {f"{prefix}.{part}": array for part, array in make(layer).items()}
    own = config | {"quantization_config": dict(fields)}
    return write(folder / "quantized", quantized, **own), write(folder / "plain", plain, **config)
