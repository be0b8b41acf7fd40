"""Checkpoints in the format of compressed-tensors: pack-quantized, int-quantized, float-quantized.

A layer with I inputs and O outputs has `weight_scale` [O, groups], or [1] or [1, 1] for the whole
tensor, and:

 - pack-quantized: `weight_packed` int32 [O, I * bits / 32] with consecutive inputs in a word, each
   number stored with 2 ** (bits - 1) added; `weight_shape` [2]; for asymmetric numbers
   `weight_zero_point` int32 [O * bits / 32, groups], with consecutive outputs in a word;
 - int-quantized: `weight` int8 [O, I], and `weight_zero_point` int8 for asymmetric numbers;
 - float-quantized: `weight` float8_e4m3fn [O, I].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from enginebay.weights import FLOAT, QuantizedArray
from enginebay_models.packed import WORD_BITS, PackedModule, Stored, refused, unpack
from enginebay_models.quantized_tensors import QuantizedForm, QuantizedTensor, Tensors
from enginebay_models.safetensors_file import StoredTensor

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_SCALES = ("BF16", "F16", "F32")
_INTEGER, _FP8 = "I8", "F8_E4M3"
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
          "input_scale", "input_zero_point")  # fmt: skip


def read_compressed_tensors(fields: Mapping[str, Any], stored: Stored) -> Tensors:
    """Return the tensors of a checkpoint with each quantised layer as one QuantizedTensor."""
    activations = _activations(fields)
    made: dict[str, Any] = {}
    for name, tensor in stored.items():
        prefix, _, part = name.rpartition(".")
        module = PackedModule(prefix, stored, "compressed-tensors")
        if part == "weight_packed":
            made[f"{prefix}.weight"] = _packed(module, activations)
        elif part == "weight" and tensor.dtype in (_INTEGER, _FP8):
            made[name] = _unpacked(module, activations)
        elif part not in _PARTS:
            made[name] = tensor
    return made


def _activations(fields: Mapping[str, Any]) -> str:
    """Check the groups of layers, and return how the inputs of their products are rounded."""
    whole = fields.get("format")
    if whole not in FORMATS:
        raise refused("format", whole, ", ".join(FORMATS))
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise refused("config_groups", groups, "an object with a group of layers at least")
    found = set()
    for name, group in groups.items():
        path = f"config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise refused(path, group, "an object with `weights`")
        if group.get("format") is not None and group["format"] not in FORMATS:
            raise refused(f"{path}.format", group["format"], ", ".join(FORMATS))
        if group["weights"].get("strategy") not in ("tensor", "channel", "group"):
            allowed = "tensor, channel, group"
            raise refused(f"{path}.weights.strategy", group["weights"].get("strategy"), allowed)
        found.add(_inputs(group.get("input_activations"), path))
    if len(found) > 1:
        raise refused("config_groups", groups, "one rounding of activations for all groups")
    return found.pop()


def _inputs(activations: object, path: str) -> str:
    """Return the rounding of inputs that a group of layers asks for. fp8 activations stay floats:
    a product with them unrounded is more exact.
    """
    if activations is None:
        return FLOAT
    where, allowed = (
        f"{path}.input_activations",
        "absent, fp8, or dynamic int8 with a scale a token",
    )
    if not isinstance(activations, Mapping) or activations.get("num_bits") != 8:
        raise refused(where, activations, allowed)
    if activations.get("type") == "float":
        return FLOAT
    is_dynamic = activations.get("dynamic") is True and activations.get("strategy") == "token"
    if activations.get("type") != "int" or not is_dynamic or activations.get("symmetric") is False:
        raise refused(where, activations, allowed)
    return "int8"


@dataclasses.dataclass(frozen=True)
class _Factors:
    """The scales of a layer [outputs or 1, groups] and its zero points of the same shape."""

    scales: np.ndarray
    points: np.ndarray | None
    dtype: Any

    def rows(self, first: int, last: int, outputs: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return scales and zero points of some outputs, in the dtype of the scales."""

        def some(of: np.ndarray) -> np.ndarray:
            return np.broadcast_to(of, (outputs, of.shape[1]))[first:last].astype(self.dtype)

        return some(self.scales), None if self.points is None else some(self.points)


def _packed(module: PackedModule, activations: str) -> QuantizedTensor:
    words = module.take("weight_packed", ("I32",))
    outputs, inputs = _shape(module, words)
    bits = WORD_BITS * words.shape[1] // inputs
    if bits not in (4, 8) or WORD_BITS * words.shape[1] != inputs * bits:
        raise module.wrong(words, f"has shape {list(words.shape)}", "4 or 8 bits of each input")
    scales = _scales(module, outputs, inputs)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    points = None
    lowest = 1 << (bits - 1)
    if module.has("weight_zero_point"):
        shape = (outputs * bits // WORD_BITS, groups)
        found = module.shaped("weight_zero_point", ("I32",), shape).numbers()
        points = unpack(np.ascontiguousarray(found.T), bits).T.astype(np.int16) - lowest
    has_points = points is not None
    if bits == 8:
        method = "int8" if groups == 1 and not has_points else "int8_group"
    else:
        method = "uint4" if has_points else "int4"
    scale_dtype = "float16" if scales.dtype == "F16" and method != "int8" else "float32"
    form = QuantizedForm(method, groups, scale_dtype, has_points, activations)
    if method == "uint4":
        points, lowest = points + lowest, 0
    factors = _Factors(scales.view().reshape(-1, groups), points, jnp.dtype(scale_dtype))

    def read(first: int, last: int) -> QuantizedArray:
        values = unpack(words.numbers()[first:last], bits).astype(np.int16) - lowest
        values = values.astype(np.int8).astype(form.value_dtype)
        return QuantizedArray(values, *factors.rows(first, last, outputs), method, activations)

    return module.tensor((words, scales), (outputs, inputs), form, read)


def _unpacked(module: PackedModule, activations: str) -> QuantizedTensor:
    weight = module.take("weight", (_INTEGER, _FP8))
    if len(weight.shape) != 2:
        raise module.wrong(weight, f"has shape {list(weight.shape)}", "[outputs, inputs]")
    outputs, inputs = weight.shape
    scales = _scales(module, outputs, inputs)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    points = None
    if weight.dtype == _INTEGER and module.has("weight_zero_point"):
        found = module.shaped("weight_zero_point", (_INTEGER,), scales.shape).numbers()
        points = found.reshape(-1, groups) if found.any() else None
    if weight.dtype == _FP8 and groups > 1:
        raise module.wrong(scales, f"has {groups} scales for an output", "one")
    method = "fp8" if weight.dtype == _FP8 else "int8"
    if method == "int8" and (groups > 1 or points is not None):
        method = "int8_group"
    form = QuantizedForm(method, groups, "float32", points is not None, activations)
    factors = _Factors(scales.view().reshape(-1, groups), points, np.dtype(np.float32))

    def read(first: int, last: int) -> QuantizedArray:
        values = weight.numbers()[first:last]
        return QuantizedArray(values, *factors.rows(first, last, outputs), method, activations)

    return module.tensor((weight, scales), (outputs, inputs), form, read)


def _shape(module: PackedModule, words: StoredTensor) -> tuple[int, int]:
    """Return the shape of a packed weight, after its tensors are checked."""
    found = module.shaped("weight_shape", ("I64", "I32"), (2,))
    outputs, inputs = (int(size) for size in found.numbers())
    if len(words.shape) != 2 or words.shape[0] != outputs or inputs < 1:
        allowed = f"the packed numbers of weight_shape {[outputs, inputs]}"
        raise module.wrong(words, f"has shape {list(words.shape)}", allowed)
    if module.has("weight_g_idx"):
        order = module.take("weight_g_idx", ("I32", "I64"))
        if (np.diff(order.numbers()) < 0).any() or (order.numbers() < 0).any():
            raise module.wrong(order, "reorders the inputs (actorder)", "consecutive groups")
    return outputs, inputs


def _scales(module: PackedModule, outputs: int, inputs: int) -> StoredTensor:
    """Return the scales of a layer, after their shape is checked."""
    scales = module.take("weight_scale", _SCALES)
    groups = scales.shape[-1] if len(scales.shape) == 2 else 1
    fits = scales.shape in ((), (1,), (1, 1), (outputs, groups), (outputs,))
    if not fits or inputs % max(1, groups):
        allowed = f"[{outputs}, groups] with groups that divide {inputs} inputs"
        raise module.wrong(scales, f"has shape {list(scales.shape)}", allowed)
    return scales
