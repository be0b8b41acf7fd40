"""Programs of the built-in ops without phases, in sizes of real models, which checks compile for
devices that this machine does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.contracts.cache import KVLayout
from enginebay.ops.caps import Env
from enginebay.ops.rotary import RopeSpec
from enginebay_testing.layouts import installed_layouts
from enginebay_testing.op_kit import LayoutTypes, OpProgram

CACHES = ((8, 128, "bfloat16"), (8, 128, "float32"), (2, 64, "bfloat16"))
"""KV heads, head_dim and dtype of the caches."""

NORMS = tuple(
    (tokens, width, dtype)
    for tokens, width in ((1, 4096), (32, 4096), (2048, 4096), (32, 1024))
    for dtype in ("bfloat16", "float32")
)
STANDING_NORM = (32, 4096, "bfloat16")


def _array(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _program(
    name: str,
    function: Callable[..., Any],
    *arguments: Any,
    stands: bool,
    dtype: str = "bfloat16",
    donated: tuple[int, ...] = (),
) -> OpProgram:
    """Return a program. With `stands` a quick check compiles it too."""
    return OpProgram(name, function, arguments, donated, stands, {"dtype": dtype})


def rms_norm(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield the rows of a decode step and of a prompt."""
    for tokens, width, dtype in NORMS:
        yield _program(
            f"rms_norm_{tokens}x{width}_{dtype}",
            functools.partial(kernel, eps=1e-5),
            _array((tokens, width), dtype),
            _array((width,), dtype),
            stands=(tokens, width, dtype) == STANDING_NORM,
            dtype=dtype,
        )


def add_rms_norm(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield the same sizes as for rms_norm."""
    for tokens, width, dtype in NORMS:
        rows = _array((tokens, width), dtype)
        yield _program(
            f"add_rms_norm_{tokens}x{width}_{dtype}",
            functools.partial(kernel, eps=1e-5),
            *(rows, rows, _array((width,), dtype)),
            stands=(tokens, width, dtype) == STANDING_NORM,
            dtype=dtype,
        )


def rope(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield queries and keys of three models."""
    for tokens, heads, head_dim in ((32, 32, 128), (2048, 8, 128), (512, 14, 64)):
        yield _program(
            f"rope_{tokens}x{heads}x{head_dim}",
            functools.partial(kernel, spec=RopeSpec(500000.0, head_dim)),
            *(_array((tokens, heads, head_dim)), _array((tokens,), "int32")),
            stands=tokens == 32,
        )


def _caches(layouts: LayoutTypes) -> Iterable[tuple[int, KVLayout]]:
    """Yield (number of tokens, layout of the cache); of all installed layouts if none is given."""
    for kind in layouts or installed_layouts().values():
        for tokens in (32, 2048):
            for heads, head_dim, dtype in CACHES:
                yield tokens, kind(512, 64, heads, head_dim, dtype)


def _cache_name(op: str, tokens: int, layout: KVLayout) -> str:
    sizes = f"{tokens}x{layout.num_kv_heads}x{layout.head_dim}"
    return f"{op}_{layout.name}_{sizes}_{layout.dtype}"


def kv_write(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield writes of tokens to a donated cache."""
    for tokens, layout in _caches(layouts):
        new = _array((tokens, layout.num_kv_heads, layout.head_dim), layout.dtype)
        yield _program(
            _cache_name("kv_write", tokens, layout),
            functools.partial(kernel, layout=layout),
            *(layout.shapes(), _array((tokens,), "int32"), new, new),
            stands=(tokens, layout.head_dim, layout.dtype) == (32, 128, "bfloat16"),
            dtype=layout.dtype,
            donated=(0,),
        )


def rope_kv_write(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield the same with four queries per key."""
    for tokens, layout in _caches(layouts):
        heads, head_dim, dtype = layout.num_kv_heads, layout.head_dim, layout.dtype
        new, places = _array((tokens, heads, head_dim), dtype), _array((tokens,), "int32")
        q = _array((tokens, 4 * heads, head_dim), dtype)
        yield _program(
            _cache_name("rope_kv_write", tokens, layout),
            functools.partial(kernel, spec=RopeSpec(500000.0, head_dim), layout=layout),
            *(q, new, new, layout.shapes(), places, places),
            stands=(tokens, head_dim, dtype) == (32, 128, "bfloat16"),
            dtype=dtype,
            donated=(3,),
        )


def sample(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield the vocabularies of three models."""

    def draw(z: Any, seeds: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
        return kernel(z, seeds, top_k=top_k, top_p=top_p, min_p=min_p)

    for rows in (1, 32):
        for vocab in (32000, 128256, 151936):
            yield _program(
                f"sample_{rows}x{vocab}",
                draw,
                *(_array((rows, vocab), "float32"), _array((rows, 2), "uint32")),
                *(_array((rows,), dtype) for dtype in ("int32", "float32", "float32")),
                stands=(rows, vocab) == (32, 128256),
                dtype="float32",
            )


def linear(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield the widest product of a layer."""
    for rows in (1, 32, 512):
        yield _program(
            f"linear_{rows}x4096x14336",
            kernel,
            *(_array((rows, 4096)), _array((14336, 4096))),
            stands=rows == 32,
        )


def embedding(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield a table of 128,256 rows."""
    table, ids = _array((128256, 4096)), _array((32,), "int32")
    yield _program("embedding_32x128256x4096", kernel, table, ids, stands=True)


def grouped_linear(kernel: Any, env: Env, number: int, layouts: LayoutTypes) -> Iterator[OpProgram]:
    """Yield 128 experts of 768 features, up and down, with rows of a decode and of a prompt."""
    for rows in (8, 256, 4096):
        for outputs, inputs in ((768, 2048), (2048, 768)):
            yield _program(
                f"grouped_linear_{rows}x128x{outputs}x{inputs}",
                kernel,
                *(_array((rows, inputs)), _array((128, outputs, inputs)), _array((128,), "int32")),
                stands=(rows, outputs) == (256, 768),
            )
