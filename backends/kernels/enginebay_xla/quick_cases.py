"""Quick cases of the ops without phases. An implementation that is given by hand runs them before
it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from enginebay.compose.quick_cases import CheckSetting, QuickCase
from enginebay.contracts.cache import KVLayout
from enginebay.ops.batches import derive_batch
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import Bucket

ROPE_SPECS = {
    "default": RopeSpec(10000.0, 64),
    "partial": RopeSpec(10000.0, 32),
    "llama3": RopeSpec(
        500000.0, 64, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "yarn": RopeSpec(10000.0, 64, "yarn", 4.0, 2048),
}
POSITIONS = np.array([0, 1, 7, 100, 1000, 4095], np.int32)
SLOTS = np.array([5, -1, 17, 3, 23, 0], np.int32)
"""Slots of tokens in three pages of eight; one slot is negative, so its token is dropped."""

SAMPLE_ROWS, VOCABS = 48, (40, 700)


def _random(dtype: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(shape))
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def linear_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield cases with and without a bias, with several dimensions, and with a wider result."""
    cases: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, str | None]] = {
        "3 rows": ((3, 48), (40,), False, None),
        "1 row": ((1, 48), (40,), False, None),
        "bias": ((3, 48), (40,), True, None),
        "heads out": ((3, 48), (5, 8), False, None),
        "heads in": ((3, 6, 8), (40,), False, None),
        "to float32": ((3, 48), (40,), False, "float32"),
    }
    for name, (x_shape, out_dims, has_bias, out_dtype) in cases.items():
        x = _random(setting.dtype, *x_shape)
        weight = _random(setting.dtype, *out_dims, *x_shape[1:])
        bias = _random(setting.dtype, *out_dims) if has_bias else None

        def run(impl: Any, *inputs: Any, out_dtype: str | None = out_dtype) -> dict[str, jax.Array]:
            return {"out": impl(*inputs, out_dtype=out_dtype)}

        yield QuickCase(f"linear {setting.dtype} {name}", run, (x, weight, bias))


def grouped_linear_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield cases of groups with no row, one row and many rows, and of rows without a group."""
    for name, sizes in (("few", (0, 3, 1, 0)), ("many", (40, 0, 1, 90)), ("none", (0, 0, 0, 0))):
        x = _random(setting.dtype, sum(sizes) + 2, 48)
        weight = _random(setting.dtype, len(sizes), 40, 48)
        yield QuickCase(
            f"grouped_linear {setting.dtype} {name}",
            lambda impl, *inputs: {"out": impl(*inputs)},
            (x, weight, np.array(sizes, np.int32)),
        )


def short_conv_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield cases of first and later chunks, of one token and of many, with padding, with and
    without bias.
    """
    q_lens, kv_lens = np.array([1, 5, 2, 7, 0], np.int32), np.array([9, 5, 4, 40, 0], np.int32)
    table = np.array([[3], [1], [0], [5], [0]], np.int32)
    steps = {
        "chunks": (Bucket(18, 5, 1, 18, 64), q_lens, kv_lens, 18),
        "one token": (Bucket(5, 5, 1, 1, 64, "decode"), np.minimum(q_lens, 1), kv_lens, 5),
    }
    for name, (bucket, new, total, num_tokens) in steps.items():
        for taps, has_bias in ((3, False), (4, True)):

            def run(
                impl: Any,
                x: Any,
                weight: Any,
                bias: Any,
                inputs: Any,
                *,
                rows: Any = (bucket, new, total),
            ) -> dict[str, jax.Array]:
                batch = derive_batch(
                    jnp.asarray(rows[1]), jnp.asarray(rows[2]), jnp.asarray(table), 64, rows[0]
                )
                out, state = impl(x, weight, bias, {"inputs": inputs}, batch)
                real = batch.seq_ids < len(table)
                return {"out": jnp.where(real[:, None], out, 0), **state}

            arrays = (
                _random(setting.dtype, num_tokens, 24),
                _random(setting.dtype, 24, taps),
                _random(setting.dtype, 24) if has_bias else None,
                _random(setting.dtype, 6, taps - 1, 24),
            )
            title = f"short_conv {setting.dtype} of {taps}, {name}"
            yield QuickCase(title, run, arrays, frozenset({"inputs"}))


def ssd_scan_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield cases of first and later chunks, of one token and of many, with padding, with and
    without `skip`.
    """
    q_lens, kv_lens = np.array([1, 5, 2, 70, 0], np.int32), np.array([9, 5, 4, 90, 0], np.int32)
    table = np.array([[3], [1], [0], [5], [0]], np.int32)
    steps = {
        "chunks": (Bucket(80, 5, 1, 80, 128), q_lens, kv_lens, 80),
        "one token": (Bucket(5, 5, 1, 1, 128, "decode"), np.minimum(q_lens, 1), kv_lens, 5),
    }
    for name, (bucket, new, total, num_tokens) in steps.items():
        for groups, has_skip in ((1, False), (2, True)):

            def run(
                impl: Any, *inputs: Any, rows: Any = (bucket, new, total)
            ) -> dict[str, jax.Array]:
                batch = derive_batch(
                    jnp.asarray(rows[1]), jnp.asarray(rows[2]), jnp.asarray(table), 128, rows[0]
                )
                out, state = impl(*inputs[:-1], {"scan": inputs[-1]}, batch)
                real = batch.seq_ids < len(table)
                return {"out": jnp.where(real[:, None, None], out, 0), **state}

            arrays = (
                _random(setting.dtype, num_tokens, 4, 8),
                np.exp(_random("float32", num_tokens, 4) - 2),
                -np.exp(_random("float32", 4)),
                _random(setting.dtype, num_tokens, groups, 16),
                _random(setting.dtype, groups, num_tokens, 16).swapaxes(0, 1),
                _random(setting.dtype, 4) if has_skip else None,
                _random("float32", 6, 4, 8, 16),
            )
            yield QuickCase(f"ssd_scan {setting.dtype} of {groups}, {name}", run, arrays)


def embedding_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case that looks up rows of a small table, one of them twice."""
    inputs = (_random(setting.dtype, 11, 8), np.array([3, 0, 10, 3], np.int32))
    yield QuickCase("embedding", lambda impl, *x: {"out": impl(*x)}, inputs, frozenset({"out"}))


def rms_norm_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case with rows of small and large numbers and with an array of several heads."""

    def run(impl: Any, x: Any, heads: Any, *weights: Any) -> dict[str, jax.Array]:
        return {
            "rows": impl(x, weights[0], eps=1e-5),
            "heads": impl(heads, weights[1], eps=1e-5),
        }

    shapes = ((5, 64), (3, 4, 32), (64,), (32,))
    x, *others = (_random(setting.dtype, *shape) for shape in shapes)
    yield QuickCase("rms_norm", run, (_spread(x), *others))


def _spread(x: np.ndarray) -> np.ndarray:
    return (x * np.logspace(-3, 2, len(x))[:, None]).astype(x.dtype)


def add_rms_norm_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case with rows of small and large numbers."""

    def run(impl: Any, *inputs: Any) -> dict[str, jax.Array]:
        normed, total = impl(*inputs, eps=1e-5)
        return {"norm": normed, "sum": total}

    x, residual = _random(setting.dtype, 2, 5, 64)
    inputs = (_spread(x), _spread(residual), _random(setting.dtype, 64))
    yield QuickCase("add_rms_norm", run, inputs, frozenset({"sum"}))


def rope_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case for each rule of rotary frequencies."""
    x = _random(setting.dtype, len(POSITIONS), 3, 64)
    for name, spec in ROPE_SPECS.items():

        def run(impl: Any, *inputs: Any, spec: RopeSpec = spec) -> dict[str, jax.Array]:
            return {"out": impl(*inputs, spec=spec)}

        yield QuickCase(f"rope, {name}", run, (x, POSITIONS))


def _poisoned(layout: KVLayout) -> dict[str, jax.Array]:
    """Return a cache that is NaN everywhere."""
    return {n: jnp.full(s.shape, jnp.nan, s.dtype) for n, s in layout.shapes().items()}


def _contents(layout: KVLayout, cache: Any) -> dict[str, jax.Array]:
    k, v = layout.read(cache, jnp.arange(layout.num_pages))
    return {"k": k, "v": v}


def kv_write_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case that writes several tokens, one of which is dropped, and a case that writes a
    single token.
    """
    layout = setting.layout_type(3, 8, 2, 16, "float32")

    def run(impl: Any, *inputs: Any) -> dict[str, jax.Array]:
        return _contents(layout, impl(_poisoned(layout), *inputs, layout=layout))

    for count in (len(SLOTS), 1):
        inputs = (SLOTS[:count], *_random("float32", 2, count, 2, 16))
        yield QuickCase(f"kv_write of {count}", run, inputs, frozenset({"k", "v"}))


def rope_kv_write_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case for each rule of rotary frequencies; one token of each case is dropped."""
    layout = setting.layout_type(3, 8, 2, 64, setting.dtype)
    q = _random(setting.dtype, len(SLOTS), 6, 64)
    k, v = _random(setting.dtype, 2, len(SLOTS), 2, 64)
    for name, spec in ROPE_SPECS.items():

        def run(impl: Any, *inputs: Any, spec: RopeSpec = spec) -> dict[str, jax.Array]:
            where = (_poisoned(layout), POSITIONS, SLOTS)
            turned, cache = impl(*inputs, *where, spec=spec, layout=layout)
            return {"q": turned, **_contents(layout, cache)}

        yield QuickCase(f"rope_kv_write, {name}", run, (q, k, v), frozenset({"v"}))


def sample_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case for each of two vocabulary sizes. Its rows set no sampling parameter, each one
    alone, or all of them.
    """
    rows = np.arange(SAMPLE_ROWS)
    for vocab in VOCABS:
        rng = np.random.default_rng(vocab)
        logits = rng.normal(size=(SAMPLE_ROWS, vocab)) * np.array([3.0, 1.0, 0.25])[rows % 3, None]
        logits[1::5, ::2] = -np.inf
        z = (logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
        seeds = rng.integers(0, 2**32, (SAMPLE_ROWS, 2), dtype=np.uint32)
        columns = {
            "top_k": np.array([vocab, 5, vocab, vocab, 20, 1, vocab * 7 // 8], np.int32)[rows % 7],
            "top_p": np.array([1.0, 1.0, 0.8, 1.0, 0.7], np.float32)[rows % 5],
            "min_p": np.array([0.0, 0.0, 0.0, 0.05], np.float32)[rows % 4],
        }

        def run(impl: Any, z: Any, seeds: Any, columns: Any) -> dict[str, jax.Array]:
            return {"token": impl(z, seeds, **columns)}

        yield QuickCase(f"sample of {vocab}", run, (z, seeds, columns))


def _between_devices(
    name: str, setting: CheckSetting, rows: int, **keywords: Any
) -> Iterator[QuickCase]:
    """Yield a case over two devices, or over one where there is only one."""
    devices = jax.local_devices()[:2]
    mesh = Mesh(np.array(devices), ("devices",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("devices")

    def run(impl: Any, x: Any) -> dict[str, jax.Array]:
        call = functools.partial(impl, axes=("devices",), **keywords)
        return {
            "out": jax.shard_map(call, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)(
                x
            )
        }

    yield QuickCase(f"{name} {setting.dtype}", run, (_random(setting.dtype, rows, 6),))


def all_reduce_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case that sums two arrays."""
    yield from _between_devices("all_reduce", setting, 4)


def all_gather_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case that concatenates along the last axis."""
    yield from _between_devices("all_gather", setting, 4, dim=1)


def all_to_all_cases(setting: CheckSetting) -> Iterator[QuickCase]:
    """Yield a case with two rows per device."""
    yield from _between_devices("all_to_all", setting, 8)
