"""Conformance suite for implementations of ops: any attention, rms_norm, rope, linear or embedding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import BUILTIN_LAYOUTS, KVLayout
from enginebay.ops.bound import AttentionImpl, EmbeddingOp, LinearOp, RmsNormOp, RopeOp
from enginebay.ops.caps import Env
from enginebay.ops.spec import RopeSpec
from enginebay.testing import oracle
from enginebay.testing.attention_cases import (
    AttentionCase,
    AttentionProblem,
    attention_cases,
    contents,
    make_problem,
)
from enginebay.testing.verdicts import InexactError

__all__ = [
    "ROPE_SPECS",
    "AttentionCase",
    "attention_cases",
    "check_attention",
    "check_embedding",
    "check_linear",
    "check_result",
    "check_rms_norm",
    "check_rope",
    "check_rows_are_independent",
    "preferred_layout",
    "run_attention",
    "why_not",
]

F32_BOUND = 1e-6
"""Error of f32 attention per unit of (1 + largest score) * largest value: eight roundings. A score's rounding error
grows with the score, and softmax turns it into a relative error of the weight."""

CPU = Env("cpu")

NARROW_FACTOR = 2.0
"""An implementation may err this often as much as f64 arithmetic that rounds weights and outputs to the dtype."""


def preferred_layout(impl: AttentionImpl) -> type[KVLayout]:
    """The first of the implementation's layouts that the core knows."""
    return BUILTIN_LAYOUTS[next(name for name in impl.caps.layouts if name in BUILTIN_LAYOUTS)]


def why_not(impl: AttentionImpl, case: AttentionCase, layout_type: type[KVLayout], env: Env) -> str | None:
    """The implementation's own reason not to serve a case, for a test to skip with, or None."""
    return impl.caps.why_not(env, case.spec, case.bucket, case.layout(layout_type))


def check_attention(
    impl: AttentionImpl, case: AttentionCase, layout_type: type[KVLayout], env: Env = CPU
) -> None:
    """Raise AssertionError when output, log-sum-exp or cache of a case are not what the contract says."""
    problem = make_problem(case, layout_type)
    out, _, lse, after = _run(impl, problem, env)
    _check_all(problem, out, after, lse)


def check_result(
    problem: AttentionProblem, out: np.ndarray, cache: dict[str, jax.Array], lse: np.ndarray | None
) -> None:
    """Raise AssertionError when what an implementation made of a problem is not what the contract says."""
    _check_all(problem, out, _contents(problem.layout, cache), lse)


_contents = jax.jit(contents, static_argnums=0)


def _check_all(
    problem: AttentionProblem,
    out: np.ndarray,
    after: tuple[jax.Array, jax.Array],
    lse: np.ndarray | None,
) -> None:
    """`after` is what is read from the cache afterwards."""
    _check_output(problem, out)
    if problem.case.spec.return_lse:
        assert lse is not None, f"{problem.case.name}: return_lse is set, but no log-sum-exp came back"
        _check_lse(problem, lse)
    _check_cache(problem, after)


def check_rows_are_independent(
    impl: AttentionImpl, case: AttentionCase, layout_type: type[KVLayout], env: Env = CPU
) -> None:
    """Raise AssertionError when the first row's output depends on what its neighbours hold."""
    problem, other = (make_problem(case, layout_type, seed=seed) for seed in (0, 1))
    mine = problem.token_rows == 0
    mixed = dataclasses.replace(
        other,
        case=problem.case,
        batch=problem.batch,
        cache=jax.tree.map(functools.partial(_first_row_of, problem), problem.cache, other.cache),
        q=_mine_of(mine, problem.q, other.q),
        k=_mine_of(mine, problem.k, other.k),
        v=_mine_of(mine, problem.v, other.v),
        sinks=problem.sinks,
    )
    first, second = (run_attention(impl, each, env)[0][mine] for each in (problem, mixed))
    assert first.tobytes() == second.tobytes(), f"{case.name}: the first row changes with its neighbours"


def _mine_of(mine: np.ndarray, own: jax.Array, other: jax.Array) -> jax.Array:
    return jax.device_put(np.where(mine[:, None, None], np.asarray(own), np.asarray(other)))


def _first_row_of(problem: AttentionProblem, mine: jax.Array, other: jax.Array) -> jax.Array:
    """`other` with the pages of the first row taken from `mine`: pages are the first axis of every layout's arrays."""
    pages = np.asarray(problem.batch.page_table)[0][: -(-problem.case.kv_lens[0] // problem.layout.page_size)]
    mixed = np.array(other)
    mixed[pages] = np.asarray(mine)[pages]
    return jax.device_put(mixed)


def run_attention(
    impl: AttentionImpl, problem: AttentionProblem, env: Env = CPU
) -> tuple[np.ndarray, dict[str, jax.Array], np.ndarray | None]:
    """One jitted call that donates the cache: (out, cache, log-sum-exp)."""
    out, cache, lse, _ = _run(impl, problem, env)
    return out, cache, lse


def _run(
    impl: AttentionImpl, problem: AttentionProblem, env: Env
) -> tuple[np.ndarray, dict[str, jax.Array], np.ndarray | None, tuple[jax.Array, jax.Array]]:
    """The same, and what is read from the cache afterwards: one program, as compiling is what checks cost."""
    spec, layout = problem.case.spec, problem.layout
    config = impl.default_config(env, spec, problem.case.bucket, layout)

    def step(q: Any, k: Any, v: Any, cache: Any, batch: Any, sinks: Any) -> Any:
        if spec.kv_shared:
            k = v = None
        elif "fused_write" not in impl.caps.features:
            cache, k, v = layout.write(cache, batch.slots, k, v), None, None
        out, after, lse = impl(q, k, v, cache, batch, spec=spec, layout=layout, config=config, sinks=sinks)
        return out, after, lse, contents(layout, after)

    cache = {name: np.asarray(array) for name, array in problem.cache.items()}
    call = jax.jit(step, donate_argnums=3)
    out, after, lse, read = call(problem.q, problem.k, problem.v, cache, problem.batch, problem.sinks)
    return np.asarray(out), dict(after), None if lse is None else np.asarray(lse), read


def _check_output(problem: AttentionProblem, out: np.ndarray) -> None:
    case = problem.case
    spec = case.spec
    expected_type = (problem.q.shape, jnp.dtype(spec.q_dtype))
    assert (out.shape, out.dtype) == expected_type, (
        f"{case.name}: {out.shape} {out.dtype}, expected {expected_type}"
    )
    got = out.astype(np.float64)
    padding = got[problem.token_rows < 0]
    assert not padding.any(), f"{case.name}: padding tokens give {np.abs(padding).max()}, expected exactly 0"
    exact, allowed, _ = _expected(problem)
    error = np.abs(got - exact).max(axis=(1, 2))
    _hold(
        error,
        allowed,
        lambda i: f"{case.name}, layout {problem.layout.name}: token {i} of row {problem.token_rows[i]}",
    )


def _hold(error: np.ndarray, allowed: np.ndarray | float, name_of: Callable[[int], str] | str) -> None:
    """Raise InexactError at the worst of `error` [places] unless each is within `allowed`; a NaN is the worst of all."""
    error, allowed = (x.reshape(-1) for x in np.broadcast_arrays(error, allowed))
    if (error <= allowed).all():
        return
    worst = int(np.argmax(np.where(np.isnan(error), np.inf, error - allowed)))
    where = name_of if isinstance(name_of, str) else name_of(worst)
    off, bound = float(error[worst]), float(allowed[worst])
    raise InexactError(f"{where} is off by {off:.3g}, allowed {bound:.3g}", off, bound)


def _expected(problem: AttentionProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(out f64 [T, Hq, D], allowed error [T], log-sum-exp [T, Hq]), 0 on padding."""
    case, spec = problem.case, problem.case.spec
    q = np.asarray(problem.q)
    exact, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
    allowed = np.zeros(q.shape[0])
    narrow = None if spec.q_dtype == "float32" else jnp.dtype(spec.q_dtype)
    sinks = None if problem.sinks is None else np.asarray(problem.sinks)
    rounding = 0.0
    for i, (keys, values) in enumerate(zip(problem.keys, problem.values, strict=True)):
        mine = problem.token_rows == i
        if not mine.any():
            continue
        exact[mine], lse[mine] = oracle.attend(q[mine], keys, values, spec, sinks=sinks)
        score = oracle.largest_score(q[mine], keys, spec)
        allowed[mine] = F32_BOUND * (1.0 + score) * np.abs(values.astype(np.float64)).max()
        if narrow is not None:
            rounded, _ = oracle.attend(q[mine], keys, values, spec, sinks=sinks, weights_dtype=narrow)
            rounding = max(rounding, float(np.abs(rounded - exact[mine]).max()))
    if case.constant_v and not spec.sinks:
        rounding = 0.5 * oracle.EPS[spec.q_dtype] if narrow is not None else 0.0
    return exact, allowed + NARROW_FACTOR * rounding, lse


def _check_lse(problem: AttentionProblem, lse: np.ndarray) -> None:
    case = problem.case
    expected = _expected(problem)[2]
    real = problem.token_rows >= 0
    largest = max(
        oracle.largest_score(np.asarray(problem.q)[real], keys, case.spec)
        for keys in problem.keys
        if keys.size
    )
    unit = F32_BOUND if case.spec.q_dtype == "float32" else oracle.EPS[case.spec.q_dtype]
    _hold(np.abs(lse[real] - expected[real]), unit * (1.0 + largest), f"{case.name}: log-sum-exp")


def _check_cache(problem: AttentionProblem, after: tuple[jax.Array, jax.Array]) -> None:
    """New tokens lie at their slots, and not a bit of anything else has changed."""
    layout, spec = problem.layout, problem.case.spec
    new = np.zeros(layout.num_pages * layout.page_size, bool)
    slots = np.asarray(problem.batch.slots)
    if not spec.kv_shared:
        new[slots[slots >= 0]] = True
    each = (problem.before, after, (problem.k, problem.v))
    for name, *arrays in zip("kv", *each, strict=True):
        old, now, fresh = map(np.asarray, arrays)
        changed = _bits(old[~new]) != _bits(now[~new])
        assert not changed.any(), (
            f"{problem.case.name}: {name} of {changed.any(axis=(1, 2)).sum()} other places changed"
        )
        if spec.kv_shared:
            continue
        assert (now[slots[slots >= 0]] == fresh[slots >= 0]).all(), (
            f"{problem.case.name}: new {name} are not at their slots"
        )


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape[:-1], -1)


ROPE_SPECS: dict[str, RopeSpec] = {
    "default": RopeSpec(10000.0, 64),
    "partial": RopeSpec(10000.0, 32),
    "linear": RopeSpec(10000.0, 64, "linear", factor=4.0),
    "llama3": RopeSpec(500000.0, 64, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeSpec(10000.0, 64, "yarn", 4.0, 2048),
    "yarn_untruncated": RopeSpec(150000.0, 64, "yarn", 32.0, 4096, truncate=False),
    "yarn_mscale": RopeSpec(10000.0, 64, "yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=1.0),
    "yarn_attention_factor": RopeSpec(10000.0, 64, "yarn", 40.0, 4096, attention_factor=1.3),
}


def check_rope(op: RopeOp, spec: RopeSpec, dtype: str) -> None:
    """Raise AssertionError when rotated features are off by more than rounding, angles included."""
    rng = np.random.default_rng(0)
    positions = np.array([0, 1, 7, 100, 1000, 4095], np.int32)
    x = rng.normal(size=(positions.size, 3, 64)).astype(jnp.dtype(dtype))
    got = np.asarray(jax.jit(functools.partial(op, spec=spec))(x, positions))
    assert (got.shape, got.dtype) == (x.shape, x.dtype), (
        f"{got.shape} {got.dtype}, expected {x.shape} {x.dtype}"
    )
    assert (got[..., spec.rotary_dim :] == x[..., spec.rotary_dim :]).all(), (
        "features past rotary_dim have changed"
    )
    factor = oracle.rope_frequencies(spec)[1]
    # An f32 angle of a radians is off by its own rounding and that of its frequency.
    unit = oracle.EPS["float32"] * (2.0 + positions) + oracle.EPS[dtype]
    allowed = unit * factor * np.abs(x.astype(np.float64)).max() * 2
    error = np.abs(got.astype(np.float64) - oracle.rope(x, positions, spec)).max(axis=(1, 2))
    _hold(error, allowed, lambda i: f"{spec.scaling} {dtype}, position {positions[i]}")


def check_rms_norm(op: RmsNormOp, dtype: str) -> None:
    """Raise AssertionError when normed rows are off by more than two roundings of the dtype."""
    rng = np.random.default_rng(0)
    for shape in ((5, 64), (3, 4, 32)):
        x = (
            rng.normal(size=shape) * np.logspace(-3, 2, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        ).astype(jnp.dtype(dtype))
        weight = rng.normal(size=shape[-1]).astype(jnp.dtype(dtype))
        got = np.asarray(jax.jit(functools.partial(op, eps=1e-5))(x, weight))
        assert (got.shape, got.dtype) == (x.shape, x.dtype), (
            f"{got.shape} {got.dtype}, expected {x.shape} {x.dtype}"
        )
        _assert_close(
            got, oracle.rms_norm(x, weight, eps=1e-5), 2 * max(oracle.EPS[dtype], 4e-7), f"rms_norm {dtype}"
        )


def check_linear(
    op: LinearOp, dtype: str, *, rows: int = 3, in_dims: tuple[int, ...] = (48,), **fields: Any
) -> None:
    """Raise AssertionError when a product is off by more than its f32 sum and one rounding.

    `fields` may hold out_dims (default (40,)), bias (bool) and out_dtype.
    """
    out_dims, out_dtype = fields.get("out_dims", (40,)), fields.get("out_dtype")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *in_dims)).astype(jnp.dtype(dtype))
    weight = rng.normal(size=(*out_dims, *in_dims)).astype(jnp.dtype(dtype))
    bias = rng.normal(size=out_dims).astype(jnp.dtype(dtype)) if fields.get("bias") else None
    got = np.asarray(jax.jit(functools.partial(op, out_dtype=out_dtype))(x, weight, bias))
    expected = oracle.linear(x, weight, bias)
    wanted = (expected.shape, jnp.dtype(out_dtype or dtype))
    assert (got.shape, got.dtype) == wanted, f"{got.shape} {got.dtype}, expected {wanted}"
    sums = oracle.linear(np.abs(x), np.abs(weight), None if bias is None else np.abs(bias))
    error = np.abs(got.astype(np.float64) - expected)
    allowed = oracle.EPS[str(wanted[1])] * np.abs(expected) + 4 * oracle.EPS["float32"] * sums
    _hold(error, allowed, f"linear {dtype} {rows} rows")


def check_embedding(op: EmbeddingOp, dtype: str) -> None:
    """Raise AssertionError unless each row is the table's, bit by bit."""
    table = np.random.default_rng(0).normal(size=(11, 8)).astype(jnp.dtype(dtype))
    ids = np.array([3, 0, 10, 3], np.int32)
    got = np.asarray(jax.jit(op)(table, ids))
    assert got.dtype == table.dtype
    assert got.tobytes() == table[ids].tobytes(), f"embedding {dtype}: rows differ from the table's"


def _assert_close(got: np.ndarray, expected: np.ndarray, relative: float, what: str) -> None:
    _hold(np.abs(got.astype(np.float64) - expected), relative * np.abs(expected), what)
