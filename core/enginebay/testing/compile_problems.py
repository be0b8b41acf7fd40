"""What ops other than attention are compiled at for devices that are not there: sizes of real models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.cache import BUILTIN_LAYOUTS, KVLayout
from enginebay.ops.spec import RopeSpec


@dataclasses.dataclass(frozen=True)
class OpProblem:
    """Arguments of one call of an op, as shapes, and what the op is bound to."""

    name: str
    arguments: tuple[Any, ...]
    bound: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    donated: tuple[int, ...] = ()
    representative: bool = False
    dtype: str = "bfloat16"

    def function(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The op, bound."""
        return functools.partial(op, **self.bound)

    @property
    def traits(self) -> Mapping[str, str]:
        """For the support matrix."""
        return {"dtype": self.dtype}


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _rms_norm() -> list[OpProblem]:
    return [
        OpProblem(
            f"rms_norm_{tokens}x{width}_{dtype}",
            (_array((tokens, width), dtype), _array((width,), dtype)),
            {"eps": 1e-5},
            representative=(tokens, width) == (32, 4096) and dtype == "bfloat16",
            dtype=dtype,
        )
        for tokens, width in ((1, 4096), (32, 4096), (2048, 4096), (32, 1024))
        for dtype in ("bfloat16", "float32")
    ]


def _rope() -> list[OpProblem]:
    return [
        OpProblem(
            f"rope_{tokens}x{heads}x{head_dim}",
            (_array((tokens, heads, head_dim), "bfloat16"), _array((tokens,), "int32")),
            {"spec": RopeSpec(500000.0, head_dim)},
            representative=tokens == 32,
        )
        for tokens, heads, head_dim in ((32, 32, 128), (2048, 8, 128), (512, 14, 64))
    ]


def _kv_write() -> list[OpProblem]:
    def problem(tokens: int, layout: KVLayout) -> OpProblem:
        new = _array((tokens, layout.num_kv_heads, layout.head_dim), layout.dtype)
        name = f"kv_write_{layout.name}_{tokens}x{layout.num_kv_heads}x{layout.head_dim}_{layout.dtype}"
        short = tokens == 32 and layout.head_dim == 128 and layout.dtype == "bfloat16"
        arguments = (layout.shapes(), _array((tokens,), "int32"), new, new)
        return OpProblem(name, arguments, {"layout": layout}, (0,), short, layout.dtype)

    return [
        problem(tokens, kind(512, 64, heads, head_dim, dtype))
        for kind in BUILTIN_LAYOUTS.values()
        for tokens in (32, 2048)
        for heads, head_dim, dtype in ((8, 128, "bfloat16"), (8, 128, "float32"), (2, 64, "bfloat16"))
    ]


def _linear() -> list[OpProblem]:
    return [
        OpProblem(
            f"linear_{rows}x4096x14336",
            (_array((rows, 4096), "bfloat16"), _array((14336, 4096), "bfloat16")),
            representative=rows == 32,
        )
        for rows in (1, 32, 512)
    ]


def _embedding() -> list[OpProblem]:
    table, ids = _array((128256, 4096), "bfloat16"), _array((32,), "int32")
    return [OpProblem("embedding_32x128256x4096", (table, ids), representative=True)]


OP_PROBLEMS: Mapping[str, Sequence[OpProblem]] = {
    "rms_norm": _rms_norm(),
    "rope": _rope(),
    "kv_write": _kv_write(),
    "linear": _linear(),
    "embedding": _embedding(),
}
