"""What ops other than attention are compiled at for devices that are not there: sizes of real
models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.cache import BUILTIN_LAYOUTS, KVLayout
from enginebay.ops.spec import RopeSpec

Layouts = Sequence[type[KVLayout]]

CACHES = ((8, 128, "bfloat16"), (8, 128, "float32"), (2, 64, "bfloat16"))
"""KV heads, head_dim and dtype of the caches that are written."""


@dataclasses.dataclass(frozen=True)
class OpProblem:
    """Arguments of one call of an op, as shapes, and what the op is bound to."""

    name: str
    arguments: tuple[Any, ...]
    bound: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    """Names of the last arguments, where the op takes them by name."""
    donated: tuple[int, ...] = ()
    representative: bool = False
    dtype: str = "bfloat16"

    def function(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The op, bound, of positional arguments alone."""
        first = len(self.arguments) - len(self.keywords)

        def call(*given: Any) -> Any:
            return op(
                *given[:first], **dict(zip(self.keywords, given[first:], strict=True)), **self.bound
            )

        return call

    @property
    def traits(self) -> Mapping[str, str]:
        """For the support matrix."""
        return {"dtype": self.dtype}


def _array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _rms_norm(layouts: Layouts) -> list[OpProblem]:
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


def _rope(layouts: Layouts) -> list[OpProblem]:
    return [
        OpProblem(
            f"rope_{tokens}x{heads}x{head_dim}",
            (_array((tokens, heads, head_dim), "bfloat16"), _array((tokens,), "int32")),
            {"spec": RopeSpec(500000.0, head_dim)},
            representative=tokens == 32,
        )
        for tokens, heads, head_dim in ((32, 32, 128), (2048, 8, 128), (512, 14, 64))
    ]


def _kv_write(layouts: Layouts) -> list[OpProblem]:
    def problem(tokens: int, layout: KVLayout) -> OpProblem:
        new = _array((tokens, layout.num_kv_heads, layout.head_dim), layout.dtype)
        name = f"kv_write_{layout.name}_{tokens}x{layout.num_kv_heads}x{layout.head_dim}_{layout.dtype}"
        short = tokens == 32 and layout.head_dim == 128 and layout.dtype == "bfloat16"
        arguments = (layout.shapes(), _array((tokens,), "int32"), new, new)
        return OpProblem(
            name,
            arguments,
            {"layout": layout},
            donated=(0,),
            representative=short,
            dtype=layout.dtype,
        )

    return [
        problem(tokens, kind(512, 64, heads, head_dim, dtype))
        for kind in layouts
        for tokens in (32, 2048)
        for heads, head_dim, dtype in CACHES
    ]


def _rope_kv_write(layouts: Layouts) -> list[OpProblem]:
    def problem(tokens: int, layout: KVLayout) -> OpProblem:
        heads, head_dim, dtype = layout.num_kv_heads, layout.head_dim, layout.dtype
        new, places = _array((tokens, heads, head_dim), dtype), _array((tokens,), "int32")
        q = _array((tokens, 4 * heads, head_dim), dtype)
        return OpProblem(
            f"rope_kv_write_{layout.name}_{tokens}x{heads}x{head_dim}_{dtype}",
            (q, new, new, layout.shapes(), places, places),
            {"spec": RopeSpec(500000.0, head_dim), "layout": layout},
            donated=(3,),
            representative=(tokens, head_dim, dtype) == (32, 128, "bfloat16"),
            dtype=dtype,
        )

    return [
        problem(tokens, kind(512, 64, heads, head_dim, dtype))
        for kind in layouts
        for tokens in (32, 2048)
        for heads, head_dim, dtype in CACHES
    ]


def _add_rms_norm(layouts: Layouts) -> list[OpProblem]:
    return [
        OpProblem(
            f"add_rms_norm_{tokens}x{width}_{dtype}",
            (*[_array((tokens, width), dtype)] * 2, _array((width,), dtype)),
            {"eps": 1e-5},
            representative=(tokens, width) == (32, 4096) and dtype == "bfloat16",
            dtype=dtype,
        )
        for tokens, width in ((1, 4096), (32, 4096), (2048, 4096), (32, 1024))
        for dtype in ("bfloat16", "float32")
    ]


def _sample(layouts: Layouts) -> list[OpProblem]:
    return [
        OpProblem(
            f"sample_{rows}x{vocab}",
            (
                _array((rows, vocab), "float32"),
                _array((rows, 2), "uint32"),
                *(_array((rows,), dtype) for dtype in ("int32", "float32", "float32")),
            ),
            keywords=("top_k", "top_p", "min_p"),
            representative=(rows, vocab) == (32, 128256),
            dtype="float32",
        )
        for rows in (1, 32)
        for vocab in (32000, 128256, 151936)
    ]


def _linear(layouts: Layouts) -> list[OpProblem]:
    return [
        OpProblem(
            f"linear_{rows}x4096x14336",
            (_array((rows, 4096), "bfloat16"), _array((14336, 4096), "bfloat16")),
            representative=rows == 32,
        )
        for rows in (1, 32, 512)
    ]


def _embedding(layouts: Layouts) -> list[OpProblem]:
    table, ids = _array((128256, 4096), "bfloat16"), _array((32,), "int32")
    return [OpProblem("embedding_32x128256x4096", (table, ids), representative=True)]


_PROBLEMS: Mapping[str, Callable[[Layouts], list[OpProblem]]] = {
    "add_rms_norm": _add_rms_norm,
    "embedding": _embedding,
    "kv_write": _kv_write,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "sample": _sample,
}


def problems_of(op: str, layouts: Layouts) -> list[OpProblem]:
    """The problems of an op, none for an op that has none; in the core's layouts where none are
    given.
    """
    make = _PROBLEMS.get(op)
    return [] if make is None else make(layouts or tuple(BUILTIN_LAYOUTS.values()))
