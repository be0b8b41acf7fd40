"""Compares one call of an op with float64 results: for checks and measurements of ops without a
check of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.compose.quick_check import row_errors
from enginebay.ops.op import Op
from enginebay.plugins.registry import import_target
from enginebay.weights import FLOAT, QuantizedArray
from enginebay_testing.op_kit import PlainCase
from enginebay_testing.oracle import quantized_weight
from enginebay_testing.quantized import rounded_inputs
from enginebay_testing.verdicts import InexactError

OUT_DTYPE = "out_dtype"
"""The argument of a reference that its oracle lacks: float64 results have no other dtype."""


@dataclasses.dataclass(frozen=True)
class OpCall:
    """The arguments of one call of an op: NumPy arrays, and keyword arguments."""

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def hold(
    error: np.ndarray,
    allowed: np.ndarray,
    what: str,
    *,
    rms: float | None = None,
    chance: float | None = None,
    axes: Sequence[str] = (),
    place: str = "",
) -> None:
    """Raise InexactError where an error exceeds its bound, or where the root mean square of error /
    allowed exceeds `rms` by more than `chance`, which is 2 / sqrt(number of errors) if unset: give
    it where errors depend on each other. The message names the first wrong place by `axes`, such as
    ("row", "output"), or by the text `place`.
    """
    error, allowed = np.broadcast_arrays(error, allowed)
    bad = ~(error <= allowed)
    if bad.any():
        at = np.unravel_index(int(np.argmax(bad)), bad.shape)
        where = place or _place(at, axes)
        raise InexactError(
            f"{what}: {where} is off by {error[at]:.3g}, allowed {allowed[at]:.3g}",
            float(error[at]),
            float(allowed[at]),
        )
    if rms is None or not error.size:
        return
    share = float(np.sqrt(np.mean((error / np.where(allowed > 0, allowed, 1.0)) ** 2)))
    bound = rms + (2.0 / np.sqrt(error.size) if chance is None else chance)
    if share > bound:
        text = (
            f"{what}: the root mean square of {error.size} errors is {share:.3g} of what one may "
            f"be, allowed {bound:.3g}"
        )
        raise InexactError(text, share, bound)


def _place(at: tuple[np.intp, ...], axes: Sequence[str]) -> str:
    """Return the name of a place, such as "row 3, output 7"."""
    if len(at) != len(axes):
        return f"place {tuple(map(int, at))}"
    return ", ".join(f"{axis} {int(i)}" for axis, i in zip(axes, at, strict=True))


def exact_results(op: Op[Any], call: OpCall) -> list[np.ndarray]:
    """Return the results of a call by the op's float64 oracle, or by its reference in float64."""
    if op.oracle is not None:
        oracle = import_target(op.oracle, f"the oracle of op {op.name!r}")
        keywords = {name: value for name, value in call.keywords.items() if name != OUT_DTYPE}
        found = oracle(*_dequantised(call.arguments), **keywords)
    else:
        with jax.enable_x64(True):
            found = _reference(op)(*jax.tree.map(_widened, call.arguments), **call.keywords)
    return [np.asarray(array) for array in jax.tree.leaves(found)]


def _dequantised(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments with the numbers of quantised weights, and with inputs x, the first ones,
    rounded where a weight asks for it.
    """
    weights = [each for each in arguments if isinstance(each, QuantizedArray)]
    first, *others = arguments
    for rounding in {weight.activations for weight in weights} - {FLOAT}:
        first = rounded_inputs(first, rounding)
    all_of = (first, *others)
    return tuple(quantized_weight(x) if isinstance(x, QuantizedArray) else x for x in all_of)


def _reference(op: Op[Any]) -> Any:
    return import_target(op.reference, f"the reference of op {op.name!r}")


def _widened(array: np.ndarray) -> Any:
    is_real = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.asarray(array, jnp.float64) if is_real else array


def errors(op: Op[Any], call: OpCall, got: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (error, allowed) for each row of each result of a call; AssertionError where a result
    differs from the reference in shape or dtype.
    """
    step = functools.partial(_reference(op), **call.keywords)
    wanted = jax.tree.leaves(jax.eval_shape(step, *call.arguments))
    found = [np.asarray(array) for array in jax.tree.leaves(got)]
    shapes = [(array.shape, str(array.dtype)) for array in found]
    expected = [(array.shape, str(array.dtype)) for array in wanted]
    assert shapes == expected, f"{op.name} returns {shapes}, expected {expected}"
    return [
        row_errors(array, exact, op.tolerance.get(str(array.dtype), 0.0))
        for array, exact in zip(found, exact_results(op, call), strict=True)
    ]


def within_tolerance(
    op: Op[Any], call_of: Callable[[PlainCase], OpCall]
) -> Callable[[Any, PlainCase], None]:
    """Return a check of an implementation: every row of its results is within the op's tolerance of
    the float64 results, and repeated calls give the same bits.
    """

    def check(kernel: Any, case: PlainCase) -> None:
        call = call_of(case)
        chosen = case.configured(kernel)
        got = case.run(functools.partial(chosen, **call.keywords), *call.arguments)
        for error, allowed in errors(op, call, got):
            hold(error, allowed, op.name)

    return check
