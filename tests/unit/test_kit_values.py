"""The cases of the plain ops have the sizes and values that faulty kernels need to show."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops.caps import Env
from enginebay.plugins.registry import load_registry
from enginebay_lora.xla import lora
from enginebay_testing.op_kit import CaseBudget, OpCase, kit_of
from enginebay_testing.verdicts import FAULTS, judge
from enginebay_xla.grouped_linear import grouped_linear
from enginebay_xla.linear import embedding, linear
from enginebay_xla.norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.long

REGISTRY = load_registry()


@functools.cache
def extent_of(op: str, package: str) -> CaseBudget:
    entries = (e for e in REGISTRY.entries if e.kind == "kernel" and e.op == op)
    entry = next(e for e in entries if e.package == package)
    return CaseBudget(triples=False).of(entry)


def cases(op: str, kernel: Any, *parts: str) -> list[OpCase]:
    """Return the default cases whose names have all `parts`."""
    extent = extent_of(op, "lora" if op == "lora" else "xla")
    found = kit_of(REGISTRY, op).cases(kernel, Env("cpu"), [], extent)
    return [case for case in found if all(part in case.name for part in parts)]


def failure(op: str, kernel: Any, parts: Sequence[str], most: int = 6) -> str:
    """Return what the first failing one of the cases says, or ""."""
    chosen = cases(op, kernel, *parts)
    assert chosen, f"no case of {op} has {parts} in its name"
    for case in chosen[:most]:
        outcome = judge(case.run)
        if outcome.verdict in FAULTS:
            return f"{outcome.verdict}: {outcome.detail}"
    return ""


def on_host(function: Callable[..., np.ndarray], like: jax.Array, *arrays: jax.Array) -> jax.Array:
    """Return what a function with a memory makes of arrays."""
    shape = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return jax.pure_callback(function, shape, *arrays, vmap_method="sequential")


def last_result(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a kernel that returns its first result for equal shapes."""
    kept: dict[Any, np.ndarray] = {}

    def first(array: np.ndarray) -> np.ndarray:
        return kept.setdefault((array.shape, str(array.dtype)), np.array(array))

    def faulty(*arrays: Any, **static: Any) -> jax.Array:
        result = kernel(*arrays, **static)
        return on_host(first, result, result)

    return faulty


def stale_rows(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a kernel that leaves the last eighth of its rows as they were."""
    kept: dict[Any, np.ndarray] = {}

    def some(array: np.ndarray) -> np.ndarray:
        array = np.array(array)
        rows = -(-len(array) * 7 // 8)
        before = kept.get((array.shape, str(array.dtype)), array)
        kept[array.shape, str(array.dtype)] = array
        return np.concatenate([array[:rows], before[rows:]])

    def faulty(*arrays: Any, **static: Any) -> jax.Array:
        result = kernel(*arrays, **static)
        return on_host(some, result, result)

    return faulty


ONE_RESULT = {
    "linear": (linear, "rows_17"),
    "grouped_linear": (grouped_linear, "grouped_linear[float32"),
    "embedding": (embedding, "tokens_17"),
    "rms_norm": (rms_norm, "rows_17"),
    "lora": (lora, "tokens_33"),
}


@pytest.mark.parametrize("op", ONE_RESULT)
def test_a_kernel_that_returns_its_last_result_is_found(op: str) -> None:
    kernel, part = ONE_RESULT[op]
    assert failure(op, last_result(kernel), [part])


@pytest.mark.parametrize("op", ONE_RESULT)
def test_a_kernel_that_does_not_write_its_last_rows_is_found(op: str) -> None:
    kernel, part = ONE_RESULT[op]
    assert failure(op, stale_rows(kernel), [part])


def past(size: int, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a kernel that writes only the first `size` rows."""

    def faulty(*arrays: Any, **static: Any) -> jax.Array:
        out = kernel(*arrays, **static)
        return out.at[size:].set(0)

    return faulty


@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "size", "part"),
    [
        ("linear", 256, "rows_513"),
        ("linear", 512, "rows_513-outputs_65"),
        ("grouped_linear", 256, "grouped_linear[float32"),
        ("grouped_linear", 256, "quantized_grouped_linear[float32"),
        ("embedding", 512, "tokens_513"),
        ("embedding", 512, "quantized_embedding[weights_int4"),
        ("rms_norm", 512, "rows_513"),
        ("lora", 512, "tokens_513"),
    ],
)
def test_rows_past_a_block_are_checked(op: str, size: int, part: str) -> None:
    right = {"linear": linear, "grouped_linear": grouped_linear, "embedding": embedding}
    kernel = {**right, "rms_norm": rms_norm, "lora": lora}[op]
    assert failure(op, past(size, kernel), [part], most=40)


def test_a_norm_of_an_unrounded_sum_is_found() -> None:
    def faulty(x: jax.Array, residual: jax.Array, weight: jax.Array, *, eps: float) -> Any:
        wide = x.astype(jnp.float32) + residual.astype(jnp.float32)
        normed = rms_norm(wide, weight.astype(jnp.float32), eps=eps)
        return normed.astype(x.dtype), wide.astype(x.dtype)

    assert "before its rounding" in failure("add_rms_norm", faulty, ["size_halves", "bfloat16"])
    assert not failure("add_rms_norm", add_rms_norm, ["size_halves", "bfloat16"])


def test_a_missing_bias_and_a_mixed_row_are_named() -> None:
    def unbiased(x: jax.Array, weight: jax.Array, bias: Any = None, **static: Any) -> jax.Array:
        return linear(x, weight, None, **static)

    def rolled(*arrays: Any, **static: Any) -> jax.Array:
        return jnp.roll(linear(*arrays, **static), 1, axis=0)

    assert "row 0, output 0 (the bias is missing)" in failure(
        "linear", unbiased, ["linear[float32", "bias_plain"]
    )
    assert "has the result of finite row 16" in failure("linear", rolled, ["linear[float32", "17"])


def test_rows_of_zeros_that_give_nan_with_rounded_inputs_are_found() -> None:
    def faulty(x: jax.Array, weight: Any, bias: Any = None, **static: Any) -> jax.Array:
        rows = x.reshape(x.shape[0], -1).astype(jnp.float32)
        scales = jnp.abs(rows).max(axis=1)
        out = linear(x, weight, bias, **static)
        return jnp.where((scales == 0).reshape(-1, *[1] * (out.ndim - 1)), jnp.nan, out)

    assert "row 0" in failure("linear", faulty, ["quantized_linear[", "special_rows"])
    assert "row 0" in failure("linear", faulty, ["linear[float32", "special_rows"])


def narrow_sum(parts: jax.Array, dtype: Any) -> jax.Array:
    """Return the sum over axis 0, rounded to `dtype` after each term."""
    add = lambda total, part: ((total + part).astype(dtype), None)  # noqa: E731
    return jax.lax.scan(add, jnp.zeros(parts.shape[1:], dtype), parts.astype(dtype))[0]


def test_groups_of_a_quantised_weight_summed_in_16_bits_are_found() -> None:
    def faulty(x: jax.Array, weight: Any, bias: Any = None, **static: Any) -> jax.Array:
        if not hasattr(weight, "scales") or x.dtype == jnp.float32:
            return linear(x, weight, bias, **static)
        groups = weight.scales.shape[-1]
        matrix = weight.dequantized().reshape(*weight.scales.shape, -1)
        rows = x.reshape(x.shape[0], groups, -1).astype(jnp.float32)
        sums = narrow_sum(jnp.einsum("tgi,...gi->gt...", rows, matrix), x.dtype)
        sums = sums.astype(jnp.float32) + (0 if bias is None else bias.astype(jnp.float32))
        return sums.astype(static["out_dtype"] or x.dtype)

    assert "quantized linear" in failure("linear", faulty, ["quantized_linear[bf", "groups_65"])


def test_an_adapters_ranks_summed_in_16_bits_are_found() -> None:
    def faulty(y: Any, x: Any, a: Any, b: Any, places: Any, **how: Any) -> jax.Array:
        slot, tokens = jnp.maximum(places - 1, 0), len(x)
        if a.shape[1] > 1 or not tokens:
            return lora(y, x, a, b, places, **how)
        rows, down = (each.reshape(*each.shape[:n], -1) for each, n in ((x, 1), (a[:, 0], 2)))
        shrunk = jnp.einsum("ti,tri->rt", rows, down[slot], preferred_element_type=jnp.float32)
        up = jnp.moveaxis(b.reshape(*b.shape[:2], -1)[slot], 1, 0)
        sums = narrow_sum(shrunk.astype(x.dtype)[..., None] * up, jnp.bfloat16)
        out = (y.astype(jnp.float32) + sums.reshape(y.shape)).astype(y.dtype)
        return jnp.where((places > 0).reshape(-1, *[1] * (y.ndim - 1)), out, y)

    assert "lora" in failure("lora", faulty, ["lora[bfloat16", "y_dtype_float32"], most=9)
    assert "lora" in failure("lora", faulty, ["lora[float32"], most=40)


def test_likely_mistakes_with_quantised_weights_are_named() -> None:
    def no_points(x: jax.Array, weight: Any, *others: Any, **static: Any) -> jax.Array:
        if hasattr(weight, "zero_points"):
            weight = dataclasses.replace(weight, zero_points=None)
        return linear(x, weight, *others, **static)

    def one_scale(x: jax.Array, weight: Any, *others: Any, **static: Any) -> jax.Array:
        if hasattr(weight, "scales"):
            same = jnp.broadcast_to(weight.scales[..., :1], weight.scales.shape)
            weight = dataclasses.replace(weight, scales=same)
        return linear(x, weight, *others, **static)

    parts = ["quantized_linear[float32-weights_uint4"]
    assert "the zero points are missing" in failure("linear", no_points, parts)
    assert "all groups have the scale of the first" in failure("linear", one_scale, parts)


@pytest.mark.parametrize(
    "op", ["linear", "grouped_linear", "embedding", "rms_norm", "add_rms_norm", "lora"]
)
def test_each_op_has_sizes_at_and_past_powers_of_two_with_all(op: str) -> None:
    extent = dataclasses.replace(extent_of(op, "lora" if op == "lora" else "xla"), triples=True)
    every = kit_of(REGISTRY, op).cases(lora, Env("cpu"), [], extent)
    names = " ".join(case.name for case in every)
    axis = {"linear": "inputs", "grouped_linear": "inputs", "lora": "rank"}.get(op, "features")
    for size in (32, 33, 128) if op == "lora" else (255, 256, 257, 2049):
        assert f"{axis}_{size}" in names


def of_sixteen_bits(x: jax.Array, weight: jax.Array, *rest: Any, **static: Any) -> jax.Array:
    """Number outputs with 16 bits."""
    outputs = jnp.arange(weight.shape[0]) % 65_536
    return linear(x, weight[outputs], *rest, **static)


def test_outputs_that_16_bits_do_not_number_are_checked() -> None:
    assert "output 65536" in failure("linear", of_sixteen_bits, ["outputs_65609"])


def with_the_ids_before(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Read the rows that the call before asked for."""
    kept: dict[Any, np.ndarray] = IDS

    def before(now: np.ndarray) -> np.ndarray:
        found = kept.get(now.shape, np.array(now))
        kept[now.shape] = np.array(now)
        return found

    return embedding(table, on_host(before, ids, ids))


IDS: dict[Any, np.ndarray] = {}


def test_a_kernel_that_uses_the_ids_of_an_earlier_call_is_found() -> None:
    assert failure("embedding", with_the_ids_before, ["tokens_17"])


def test_a_quantised_embedding_of_no_tokens_is_checked_and_right() -> None:
    assert not failure("embedding", embedding, ["quantized_embedding", "tokens_0"])
