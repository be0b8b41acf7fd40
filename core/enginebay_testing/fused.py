"""Conformance suite for fused ops, which are compared with the float64 versions of their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import KVLayout
from enginebay.ops.rope import RopeKvWriteOp
from enginebay.ops.rotary import RopeSpec
from enginebay_testing import oracle
from enginebay_testing.kernels import ROPE_SPECS

__all__ = ["check_add_rms_norm", "check_rope_kv_write", "rope_kv_write_checks"]

POSITIONS = (0, 1, 7, 100, 1000, 4095)
SLOTS = (5, -1, 17, 3, 23, 0)
"""Slots of the tokens at these positions, in three pages of eight; -1: the token is dropped."""


def check_add_rms_norm(op: Callable[..., Any], dtype: str) -> None:
    """Raise AssertionError unless the sum equals the dtype's own sum bit by bit and the norm is
    within two roundings.
    """
    rng = np.random.default_rng(0)
    for shape in ((5, 64), (3, 40)):
        scale = np.logspace(-3, 2, shape[0])[:, None]
        x, residual = (rng.normal(size=(2, *shape)) * scale).astype(jnp.dtype(dtype))
        weight = rng.normal(size=shape[-1]).astype(jnp.dtype(dtype))
        step = jax.jit(functools.partial(op, eps=1e-5))
        normed, total = (np.asarray(array) for array in step(x, residual, weight))
        for name, got in (("norm", normed), ("sum", total)):
            wanted = (shape, x.dtype)
            assert (got.shape, got.dtype) == wanted, (
                f"{name}: {got.shape} {got.dtype}, expected {shape} {dtype}"
            )
        assert (total == x + residual).all(), (
            f"add_rms_norm {dtype}: the sum differs from that of {dtype}"
        )
        exact = oracle.rms_norm(total, weight, eps=1e-5)
        error = np.abs(normed.astype(np.float64) - exact)
        allowed = 2 * max(oracle.EPS[dtype], 4e-7) * np.abs(exact)
        assert (error <= allowed).all(), (
            f"add_rms_norm {dtype}: off by {(error - allowed).max():.3g} more than allowed"
        )


def check_rope_kv_write(
    op: RopeKvWriteOp, layout_type: type[KVLayout], spec: RopeSpec, dtype: str, *, group: int = 3
) -> None:
    """Raise AssertionError unless q and the written k are rotated, v is written unchanged, and no
    other place changes.

    Runs six tokens, and one token alone. One token has no slot, and every place that is not written
    holds NaN.
    """
    layout = layout_type(3, 8, 2, 64, dtype)
    rng = np.random.default_rng(0)
    steps = []
    for chosen in (slice(None), slice(0, 1), slice(1, 2)):
        positions, slots = (np.array(values, np.int32)[chosen] for values in (POSITIONS, SLOTS))
        shape = (positions.size, layout.num_kv_heads, layout.head_dim)
        q = rng.normal(size=(shape[0], group * shape[1], shape[2])).astype(jnp.dtype(dtype))
        k, v = rng.normal(size=(2, *shape)).astype(jnp.dtype(dtype))
        steps.append((q, k, v, positions, slots))
    poisoned = [
        {n: np.full(s.shape, np.nan, s.dtype) for n, s in layout.shapes().items()} for _ in steps
    ]
    # One program for all steps: it donates the caches, and then reads them.
    run = jax.jit(functools.partial(_turn_and_read, op, spec, layout), donate_argnums=0)
    for step, found in zip(steps, run(poisoned, steps), strict=True):
        _check_step(layout, spec, step, found)


def _turn_and_read(
    op: RopeKvWriteOp, spec: RopeSpec, layout: KVLayout, caches: Any, steps: Any
) -> Any:
    """Return for each step the rotated q, the cache, and k and v of all places."""
    found = []
    for cache, (q, k, v, positions, slots) in zip(caches, steps, strict=True):
        turned, after = op(q, k, v, cache, positions, slots, spec=spec, layout=layout)
        found.append((turned, after, layout.read(after, jnp.arange(layout.num_pages))))
    return found


def _check_step(layout: KVLayout, spec: RopeSpec, step: Any, found: Any) -> None:
    (q, k, v, positions, slots), (turned, _, read) = step, found
    what = f"{layout.name} {spec.scaling} {layout.dtype}, {len(q)} tokens"
    _check_turned(np.asarray(turned), q, positions, spec, f"q of {what}")
    keys, values = (np.asarray(x).reshape(-1, *k.shape[1:]) for x in read)
    written = slots >= 0
    places = slots[written]
    _check_turned(keys[places], k[written], positions[written], spec, f"k of {what}")
    assert (values[places] == v[written]).all(), f"v of {what} is not at its slots"
    others = np.delete(np.arange(keys.shape[0]), places)
    for name, array in (("k", keys), ("v", values)):
        assert np.isnan(array[others].astype(np.float64)).all(), (
            f"{name} of {what}: a place that was not written changed"
        )


def _check_turned(
    got: np.ndarray, x: np.ndarray, positions: np.ndarray, spec: RopeSpec, what: str
) -> None:
    assert (got.shape, got.dtype) == (x.shape, x.dtype), (
        f"{what}: {got.shape} {got.dtype}, expected {x.shape} {x.dtype}"
    )
    if not x.size:
        return
    assert (got[..., spec.rotary_dim :] == x[..., spec.rotary_dim :]).all(), (
        f"{what}: features past rotary_dim changed"
    )
    factor = oracle.rope_frequencies(spec)[1]
    # An f32 angle in radians is off by its own rounding and by that of its frequency.
    unit = oracle.EPS["float32"] * (2.0 + positions) + oracle.EPS[str(x.dtype)]
    allowed = unit * factor * np.abs(x.astype(np.float64)).max() * 2
    error = np.abs(got.astype(np.float64) - oracle.rope(x, positions, spec)).max(axis=(1, 2))
    assert (error <= allowed).all(), f"{what}: off by {error}, allowed {allowed}"


def rope_kv_write_checks(
    op: RopeKvWriteOp, layouts: Iterable[type[KVLayout]], dtypes: Iterable[str]
) -> Iterable[tuple[str, Callable[[], None]]]:
    """Return every check by name: each layout, each dtype in the first layout, each frequency
    scaling.
    """
    run: Any = functools.partial(functools.partial, check_rope_kv_write, op)
    kinds = list(layouts)
    for kind in kinds:
        yield f"rope_kv_write[{kind.__name__}]", run(kind, ROPE_SPECS["default"], "float32")
    for dtype in dtypes:
        yield f"rope_kv_write[{dtype}]", run(kinds[0], ROPE_SPECS["default"], dtype, group=1)
    for name, spec in ROPE_SPECS.items():
        yield f"rope_kv_write[{name}]", run(kinds[0], spec, "float32")
