"""How quantised caches store heads: what is read, what a second write stores, and the bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.ops.kv_storage import (
    KV_STORAGES,
    MAX_VALUE,
    MIN_SCALE,
    QUANTIZE,
    TOLERANCES,
    QuantizedHeads,
    pack_halves,
    unpack_halves,
)
from enginebay_testing.layouts import check_layout
from tests.layouts import BUILTIN_LAYOUTS

HEADS, WIDTH = 2048, 64
STORAGES = sorted(KV_STORAGES)


@functools.cache
def programs(storage: str) -> tuple[jax.stages.Wrapped, jax.stages.Wrapped]:
    return jax.jit(QUANTIZE[storage]), jax.jit(QuantizedHeads.values)


def same(left: QuantizedHeads, right: QuantizedHeads) -> bool:
    arrays = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in arrays)


def hard_heads() -> Iterator[tuple[str, np.ndarray]]:
    """Heads f64 [HEADS, WIDTH] by name, each with magnitudes that all storages keep."""
    rng = np.random.default_rng(0)
    shape, each = (HEADS, WIDTH), (HEADS, 1)
    noise = rng.normal(size=shape)
    yield "zeros", np.zeros(shape)
    yield "normal", noise
    yield (
        "constants",
        np.broadcast_to(rng.normal(size=each) * 2.0 ** rng.integers(-60, 90, each), shape),
    )
    for power in range(0, 24, 3):  # from offsets that a zero point holds to those that hide it
        yield f"offset 2**{power}", noise + 2.0**power * rng.choice([-1, 1], size=each)
    outlier = noise.copy()
    outlier[np.arange(HEADS), rng.integers(0, WIDTH, HEADS)] *= 1e4
    yield "one outlier", outlier
    yield "two values", np.where(rng.random(shape) < 0.5, noise[:, :1], noise[:, 1:2])
    yield "many magnitudes", noise * 2.0 ** rng.integers(-50, 50, shape)
    yield "halves of codes", rng.integers(0, 31, shape) / 2 + rng.integers(-30000, 30000, each) / 2
    yield "last bits", 1 + (rng.random(shape) < 0.1) * 2.0 ** rng.integers(-23, 0, each)
    yield "positive", np.abs(noise) + 1e-3
    yield "magnitudes of f32", noise * 2.0 ** rng.integers(-80, 110, each)


@pytest.mark.parametrize("storage", STORAGES)
def test_values_are_within_the_tolerance_and_written_again_they_give_the_same_bytes(
    storage: str,
) -> None:
    quantize, values = programs(storage)
    for name, heads in hard_heads():
        x = heads.astype(np.float32)
        stored = quantize(x)
        read = values(stored)
        largest = np.abs(x).max(axis=-1, keepdims=True)
        error = np.abs(np.asarray(read, np.float64) - x)
        assert (error <= TOLERANCES[storage] * largest).all(), name
        assert same(stored, quantize(read)), name


@pytest.mark.parametrize("storage", STORAGES)
def test_tiny_heads_are_zeros_and_a_head_that_is_not_finite_stays_so(storage: str) -> None:
    quantize, values = programs(storage)
    noise = np.random.default_rng(1).normal(size=(HEADS, WIDTH))
    for power in (*range(-149, -84, 4), 100, 110, *range(114, 128)):
        with np.errstate(over="ignore"):
            x = (noise * 2.0**power).astype(np.float32)
        stored = quantize(x)
        read = np.asarray(values(stored))
        assert same(stored, quantize(read)), f"2**{power}"
        largest = np.abs(x).max(axis=-1)
        assert not read[largest < MIN_SCALE / 2].any()
        assert np.isnan(read[~(largest < 2 * MAX_VALUE)]).all()
        assert np.isfinite(read[largest < MAX_VALUE / 2]).all()
    bad = np.ones((3, WIDTH), np.float32)
    bad[np.arange(3), 5] = np.nan, np.inf, -np.inf
    assert np.isnan(values(quantize(bad))).all()
    assert same(quantize(bad), quantize(values(quantize(bad))))


@pytest.mark.parametrize("width", [8, 5])
def test_halves_of_a_head_share_bytes(width: int) -> None:
    codes = np.random.default_rng(2).integers(0, 16, (3, width), dtype=np.uint8)
    packed = pack_halves(jnp.asarray(codes))
    assert packed.shape == (3, -(-width // 2))
    assert np.array_equal(packed[:, 0], codes[:, 0] + 16 * codes[:, -(-width // 2)])
    assert np.array_equal(unpack_halves(packed, width), codes)


@pytest.mark.long
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", sorted(BUILTIN_LAYOUTS))
def test_quantised_layouts_keep_their_contract(layout: str, storage: str) -> None:
    kind = BUILTIN_LAYOUTS[layout]
    check_layout(kind(3, 4, 4, 8, "bfloat16", storage=storage))


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", sorted(BUILTIN_LAYOUTS))
@pytest.mark.parametrize("prefix", [None, 6])
def test_quantised_layouts_keep_their_contract_in_every_form(
    layout: str, storage: str, prefix: int | None
) -> None:
    kind, heads = BUILTIN_LAYOUTS[layout], 1 if prefix else 4
    for dtype in ("float32", "float16"):
        check_layout(kind(3, 4, heads, 8, dtype, prefix, storage))


@pytest.mark.parametrize(("storage", "least"), [("int8", 1.9), ("fp8", 1.9), ("uint4", 3.5)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("layout", sorted(BUILTIN_LAYOUTS))
def test_a_byte_holds_more_tokens_than_in_bfloat16(
    layout: str, head_dim: int, storage: str, least: float
) -> None:
    kind = BUILTIN_LAYOUTS[layout]
    plain = kind(16, 64, 8, head_dim, "bfloat16")
    small = kind(16, 64, 8, head_dim, "bfloat16", storage=storage)
    assert plain.num_bytes() / small.num_bytes() >= least
