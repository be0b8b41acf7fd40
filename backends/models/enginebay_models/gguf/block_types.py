"""The block types of GGUF tensors: how their bytes become small integers, scales and zero points.

A quantised row is a sequence of blocks, and a block has some groups of values with a scale each.
The layouts are those of ggml's file ggml-common.h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

_HALF = np.dtype("<f2")
_SUPER_BLOCK = 256
"""Values in a block of the K types."""
_LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)
"""The low half of each of eight bytes."""


@dataclasses.dataclass(frozen=True)
class BlockGroups:
    """The contents of blocks: a value is (values - zero_points) * scales of its group.

    values: int8 [blocks, values of a block]. scales: f16 or f32 [blocks, groups of a block].
    zero_points: f32 of the same shape, or None when all are 0.
    """

    values: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A type of tensors. `layout` is the dtype of a block, which has `num_values` values.

    A plain type has blocks of one value, and no `decode`. For the others `decode` returns the
    contents of blocks [blocks] of `layout`. `values_dtype` is the narrowest dtype of the values,
    `group_size` the number of values with one scale, and `has_zero_points` whether there are any.
    """

    name: str
    num_values: int
    layout: np.dtype
    values_dtype: str
    group_size: int = 1
    scales_dtype: str = "float32"
    has_zero_points: bool = False
    decode: Callable[[np.ndarray], BlockGroups] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return self.layout.itemsize


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the low half of each of the bytes [..., n], then the high halves: [..., 2 n]. n is a
    multiple of 8.
    """
    words = np.ascontiguousarray(packed).view(np.uint64)
    size = words.shape[-1]
    found = np.empty((*words.shape[:-1], 2 * size), np.uint64)
    np.bitwise_and(words, _LOW_HALVES, out=found[..., :size])
    np.right_shift(words, np.uint64(4), out=found[..., size:])
    found[..., size:] &= _LOW_HALVES
    return found.view(np.uint8)


def _bits(packed: np.ndarray, num_bits: int) -> np.ndarray:
    """Return the lowest bits of each of the bytes [..., n], then the next bits, and so on."""
    mask = (1 << num_bits) - 1
    return np.concatenate([packed >> at & mask for at in range(0, 8, num_bits)], axis=-1)


def _signed(values: np.ndarray, offset: int) -> np.ndarray:
    return values.view(np.int8) - np.int8(offset)


def _with_offsets(values: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> BlockGroups:
    """Return blocks whose values are values * scales - offsets, with one scale and one offset per
    group [blocks, groups] in f32.

    A group with scale 0 has equal values, -offset. It becomes values of 0 with scale 1.
    """
    flat = scales == 0
    if flat.any():
        groups = values.reshape(*scales.shape, -1)
        values = np.where(flat[..., None], np.uint8(0), groups).reshape(values.shape)
    scales = np.where(flat, np.float32(1), scales)
    return BlockGroups(values.view(np.int8), scales, offsets / scales)


def _q8_0(blocks: np.ndarray) -> BlockGroups:
    return BlockGroups(blocks["values"], blocks["scale"])


def _q4_0(blocks: np.ndarray) -> BlockGroups:
    return BlockGroups(_signed(_nibbles(blocks["low"]), 8), blocks["scale"])


def _q4_1(blocks: np.ndarray) -> BlockGroups:
    return _with_least(_nibbles(blocks["low"]), blocks)


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    """Return the bits of `high` [blocks, 4 bytes], the lowest first, as 16 or 0."""
    return np.unpackbits(blocks["high"], axis=-1, bitorder="little") << 4


def _q5_0(blocks: np.ndarray) -> BlockGroups:
    return BlockGroups(_signed(_nibbles(blocks["low"]) | _fifth_bits(blocks), 16), blocks["scale"])


def _q5_1(blocks: np.ndarray) -> BlockGroups:
    return _with_least(_nibbles(blocks["low"]) | _fifth_bits(blocks), blocks)


def _with_least(values: np.ndarray, blocks: np.ndarray) -> BlockGroups:
    """Return blocks with a smallest value: value * scale + least."""
    scales, least = (blocks[name].astype(np.float32) for name in ("scale", "least"))
    return _with_offsets(values, scales, -least)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and the offsets of the 8 groups of Q4_K and Q5_K, f32 [blocks, 8].

    12 bytes have 16 factors of 6 bits: bytes 0 to 3 the scales of groups 0 to 3, and in their upper
    two bits those of the scales of groups 4 to 7; bytes 4 to 7 the same for offsets; bytes 8 to 11
    the lower four bits of the scales and of the offsets of groups 4 to 7.
    """
    packed = blocks["factors"].reshape(-1, 3, 4)
    first, last = packed[:, :2], packed[:, 2]
    upper = (first & 0xC0) >> 2
    factors = [
        np.concatenate([first[:, i] & 0x3F, upper[:, i] | (last >> shift & 0x0F)], axis=-1)
        for i, shift in ((0, 0), (1, 4))
    ]
    scales, offsets = (
        blocks[name].astype(np.float32) * factor
        for name, factor in zip(("scale", "offset"), factors, strict=True)
    )
    return scales, offsets


def _k_nibbles(blocks: np.ndarray) -> np.ndarray:
    """Return the lower four bits of the values: each 32 bytes have two groups."""
    return _nibbles(blocks["low"].reshape(-1, 4, 32)).reshape(-1, _SUPER_BLOCK)


def _q4_k(blocks: np.ndarray) -> BlockGroups:
    return _with_offsets(_k_nibbles(blocks), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> BlockGroups:
    fifth = _bits(blocks["high"], 1) << 4
    return _with_offsets(_k_nibbles(blocks) | fifth, *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> BlockGroups:
    low = _nibbles(blocks["low"].reshape(-1, 2, 64))
    high = _bits(blocks["high"].reshape(-1, 2, 32), 2) << 4
    values = _signed((low | high).reshape(-1, _SUPER_BLOCK), 32)
    return BlockGroups(values, blocks["scale"].astype(np.float32) * blocks["factors"])


def _plain(name: str, dtype: np.dtype) -> BlockType:
    return BlockType(name, 1, dtype, dtype.name)


def _block(*fields: tuple[str, int, np.dtype | type]) -> np.dtype:
    """Return the dtype of a block of (name, number of items, dtype of an item)."""
    return np.dtype([(name, dtype, (count,)) for name, count, dtype in fields])


_SCALE = ("scale", 1, _HALF)
_LEAST = ("least", 1, _HALF)
_OFFSET = ("offset", 1, _HALF)

BLOCK_TYPES: Mapping[int, BlockType] = {
    0: _plain("F32", np.dtype("<f4")),
    1: _plain("F16", _HALF),
    30: _plain("BF16", np.dtype(ml_dtypes.bfloat16)),
    2: BlockType(
        "Q4_0", 32, _block(_SCALE, ("low", 16, np.uint8)), "int4", 32, "float16", decode=_q4_0
    ),
    3: BlockType(
        "Q4_1", 32, _block(_SCALE, _LEAST, ("low", 16, np.uint8)),
        "uint4", 32, has_zero_points=True, decode=_q4_1,
    ),
    6: BlockType(
        "Q5_0", 32, _block(_SCALE, ("high", 4, np.uint8), ("low", 16, np.uint8)),
        "int8", 32, "float16", decode=_q5_0,
    ),
    7: BlockType(
        "Q5_1", 32, _block(_SCALE, _LEAST, ("high", 4, np.uint8), ("low", 16, np.uint8)),
        "int8", 32, has_zero_points=True, decode=_q5_1,
    ),
    8: BlockType(
        "Q8_0", 32, _block(_SCALE, ("values", 32, np.int8)), "int8", 32, "float16", decode=_q8_0
    ),
    12: BlockType(
        "Q4_K", 256, _block(_SCALE, _OFFSET, ("factors", 12, np.uint8), ("low", 128, np.uint8)),
        "uint4", 32, has_zero_points=True, decode=_q4_k,
    ),
    13: BlockType(
        "Q5_K", 256,
        _block(_SCALE, _OFFSET, ("factors", 12, np.uint8), ("high", 32, np.uint8),
               ("low", 128, np.uint8)),
        "int8", 32, has_zero_points=True, decode=_q5_k,
    ),
    14: BlockType(
        "Q6_K", 256,
        _block(("low", 128, np.uint8), ("high", 64, np.uint8), ("factors", 16, np.int8), _SCALE),
        "int8", 16, decode=_q6_k,
    ),
}  # fmt: skip
"""Number in a file -> type, of the types that are read."""

_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def type_name(number: int) -> str:
    """Return the name of a type; "type 99" for an unknown number."""
    form = BLOCK_TYPES.get(number)
    return _OTHER_TYPES.get(number, f"type {number}") if form is None else form.name
