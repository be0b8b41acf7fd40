"""Conformance suite for implementations of ops: attention, rms_norm, rope, linear, embedding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import KVLayout
from enginebay.ops.bound import AttentionImpl
from enginebay.ops.caps import Env
from enginebay.ops.rope import RopeOp
from enginebay.ops.rotary import RopeSpec
from enginebay_testing import oracle
from enginebay_testing.attention_cases import AttentionCase, attention_cases
from enginebay_testing.attention_causes import likely_cause
from enginebay_testing.attention_inputs import (
    AttentionInputs,
    compared_tokens,
    make_problem,
    read_contents,
)
from enginebay_testing.attention_program import AttentionProgram
from enginebay_testing.layouts import allowed_errors, installed_layouts
from enginebay_testing.verdicts import InexactError

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
    "why_not_case",
]

F32_BOUND = 1e-6
"""Allowed error of f32 attention per unit of (1 + largest score) * largest value: eight roundings.
A score's rounding error grows with the score, and softmax turns it into a relative error of the
weight.
"""

CPU = Env("cpu")

RMS_FACTOR = 1.4
"""The same for the root mean square of the errors, which shows an accumulator of 16 bits."""

NARROW_FACTOR = 2.0
"""Allowed multiple of the error of f64 arithmetic with rounded weights and outputs."""


def preferred_layout(impl: AttentionImpl) -> type[KVLayout]:
    """Return the first layout of the implementation that is installed."""
    known = installed_layouts()
    return known[next(name for name in impl.caps.layouts if name in known)]


def why_not_case(
    impl: AttentionImpl, case: AttentionCase, layout_type: type[KVLayout], env: Env
) -> str | None:
    """Return the implementation's own reason not to support a case, or None."""
    return impl.caps.why_not(env, case.spec, case.bucket, case.layout(layout_type))


def check_attention(
    impl: AttentionImpl,
    case: AttentionCase,
    layout_type: type[KVLayout],
    env: Env = CPU,
    *,
    quickly: bool = False,
) -> None:
    """Raise AssertionError when the output, log-sum-exp or cache of a case breaks the contract."""
    problem = make_problem(case, layout_type)
    result = AttentionProgram(impl, case, layout_type, env, quickly=quickly)(problem)
    check_result(problem, result.out, result.cache, result.lse)


def check_result(
    problem: AttentionInputs, out: np.ndarray, cache: Mapping[str, Any], lse: np.ndarray | None
) -> None:
    """Raise AssertionError when an implementation's results of a problem break the contract."""
    expected = expected_of(problem)
    _check_output(problem, expected, out)
    if problem.case.spec.return_lse:
        assert lse is not None, (
            f"{problem.case.name}: return_lse is set, but no log-sum-exp was returned"
        )
        _check_lse(problem, expected, lse)
    _check_cache(problem, cache)


def check_rows_are_independent(
    impl: AttentionImpl, case: AttentionCase, layout_type: type[KVLayout], env: Env = CPU
) -> None:
    """Raise AssertionError when the first row's output depends on the other rows."""
    problem, mixed = with_other_neighbours(case, layout_type)
    mine = problem.token_rows == 0
    first, second = (run_attention(impl, each, env)[0][mine] for each in (problem, mixed))
    assert first.tobytes() == second.tobytes(), (
        f"{case.name}: the output of row 0 depends on the other rows"
    )


def with_other_neighbours(
    case: AttentionCase, layout_type: type[KVLayout]
) -> tuple[AttentionInputs, AttentionInputs]:
    """Return two problems of a case with the same first row and different other rows."""
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
        inputs=problem.inputs,
    )
    return problem, mixed


def _mine_of(mine: np.ndarray, own: jax.Array, other: jax.Array) -> jax.Array:
    return jax.device_put(np.where(mine[:, None, None], np.asarray(own), np.asarray(other)))


def _first_row_of(problem: AttentionInputs, mine: jax.Array, other: jax.Array) -> jax.Array:
    """Return `other` with the first row's pages of `mine`; pages are axis 0 of all arrays."""
    pages = np.asarray(problem.batch.page_table)[0][
        : -(-problem.case.kv_lens[0] // problem.layout.page_size)
    ]
    mixed = np.array(other)
    mixed[pages] = np.asarray(mine)[pages]
    return jax.device_put(mixed)


def run_attention(
    impl: AttentionImpl, problem: AttentionInputs, env: Env = CPU
) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray | None]:
    """Run one jitted call that donates the cache: (out, cache, log-sum-exp)."""
    result = AttentionProgram(impl, problem.case, type(problem.layout), env)(problem)
    return result.out, result.cache, result.lse


def _check_output(problem: AttentionInputs, expected: Expected, out: np.ndarray) -> None:
    case = problem.case
    expected_type = ((*problem.q.shape[:2], case.spec.v_dim), jnp.dtype(case.spec.q_dtype))
    assert (out.shape, out.dtype) == expected_type, (
        f"{case.name}: {out.shape} {out.dtype}, expected {expected_type}"
    )
    got = out.astype(np.float64)
    padding = got[problem.token_rows < 0]
    assert not padding.any(), (
        f"{case.name}: padding tokens give {np.abs(padding).max()}, expected exactly 0"
    )
    strange = np.flatnonzero(~np.isfinite(got).all(axis=(1, 2)))
    where = f"{case.name}, layout {problem.layout.name}"
    if strange.size and strange[0] not in expected.tokens:
        raise InexactError(
            f"{where}: token {strange[0]} is off by nan, allowed 0", float("nan"), 0.0
        )
    errors = np.abs(got[expected.tokens] - expected.out)

    def name_of(i: int) -> str:
        token = int(expected.tokens[i])
        head, feature = np.unravel_index(int(np.argmax(errors[i])), errors[i].shape)
        cause = likely_cause(problem, token, int(head), got[token, head])
        place = f"token {token} of row {problem.token_rows[token]}"
        return f"{where}: {place}, head {head}, feature {feature}{cause}"

    _hold(errors.max(axis=(1, 2), initial=0.0), expected.allowed, name_of)
    if expected.allowed_rms is not None and errors.size:
        rms = float(np.sqrt(np.mean(errors**2)))
        _hold(
            np.array([rms]),
            expected.allowed_rms,
            f"{where}: the root mean square of {errors.size} errors",
        )


def _hold(
    error: np.ndarray, allowed: np.ndarray | float, name_of: Callable[[int], str] | str
) -> None:
    """Raise InexactError at the place where `error` exceeds `allowed` most; NaN is the largest."""
    error, allowed = (x.reshape(-1) for x in np.broadcast_arrays(error, allowed))
    if (error <= allowed).all():
        return
    worst = int(np.argmax(np.where(np.isnan(error), np.inf, error - allowed)))
    where = name_of if isinstance(name_of, str) else name_of(worst)
    off, bound = float(error[worst]), float(allowed[worst])
    place, _, cause = where.partition("; ")
    text = f"{place} is off by {off:.3g}, allowed {bound:.3g}"
    raise InexactError(f"{text}; {cause}" if cause else text, off, bound)


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected results of a problem for the compared tokens, int [n]: all tokens, or some tokens of
    long rows.

    out f64 [n, Hq, D], lse f64 [n, Hq], `allowed`: max error of each token [n]. `allowed_rms`: max
    root mean square of all errors, for narrow dtypes only.
    """

    tokens: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    allowed: np.ndarray
    allowed_rms: float | None


def expected_of(problem: AttentionInputs) -> Expected:
    """Compute the expected results in float64."""
    case, spec = problem.case, problem.case.spec
    q = np.asarray(problem.q)
    per_head = {name: np.asarray(array) for name, array in problem.inputs.items()}
    narrow = None if spec.q_dtype == "float32" else jnp.dtype(spec.q_dtype)
    compared = [
        compared_tokens(problem.token_rows == i, len(keys) * spec.num_q_heads)
        for i, keys in enumerate(problem.keys)
    ]
    tokens = np.concatenate([*compared, np.zeros(0, int)]).astype(int)
    lse = np.zeros((tokens.size, spec.num_q_heads))
    exact = np.zeros((*lse.shape, spec.v_dim))
    allowed, rounding = np.zeros(tokens.size), np.zeros(exact.shape)
    start = 0
    for i, (keys, values) in enumerate(zip(problem.keys, problem.values, strict=True)):
        mine, at = compared[i], slice(start, start + compared[i].size)
        start = at.stop
        if not mine.size:
            continue
        first = int(np.argmax(problem.token_rows == i))
        positions = keys.shape[0] - int((problem.token_rows == i).sum()) + mine - first
        row: dict[str, Any] = {"inputs": per_head, "positions": positions}
        exact[at], lse[at] = oracle.attend(q[mine], keys, values, spec, **row)
        score = oracle.largest_score(q[mine], keys, spec)
        allowed[at] = F32_BOUND * (1.0 + score) * np.abs(values.astype(np.float64)).max()
        if problem.layout.tolerance:  # a kernel may read values in the layout's stored dtype
            k, v = (x.astype(jnp.dtype(spec.kv_dtype)) for x in (keys, values))
            allowed[at] += np.abs(oracle.attend(q[mine], k, v, spec, **row)[0] - exact[at]).max()
        if narrow is not None:
            rounding[at] = (
                oracle.attend(q[mine], keys, values, spec, **row, weights_dtype=narrow)[0]
                - exact[at]
            )
    largest = float(np.abs(rounding).max(initial=0.0))
    allowed_rms = None
    if case.constant_v and "sinks" not in spec.inputs:
        largest = 0.5 * oracle.EPS[spec.q_dtype] if narrow is not None else 0.0
    elif narrow is not None and tokens.size:
        factor = RMS_FACTOR + 6.0 / np.sqrt(exact.size)
        allowed_rms = float(factor * np.sqrt(np.mean(rounding**2)) + allowed.mean())
    return Expected(tokens, exact, lse, allowed + NARROW_FACTOR * largest, allowed_rms)


def _check_lse(problem: AttentionInputs, expected: Expected, lse: np.ndarray) -> None:
    case, tokens = problem.case, expected.tokens
    if not tokens.size:
        return
    largest = max(
        oracle.largest_score(np.asarray(problem.q)[tokens], keys, case.spec)
        for keys in problem.keys
        if keys.size
    )
    unit = F32_BOUND if case.spec.q_dtype == "float32" else oracle.EPS[case.spec.q_dtype]
    _hold(np.abs(lse[tokens] - expected.lse), unit * (1.0 + largest), f"{case.name}: log-sum-exp")


def _check_cache(problem: AttentionInputs, cache: Mapping[str, Any]) -> None:
    """Check that new tokens are at their slots, and that nothing else changed by a single bit.

    The cache that the layout itself writes is right. Another one is read and compared: it may
    round otherwise, and places without a token may differ in what the layout does not read.
    """
    wanted = problem.written()
    if wanted.keys() == cache.keys() and all(
        _is_same(array, cache[name]) for name, array in wanted.items()
    ):
        return
    before, after = (read_contents(problem.layout, each) for each in (problem.cache, cache))
    layout, slots = problem.layout, np.asarray(problem.batch.slots)
    real = (slots >= 0) & (not problem.case.spec.kv_shared)
    new = np.zeros(layout.num_pages * layout.page_size, bool)
    new[slots[real]] = True
    for name, *arrays in zip("kv", before, after, (problem.k, problem.v), strict=True):
        old, now, fresh = map(np.asarray, arrays)
        changed = (_bits(old[~new]) != _bits(now[~new])).any(axis=(1, 2)).sum()
        assert not changed, f"{problem.case.name}: {name} changed at {changed} unwritten places"
        written, given = now[slots[real]].astype(np.float64), fresh[real].astype(np.float64)
        lost = allowed_errors(layout, np.asarray(problem.k if layout.v_prefix_dim else fresh)[real])
        is_there = (np.abs(written - given) <= lost).all()
        assert is_there, f"{problem.case.name}: new {name} are not at their slots"


def _is_same(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    kinds = (one.shape, one.dtype) == (other.shape, other.dtype)
    return kinds and one.tobytes() == other.tobytes()


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape[:-1], -1)


ROPE_SPECS: dict[str, RopeSpec] = {
    "default": RopeSpec(10000.0, 64),
    "partial": RopeSpec(10000.0, 32),
    "linear": RopeSpec(10000.0, 64, "linear", factor=4.0),
    "llama3": RopeSpec(
        500000.0, 64, "llama3", 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "yarn": RopeSpec(10000.0, 64, "yarn", 4.0, 2048),
    "yarn_untruncated": RopeSpec(150000.0, 64, "yarn", 32.0, 4096, truncate=False),
    "yarn_mscale": RopeSpec(10000.0, 64, "yarn", 40.0, 4096, mscale=0.707, mscale_all_dim=1.0),
    "yarn_attention_factor": RopeSpec(10000.0, 64, "yarn", 40.0, 4096, attention_factor=1.3),
}


def check_rope(op: RopeOp, spec: RopeSpec, dtype: str) -> None:
    """Raise AssertionError when rotated features are off by more than rounding explains."""
    rng = np.random.default_rng(0)
    positions = np.array([0, 1, 7, 100, 1000, 4095], np.int32)
    x = rng.normal(size=(positions.size, 3, 64)).astype(jnp.dtype(dtype))
    got = np.asarray(jax.jit(functools.partial(op, spec=spec))(x, positions))
    assert (got.shape, got.dtype) == (x.shape, x.dtype), (
        f"{got.shape} {got.dtype}, expected {x.shape} {x.dtype}"
    )
    assert (got[..., spec.rotary_dim :] == x[..., spec.rotary_dim :]).all(), (
        "features past rotary_dim changed"
    )
    factor = oracle.rope_frequencies(spec)[1]
    # An f32 angle in radians is off by its own rounding and by that of its frequency.
    unit = oracle.EPS["float32"] * (2.0 + positions) + oracle.EPS[dtype]
    allowed = unit * factor * np.abs(x.astype(np.float64)).max() * 2
    error = np.abs(got.astype(np.float64) - oracle.rope(x, positions, spec)).max(axis=(1, 2))
    _hold(error, allowed, lambda i: f"{spec.scaling} {dtype}, position {positions[i]}")


def check_rms_norm(op: Callable[..., Any], dtype: str) -> None:
    """Raise AssertionError when normalized rows are off by more than two roundings of the dtype."""
    rng = np.random.default_rng(0)
    for shape in ((5, 64), (3, 4, 32)):
        scale = np.logspace(-3, 2, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        x = (rng.normal(size=shape) * scale).astype(jnp.dtype(dtype))
        weight = rng.normal(size=shape[-1]).astype(jnp.dtype(dtype))
        got = np.asarray(jax.jit(functools.partial(op, eps=1e-5))(x, weight))
        assert (got.shape, got.dtype) == (x.shape, x.dtype), (
            f"{got.shape} {got.dtype}, expected {x.shape} {x.dtype}"
        )
        exact = oracle.rms_norm(x, weight, eps=1e-5)
        allowed = 2 * max(oracle.EPS[dtype], 4e-7) * np.abs(exact)
        _hold(np.abs(got.astype(np.float64) - exact), allowed, f"rms_norm {dtype}")


def check_linear(
    op: Callable[..., Any],
    dtype: str,
    *,
    rows: int = 3,
    in_dims: tuple[int, ...] = (48,),
    **fields: Any,
) -> None:
    """Raise AssertionError when a product is off by more than its f32 sum and one rounding.

    `fields` may set out_dims (default (40,)), bias (bool) and out_dtype.
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


def check_embedding(op: Callable[..., Any], dtype: str) -> None:
    """Raise AssertionError unless each row equals the table's row bit by bit."""
    table = np.random.default_rng(0).normal(size=(11, 8)).astype(jnp.dtype(dtype))
    ids = np.array([3, 0, 10, 3], np.int32)
    got = np.asarray(jax.jit(op)(table, ids))
    assert got.dtype == table.dtype
    assert got.tobytes() == table[ids].tobytes(), f"embedding {dtype}: rows differ from the table"
