"""Names the tensors of a GGUF file as the models do, and makes them readable: plain ones as those
of safetensors, quantised ones row by row.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from enginebay.contracts.model import Model
from enginebay.errors import CheckpointError, shown
from enginebay.weights import QuantizedArray
from enginebay_models.gguf.architectures import ARCHITECTURES
from enginebay_models.gguf.block_types import BLOCK_TYPES, BlockType
from enginebay_models.gguf.config import EMBEDDING_TENSOR, HEAD_TENSOR
from enginebay_models.gguf.header import GgufFile, GgufTensorInfo, tensor_bytes
from enginebay_models.gguf.rope_rules import LONG_DIVISORS, ROPE_DIVISORS, SHORT_DIVISORS
from enginebay_models.quantized_tensors import QuantizedForm, QuantizedTensor, Tensors
from enginebay_models.safetensors_file import StoredTensor
from enginebay_models.tensors import EMBEDDING, HEAD

_WHOLE = {
    EMBEDDING_TENSOR: EMBEDDING,
    HEAD_TENSOR: HEAD,
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_MODEL_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_MODEL_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")
"""One tensor of a file has the weights of all experts of a layer, which models have one by one."""
_METHODS = {"int4": "int4", "uint4": "uint4", "int8": "int8_group"}
"""Dtype of the values of a block type -> the method that stores them."""
_DECODED_AT_ONCE = 1 << 17
# Values that are decoded at once: their temporary arrays stay in a processor's cache.
_VALUE_DTYPES: Mapping[str, Any] = {
    "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4, "int8": np.int8,
}  # fmt: skip


def model_name(name: str, architecture: str) -> str:
    """Return the name that models have for a tensor; an unknown name is returned unchanged."""
    parts, beginnings = ARCHITECTURES[architecture].parts, ARCHITECTURES[architecture].beginnings
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in parts:
        return _begun(_WHOLE.get(name, name), beginnings)
    return _begun(f"model.layers.{int(found[1])}.{parts[found[2]]}.{found[3]}", beginnings)


def _begun(name: str, beginnings: Mapping[str, str]) -> str:
    """Return a name with another beginning, if it has one of these."""
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def file_name(name: str, architecture: str) -> str:
    """Return the name that files have for a tensor of a model."""
    of_model = {own: usual for usual, own in ARCHITECTURES[architecture].parts.items()}
    name = _begun(name, {new: old for old, new in ARCHITECTURES[architecture].beginnings.items()})
    if (expert := _MODEL_EXPERT.fullmatch(name)) is not None:
        return f"blk.{expert[1]}.ffn_{expert[2]}_exps.weight"
    found = _MODEL_LAYER.fullmatch(name)
    if found is None or found[2] not in of_model:
        return {own: usual for usual, own in _WHOLE.items()}.get(name, name)
    return f"blk.{found[1]}.{of_model[found[2]]}.{found[3]}"


def open_tensors(file: GgufFile, config: Mapping[str, Any]) -> Tensors:
    """Return the tensors of a file by the names that models have for them."""
    return {
        name: _opened(info, config)
        for stored in file.tensors.values()
        if stored.name not in (ROPE_DIVISORS, LONG_DIVISORS, SHORT_DIVISORS)
        for name, info in _named(stored, config["model_type"])
    }


def _named(info: GgufTensorInfo, architecture: str) -> Iterator[tuple[str, GgufTensorInfo]]:
    """Yield the names that models have for a tensor, and for its parts if each expert has one. The
    gate of shared experts is one row, also where a file has it as a vector.
    """
    if info.name.endswith(".ffn_gate_inp_shexp.weight") and len(info.shape) == 1:
        info = dataclasses.replace(info, shape=(1, *info.shape))
    experts = _EXPERTS.fullmatch(info.name)
    if experts is None or len(info.shape) != 3:
        yield model_name(info.name, architecture), info
        return
    part_bytes = tensor_bytes(info) // info.shape[0]
    for number in range(info.shape[0]):
        name = f"model.layers.{int(experts[1])}.mlp.experts.{number}.{experts[2]}_proj.weight"
        start = info.start + number * part_bytes
        yield name, dataclasses.replace(info, shape=info.shape[1:], start=start)


def check_shapes(model: Model, file: GgufFile, tensors: Tensors, architecture: str) -> None:
    """Raise CheckpointError for a tensor that is missing or has another shape than the model's. The
    error has the names and types of the file.
    """
    for source in model.tensor_sources().values():
        for name, shape in zip(source.names, source.shapes, strict=True):
            if name not in tensors:
                wanted = file_name(name, architecture)
                given = f"{file.path} has no tensor {wanted!r}"
                raise CheckpointError(
                    given, f"all tensors of a {model.info.family}", "Choose another file."
                )
            found = tensors[name]
            if tuple(found.shape) != tuple(shape):
                kind = file.tensors[found.name].type_name
                given = f"{file.path} has tensor {found.name!r} of type {kind} with shape "
                raise CheckpointError(
                    f"{given}{shown(list(found.shape))}",
                    f"{list(shape)}, by its metadata",
                    "Choose another file, or convert the model anew.",
                )


def _opened(info: GgufTensorInfo, config: Mapping[str, Any]) -> StoredTensor | QuantizedTensor:
    architecture = ARCHITECTURES[config["model_type"]]
    form = BLOCK_TYPES[info.type_number]
    heads = _interleaved_heads(info.name, config) if architecture.is_interleaved else None
    order = None if heads is None else _rotary_order(info, heads)
    if architecture.is_stacked and ".attn_qkv." in info.name:
        order = _head_order(info, config["num_attention_heads"])
    if form.decode is not None:
        return _quantized(info, form, order)
    change: Callable[[np.ndarray], np.ndarray] | None = None
    if order is not None:
        change = lambda values: values[order]  # noqa: E731
    elif architecture.norm_offset and info.name.endswith("norm.weight"):
        change = lambda values: values - values.dtype.type(architecture.norm_offset)  # noqa: E731
    facts = {"dtype": form.name, "shape": info.shape, "data_offsets": (0, tensor_bytes(info))}
    return StoredTensor(info.data, info.path, info.name, facts, info.start, change)


def _interleaved_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Return the number of heads of a tensor of queries or keys, None for other tensors."""
    found = _LAYER.fullmatch(name)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return config[heads[found[2]]] if found is not None and found[2] in heads else None


def _rotary_order(info: GgufTensorInfo, heads: int) -> np.ndarray:
    """Return the rows of queries or keys in the order of the models. Some files have the two
    features of a rotary pair beside each other; models have the first features of all pairs first.
    """
    rows = info.shape[0]
    if rows % (2 * heads):
        given = f"{info.path} has tensor {info.name!r} of type {info.type_name} with {rows} rows"
        raise CheckpointError(given, f"a multiple of {2 * heads}", "Choose another file.")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _head_order(info: GgufTensorInfo, heads: int) -> np.ndarray:
    """Return the rows of queries, keys and values by head, where a file has all queries first."""
    rows = info.shape[0]
    if rows % (3 * heads):
        given = f"{info.path} has tensor {info.name!r} of type {info.type_name} with {rows} rows"
        raise CheckpointError(given, f"a multiple of {3 * heads}", "Choose another file.")
    return np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).ravel()


def _quantized(info: GgufTensorInfo, form: BlockType, order: np.ndarray | None) -> QuantizedTensor:
    if len(info.shape) != 2:
        given = (
            f"{info.path} has tensor {info.name!r} of type {info.type_name} "
            f"with {len(info.shape)} dimensions"
        )
        raise CheckpointError(given, "2, or a plain type", "Choose another file.")
    rows, columns = info.shape
    count = rows * columns // form.num_values
    stored = np.frombuffer(info.data, form.layout, count, info.start).reshape(rows, -1)

    def read(first: int, last: int) -> QuantizedArray:
        blocks = stored[first:last] if order is None else stored[order[first:last]]
        return _decoded(blocks, form, info)

    def forget() -> None:
        _forget(info)

    return QuantizedTensor(
        path=info.path,
        name=info.name,
        shape=(rows, columns),
        num_bytes=tensor_bytes(info),
        form=QuantizedForm(
            _METHODS[form.values_dtype],
            columns // form.group_size,
            form.scales_dtype,
            form.has_zero_points,
        ),
        read=read,
        forget=forget,
    )


def _decoded(blocks: np.ndarray, form: BlockType, info: GgufTensorInfo) -> QuantizedArray:
    """Return rows of blocks [rows, blocks of a row]; CheckpointError for NaN and infinity."""
    assert form.decode is not None, "a plain tensor has no blocks"
    flat, groups = blocks.ravel(), form.num_values // form.group_size
    values = np.empty((flat.size, form.num_values), _VALUE_DTYPES[form.values_dtype])
    scales = np.empty((flat.size, groups), form.scales_dtype)
    points = np.empty((flat.size, groups), np.float32) if form.has_zero_points else None
    step = _DECODED_AT_ONCE // form.num_values
    for first in range(0, flat.size, step):
        some = slice(first, first + step)
        found = form.decode(flat[some])
        values[some], scales[some] = found.values, found.scales
        if points is not None and found.zero_points is not None:
            points[some] = found.zero_points
    if not (np.isfinite(scales).all() and (points is None or np.isfinite(points).all())):
        given = (
            f"tensor {info.name!r} of type {info.type_name} in {info.path.name} "
            "holds NaN or infinity"
        )
        raise CheckpointError(given, "finite weights", "Fetch the file again, or choose another.")
    rows = len(blocks)
    return QuantizedArray(
        values.reshape(rows, -1),
        scales.reshape(rows, -1),
        None if points is None else points.reshape(rows, -1),
        _METHODS[form.values_dtype],
    )


def _forget(info: GgufTensorInfo) -> None:
    """Release the memory of the tensor's pages; they stay in the system's file cache."""
    first = info.start // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_DONTNEED"):
        info.data.madvise(mmap.MADV_DONTNEED, first, info.start + tensor_bytes(info) - first)
