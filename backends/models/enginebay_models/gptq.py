"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them (checkpoint formats gptq and gptq_v2).

A layer with I inputs, O outputs and groups of G inputs has `qweight` int32 [I * bits / 32, O] with
consecutive inputs in a word, `qzeros` int32 [I / G, O * bits / 32] with consecutive outputs in a
word, `scales` [I / G, O], and `g_idx` int32 [I], the group of each input. In the format gptq, each
zero point is stored minus 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from enginebay.weights import QuantizedArray
from enginebay_models.fields import flag
from enginebay_models.packed import (
    WORD_BITS,
    PackedModule,
    Stored,
    num_groups,
    refused,
    unpack,
    whole_numbers,
)
from enginebay_models.quantized_tensors import QuantizedForm, QuantizedTensor, Tensors

GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)
FORMATS = ("gptq", "gptq_v2")
_WORDS, _SCALES = ("I32",), ("F16", "BF16", "F32")


@dataclasses.dataclass(frozen=True)
class GptqConfig:
    """The fields of quantization_config, checked. `is_v1`: zero points are stored minus 1."""

    bits: int
    group_size: int
    is_symmetric: bool
    is_v1: bool

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> GptqConfig:
        """Read the fields; CheckpointError, which names the field, for values not served."""
        for name in ("checkpoint_format", "format"):
            if fields.get(name) is not None and fields[name] not in FORMATS:
                raise refused(name, fields[name], " or ".join(FORMATS))
        if fields.get("dynamic"):
            raise refused("dynamic", fields["dynamic"], "absent: one form for all layers")
        form = fields.get("checkpoint_format") or fields.get("format") or "gptq"
        return cls(
            whole_numbers(fields.get("bits"), "bits", (4, 8)),
            whole_numbers(fields.get("group_size"), "group_size", GROUP_SIZES),
            flag(fields, "sym", default=True),
            form == "gptq",
        )


def read_gptq(fields: Mapping[str, Any], stored: Stored) -> Tensors:
    """Return the tensors of a checkpoint with each GPTQ layer as one QuantizedTensor."""
    config = GptqConfig.read(fields)
    made: dict[str, Any] = {}
    for name, tensor in stored.items():
        prefix, _, part = name.rpartition(".")
        if part == "qweight":
            made[f"{prefix}.weight"] = _weight(PackedModule(prefix, stored, "gptq"), config)
        elif part not in ("qzeros", "scales", "g_idx"):
            made[name] = tensor
    return made


def _weight(module: PackedModule, config: GptqConfig) -> QuantizedTensor:
    bits, in_word = config.bits, WORD_BITS // config.bits
    words = module.take("qweight", _WORDS)
    if len(words.shape) != 2 or words.shape[1] % in_word:
        allowed = f"[inputs / {in_word}, outputs], with outputs a multiple of {in_word}"
        raise module.wrong(words, f"has shape {list(words.shape)}", allowed)
    inputs, outputs = words.shape[0] * in_word, words.shape[1]
    groups = num_groups(module, words, inputs, config.group_size)
    zeros = module.shaped("qzeros", _WORDS, (groups, outputs // in_word))
    scales = module.shaped("scales", _SCALES, (groups, outputs))
    if module.has("g_idx"):
        order = module.shaped("g_idx", _WORDS, (inputs,))
        if not np.array_equal(order.numbers(), np.arange(inputs) // (inputs // groups)):
            allowed = "groups of consecutive inputs (a checkpoint made with desc_act = false)"
            raise module.wrong(order, "reorders the inputs (desc_act)", allowed)
    middle, points = 1 << (bits - 1), _zero_points(zeros.numbers(), config)
    has_points = bool((points != middle).any())
    if has_points and config.is_symmetric:
        found = int(points[points != middle][0])
        raise module.wrong(zeros, f"has a zero point of {found}", f"{middle}, because sym is true")
    form = _form(config, groups, scales.dtype, has_points=has_points)
    # uint4 keeps its numbers; the others are stored around 0
    lowest = 0 if form.method == "uint4" else middle
    dtype = jnp.dtype(form.scale_dtype)

    def read(first: int, last: int) -> QuantizedArray:
        some = np.ascontiguousarray(words.numbers()[:, first:last].T)
        values = unpack(some, bits).astype(np.int16) - lowest
        factors = scales.view()[:, first:last].T.astype(dtype)
        found = points[:, first:last].T.astype(np.int16) - lowest
        kept = found.astype(dtype) if form.has_zero_points else None
        return QuantizedArray(
            values.astype(np.int8).astype(form.value_dtype), factors, kept, form.method
        )

    return module.tensor((words, scales), (outputs, inputs), form, read)


def _zero_points(words: np.ndarray, config: GptqConfig) -> np.ndarray:
    """Return the zero points uint8 [groups, outputs]. In v1 a 1 was subtracted from each, with a
    borrow from the next for a zero point of 0; so the whole word is added to.
    """
    ones = np.uint32(sum(1 << shift for shift in range(0, WORD_BITS, config.bits)))
    whole = words.view(np.uint32) + ones if config.is_v1 else words.view(np.uint32)
    return unpack(np.ascontiguousarray(whole), config.bits)


def _form(config: GptqConfig, groups: int, dtype: str, *, has_points: bool) -> QuantizedForm:
    scale_dtype = "float16" if dtype == "F16" else "float32"
    if config.bits == 4:
        return QuantizedForm("uint4" if has_points else "int4", groups, scale_dtype, has_points)
    if groups == 1 and not has_points:
        return QuantizedForm("int8")
    return QuantizedForm("int8_group", groups, scale_dtype, has_points)
