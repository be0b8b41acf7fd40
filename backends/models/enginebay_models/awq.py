"""AWQ checkpoints of the version gemm, as AutoAWQ writes them.

A layer with I inputs, O outputs and groups of G inputs has `qweight` int32 [I, O / 8] and `qzeros`
int32 [I / G, O / 8], with eight outputs in a word in the order ORDER, and `scales` [I / G, O].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from enginebay.weights import QuantizedArray
from enginebay_models.packed import (
    PackedModule,
    Stored,
    num_groups,
    refused,
    unpack,
    whole_numbers,
)
from enginebay_models.quantized_tensors import QuantizedForm, QuantizedTensor, Tensors

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each number of a word, from the lowest bits up."""

GROUP_SIZES = (-1, 16, 32, 64, 128, 256)
_BITS, _IN_WORD = 4, 8


def read_awq(fields: Mapping[str, Any], stored: Stored) -> Tensors:
    """Return the tensors of a checkpoint with each AWQ layer as one QuantizedTensor."""
    whole_numbers(fields.get("bits", fields.get("w_bit")), "bits", (_BITS,))
    version = fields.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise refused("version", version, "gemm")
    size = whole_numbers(
        fields.get("group_size", fields.get("q_group_size")), "group_size", GROUP_SIZES
    )
    made: dict[str, Any] = {}
    for name, tensor in stored.items():
        prefix, _, part = name.rpartition(".")
        if part == "qweight":
            made[f"{prefix}.weight"] = _weight(PackedModule(prefix, stored, "awq"), size)
        elif part not in ("qzeros", "scales"):
            made[name] = tensor
    return made


def _weight(module: PackedModule, group_size: int) -> QuantizedTensor:
    words = module.take("qweight", ("I32",))
    if len(words.shape) != 2:
        raise module.wrong(words, f"has shape {list(words.shape)}", "[inputs, outputs / 8]")
    inputs, outputs = words.shape[0], words.shape[1] * _IN_WORD
    groups = num_groups(module, words, inputs, group_size)
    zeros = module.shaped("qzeros", ("I32",), (groups, outputs // _IN_WORD))
    scales = module.shaped("scales", ("F16", "BF16", "F32"), (groups, outputs))
    dtype = "float16" if scales.dtype == "F16" else "float32"
    form = QuantizedForm("uint4", groups, dtype, has_zero_points=True)

    def read(first: int, last: int) -> QuantizedArray:
        # whole words: the outputs of a word are not in order
        low, high = first // _IN_WORD, -(-last // _IN_WORD)
        mine = slice(first - low * _IN_WORD, last - low * _IN_WORD)

        def numbers(of: np.ndarray) -> np.ndarray:
            return unpack(np.ascontiguousarray(of[:, low:high]), _BITS, ORDER)[:, mine].T

        return QuantizedArray(
            numbers(words.numbers()).astype(form.value_dtype),
            scales.view()[:, first:last].T.astype(jnp.dtype(dtype)),
            numbers(zeros.numbers()).astype(jnp.dtype(dtype)),
            form.method,
        )

    return module.tensor((words, zeros, scales), (outputs, inputs), form, read)
