"""The ops without phases as benchmarks, each a function from a shape to its problem."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.ops.grouped_linear import GROUPED_LINEAR as GROUPED_LINEAR_OP
from enginebay.ops.kv_write import KV_WRITE as KV_WRITE_OP
from enginebay.ops.linear import EMBEDDING as EMBEDDING_OP
from enginebay.ops.linear import LINEAR as LINEAR_OP
from enginebay.ops.norm import RMS_NORM as RMS_NORM_OP
from enginebay.ops.op import Op
from enginebay.ops.rope import ROPE as ROPE_OP
from enginebay.ops.rotary import RopeSpec
from enginebay_bench.attention import same_bits
from enginebay_bench.problem import (
    BenchSetting,
    Inputs,
    OpBench,
    Parity,
    Problem,
    StepFunction,
    compared,
    cost_of,
    noise,
    spread,
    worst,
)
from enginebay_bench.shapes import BATCHES, CONTEXTS, Axes, Shape
from enginebay_testing import oracle

MAX_ROWS, MAX_COLUMNS = 32, 256
"""Numbers of output rows and columns that are computed again in f64, spread over all of them."""

EPS_OF_NORM = 1e-5
OF_ROWS = Axes(BATCHES, {"decode": (0,), "prefill": CONTEXTS, "mixed": (0,)})
"""Shapes of ops that do not read the cache: context length does not matter in decode and mixed."""

WRITES = Axes(BATCHES, dict.fromkeys(BATCHES, (1024,)))
"""Shapes of ops that write a cache."""

PARTS = ("qkv", "o", "gate_up", "down", "head")
"""The matrix products of a layer, fused as in the models, and the output head."""


InputShapes = tuple[tuple[tuple[int, ...], str], ...]
"""Shape and dtype of each input."""


def _plain(
    op: Op[Any],
    shape: Shape,
    arrays: InputShapes,
    check: Callable[..., Parity],
    make: Callable[[], tuple[Any, ...]] | None = None,
    *,
    seed: int = 0,
    **keywords: Any,
) -> Problem:
    """A problem without state: the op is called with `keywords` inside jit, and
    `check(out, *arrays)` runs on the host. `make` returns the inputs; without it they are noise
    of `seed`.
    """
    structs = [jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for size, dtype in arrays]

    def inputs(_: float) -> Inputs:
        made = (
            make() if make is not None else tuple(noise(*a, seed, i) for i, a in enumerate(arrays))
        )
        return Inputs((), tuple(jnp.asarray(array) for array in made))

    return Problem(
        name=shape.name,
        cost=cost_of(op, *structs, **keywords),
        num_bytes=sum(math.prod(size) * jnp.dtype(dtype).itemsize for size, dtype in arrays),
        make=inputs,
        bind=lambda impl, _: lambda state, *arrays: (impl(*arrays, **keywords), state),
        check=lambda inputs, out, _: check(np.asarray(out), *map(np.asarray, inputs.arrays)),
    )


def linear_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """A matrix product with a weight [out, in]: the hidden states of the step's tokens times a
    weight of the layer, or those of each row's last token times the output head.
    """
    layer = shape.layer
    heads = layer.num_q_heads * layer.head_dim
    sizes = {
        "qkv": (layer.hidden, heads + 2 * layer.num_kv_heads * layer.head_dim),
        "o": (heads, layer.hidden),
        "gate_up": (layer.hidden, 2 * layer.mlp),
        "down": (layer.mlp, layer.hidden),
        "head": (layer.hidden, layer.vocab),
    }
    num_in, num_out = sizes[shape.part]
    rows = shape.batch if shape.part == "head" else shape.num_tokens()

    def check(out: np.ndarray, x: np.ndarray, weight: np.ndarray) -> Parity:
        some, columns = spread(rows, MAX_ROWS), spread(num_out, MAX_COLUMNS)
        exact = oracle.linear(x[some], weight[columns])
        sums = oracle.linear(np.abs(x[some]), np.abs(weight[columns]))
        allowed = oracle.EPS[setting.dtype] * np.abs(exact) + 4 * oracle.EPS["float32"] * sums
        error = np.abs(out[np.ix_(some, columns)].astype(np.float64) - exact)
        return worst(error, allowed, compared(error.size, rows * num_out, "values"))

    arrays = (((rows, num_in), setting.dtype), ((num_out, num_in), setting.dtype))
    return _plain(LINEAR_OP, shape, arrays, check, seed=setting.seed)


def grouped_linear_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """A product of the hidden states of the step's tokens with the weights of their experts. Each
    expert is drawn with the same probability.
    """
    layer = shape.layer
    count, chosen, width = layer.experts or (8, 2, layer.mlp // 8)
    num_in, num_out = (width, layer.hidden) if shape.part == "down" else (layer.hidden, width)
    rows = shape.num_tokens() * chosen
    sizes = np.bincount(np.random.default_rng(4).integers(0, count, rows), minlength=count)

    def check(out: np.ndarray, x: np.ndarray, weight: np.ndarray, sizes: np.ndarray) -> Parity:
        some, columns = spread(rows, MAX_ROWS), spread(num_out, MAX_COLUMNS)
        groups = np.searchsorted(np.cumsum(sizes), some, side="right")
        exact, sums = (
            np.concatenate(
                [
                    oracle.linear(part(x[[i]]), part(weight[g][columns]))
                    for i, g in zip(some, groups, strict=True)
                ]
            )
            for part in (np.asarray, np.abs)
        )
        allowed = oracle.EPS[setting.dtype] * np.abs(exact) + 4 * oracle.EPS["float32"] * sums
        error = np.abs(out[np.ix_(some, columns)].astype(np.float64) - exact)
        return worst(error, allowed, compared(error.size, rows * num_out, "values"))

    arrays: InputShapes = (
        ((rows, num_in), setting.dtype),
        ((count, num_out, num_in), setting.dtype),
        ((count,), "int32"),
    )

    def make() -> tuple[Any, ...]:
        x, weight = (noise(*a, setting.seed, i) for i, a in enumerate(arrays[:2]))
        return x, weight, sizes.astype(np.int32)

    problem = _plain(GROUPED_LINEAR_OP, shape, arrays, check, make)
    structs = [jax.ShapeDtypeStruct(size, jnp.dtype(dtype)) for size, dtype in arrays[:2]]
    cost = cost_of(GROUPED_LINEAR_OP, *structs, sizes.astype(np.int32))
    return dataclasses.replace(problem, cost=cost)


def rms_norm_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """The norm before a layer's products."""
    rows, features = shape.num_tokens(), shape.layer.hidden

    def check(out: np.ndarray, x: np.ndarray, weight: np.ndarray) -> Parity:
        some = spread(rows, MAX_ROWS)
        exact = oracle.rms_norm(x[some], weight, eps=EPS_OF_NORM)
        allowed = 2 * max(oracle.EPS[setting.dtype], 4e-7) * np.abs(exact)
        return worst(
            np.abs(out[some].astype(np.float64) - exact), allowed, compared(some.size, rows, "rows")
        )

    arrays = (((rows, features), setting.dtype), ((features,), setting.dtype))
    return _plain(RMS_NORM_OP, shape, arrays, check, seed=setting.seed, eps=EPS_OF_NORM)


def rope_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """The rotation of the step's queries."""
    layer, rows = shape.layer, shape.num_tokens()
    spec = RopeSpec(layer.rope_theta, layer.head_dim)
    size = (rows, layer.num_q_heads, layer.head_dim)

    def check(out: np.ndarray, x: np.ndarray, positions: np.ndarray) -> Parity:
        some = spread(rows, MAX_ROWS)
        exact = oracle.rope(x[some], positions[some], spec)
        unit = oracle.EPS["float32"] * (2.0 + positions[some]) + oracle.EPS[setting.dtype]
        allowed = (unit * np.abs(x.astype(np.float64)).max() * 2)[:, None, None]
        return worst(
            np.abs(out[some].astype(np.float64) - exact), allowed, compared(some.size, rows, "rows")
        )

    return _plain(
        ROPE_OP,
        shape,
        ((size, setting.dtype), ((rows,), "int32")),
        check,
        lambda: (noise(size, setting.dtype, setting.seed, 1), np.arange(rows, dtype=np.int32)),
        spec=spec,
    )


def embedding_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """A lookup of random token ids, from the whole vocabulary, in the embedding table."""
    rows, layer = shape.num_tokens(), shape.layer

    def check(out: np.ndarray, table: np.ndarray, ids: np.ndarray) -> Parity:
        error = np.abs(out.astype(np.float64) - table[ids].astype(np.float64))
        return worst(error, 0.0, compared(rows, rows, "rows, exactly"))

    return _plain(
        EMBEDDING_OP,
        shape,
        (((layer.vocab, layer.hidden), setting.dtype), ((rows,), "int32")),
        check,
        lambda: (
            noise((layer.vocab, layer.hidden), setting.dtype, setting.seed, 1),
            np.random.default_rng(2).integers(0, layer.vocab, rows).astype(np.int32),
        ),
    )


def kv_write_problem(shape: Shape, setting: BenchSetting) -> Problem:
    """A write of the keys and values of the step's tokens into a paged cache, which is donated."""
    layer, rows = shape.layer, shape.num_tokens()
    pages = -(-max(shape.batch * shape.context, rows) // setting.page_size)
    layout = setting.layout_type(
        pages, setting.page_size, layer.num_kv_heads, layer.head_dim, setting.dtype
    )
    size = (rows, layer.num_kv_heads, layer.head_dim)
    new = jax.ShapeDtypeStruct(size, jnp.dtype(setting.dtype))
    places = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def make(_: float) -> Inputs:
        slots = (
            np.random.default_rng(3).permutation(pages * setting.page_size)[:rows].astype(np.int32)
        )
        k, v = (jnp.asarray(noise(size, setting.dtype, setting.seed, i)) for i in (1, 2))
        return Inputs(layout.init(), (jnp.asarray(slots), k, v))

    def bind(impl: Any, _: Any) -> StepFunction:
        return lambda cache, slots, k, v: ((), impl(cache, slots, k, v, layout=layout))

    def check(inputs: Inputs, _: Any, after: Any) -> Parity:
        wanted = jax.jit(layout.write)(inputs.state, *inputs.arrays)
        same = all(bool(jax.jit(same_bits)(wanted[name], after[name])) for name in wanted)
        return Parity(
            0.0 if same else float("nan"), 0.0 if same else float("inf"), "the layout, bit by bit"
        )

    return Problem(
        name=shape.name,
        cost=cost_of(KV_WRITE_OP, layout.shapes(), places, new, new, layout=layout),
        num_bytes=layout.num_bytes() + 2 * math.prod(size) * new.dtype.itemsize,
        make=make,
        bind=bind,
        check=check,
        why_not=functools.partial(_same_layout, layout.name),
    )


def _same_layout(name: str, impl: Any) -> str | None:
    """A kernel of kv_write may say in its `caps` which layouts it writes."""
    caps = getattr(impl, "caps", None)
    return None if caps is None or name in caps.layouts else f"does not support layout {name}"


LINEAR = OpBench(dataclasses.replace(OF_ROWS, parts=PARTS), lambda *at: [linear_problem(*at)])
GROUPED_LINEAR = OpBench(
    dataclasses.replace(OF_ROWS, parts=("gate_up", "down")),
    lambda *at: [grouped_linear_problem(*at)],
)
RMS_NORM = OpBench(OF_ROWS, lambda *at: [rms_norm_problem(*at)])
ROPE = OpBench(OF_ROWS, lambda *at: [rope_problem(*at)])
EMBEDDING = OpBench(OF_ROWS, lambda *at: [embedding_problem(*at)])
KV_WRITE = OpBench(WRITES, lambda *at: [kv_write_problem(*at)])
