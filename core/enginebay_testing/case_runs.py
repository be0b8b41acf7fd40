"""Runs the programs of one case: first with other inputs, then several times with the inputs that
are checked. Results are poisoned between the runs, so that no old result passes for a new one.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

QUICK_COMPILING = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
"""Options with which XLA compiles several times as fast for a CPU, and optimizes little. At level 0
a long context runs for longer than level 1 compiles.
"""


def kit_jit(
    function: Callable[..., Any],
    *,
    static_argnums: tuple[int, ...] = (),
    donate_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Return a jitted function of the kit itself. It runs a few times, so that on a CPU quick
    compiling matters more than quick running. Programs with kernels are compiled as users' are.
    """

    @functools.cache
    def made() -> Callable[..., Any]:  # not before JAX has chosen its platform
        return jax.jit(
            function,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            compiler_options=dict(QUICK_COMPILING) if jax.default_backend() == "cpu" else None,
        )

    def run(*arguments: Any) -> Any:
        return made()(*arguments)

    return run


def _filled(arrays: Any) -> Any:
    def fill(array: jax.Array) -> jax.Array:
        is_real = jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.full_like(array, jnp.nan if is_real else 85)

    return jax.tree.map(fill, arrays)


_poisoned = kit_jit(_filled, donate_argnums=(0,))


def taken(results: Any, arguments: Any = ()) -> Any:
    """Return results as NumPy arrays of their own, and overwrite their memory on the device; on a
    CPU not that which they share with `arguments`.
    """
    copies = jax.tree.map(lambda array: np.array(array, copy=True), results)
    leaves = [x for x in jax.tree.leaves(results) if x.size]
    if jax.default_backend() != "cpu":
        jax.block_until_ready(_poisoned(leaves))
        return copies
    known = [place for array in jax.tree.leaves(arguments) for place in _memory_of(array)]
    for start, size in (place for array in leaves for place in _memory_of(array)):
        if not any(start < begin + long and begin < start + size for begin, long in known):
            ctypes.memset(start, POISON, size)
    return copies


POISON = 0xFF
"""Floats of these bytes are NaN."""


def _memory_of(array: Any) -> list[tuple[int, int]]:
    """Return the addresses and sizes in bytes of an array's memory on a CPU."""
    if isinstance(array, jax.Array):
        if array.is_deleted():  # it was donated
            return []
        shards = [shard.data for shard in array.addressable_shards]
        return [(x.unsafe_buffer_pointer(), x.on_device_size_in_bytes()) for x in shards]
    if isinstance(array, np.ndarray):
        return [(array.ctypes.data, array.nbytes)]
    return []


def other_inputs(arguments: Any, *, with_integers: bool = False) -> Any:
    """Return arguments of the same shapes with all arrays of floats reversed in every dimension.
    Whole numbers stay unless asked for, because they may be lengths and offsets.
    """

    def other(array: np.ndarray) -> np.ndarray:
        is_other = with_integers or jnp.issubdtype(array.dtype, jnp.floating)
        return np.flip(array).copy() if is_other and np.ndim(array) else array

    return jax.tree.map(other, arguments)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two calls do the same with equal arrays. Two functions that were defined in
    the body of a check may hold different arrays, and are not the same.
    """
    if isinstance(one, functools.partial) and isinstance(other, functools.partial):
        parts = ((x.func, x.args, tuple(sorted(x.keywords.items()))) for x in (one, other))
        try:
            return bool(next(parts) == next(parts))
        except (TypeError, ValueError):  # arrays are neither equal nor sorted
            return False
    return one is other


class CaseRuns:
    """The programs of one case, which all its sets of inputs share."""

    def __init__(self) -> None:
        self._programs: list[tuple[Any, Callable[..., Any]]] = []
        self._configured: dict[str, Any] = {}
        self._next = 0
        self._results: list[tuple[bytes, ...]] = []

    def begin(self) -> None:
        """Start a check with a new set of inputs: its first call uses the first program."""
        self._next = 0

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for a name the first time."""
        if name not in self._configured:
            self._configured[name] = make()
        return self._configured[name]

    def __call__(
        self,
        call: Callable[..., Any],
        arguments: Sequence[Any],
        repeats: int,
        others: Sequence[Any] | None = None,
    ) -> Any:
        """Run `call` with other inputs, and then `repeats` times with `arguments`; return the
        results as NumPy arrays. AssertionError if two of these runs return different bits.
        """
        step = self._program(call)
        arguments = jax.tree.map(np.asarray, tuple(arguments))
        before = others or other_inputs(arguments)
        self._remember(taken(step(*before), before))
        first = taken(step(*arguments), arguments)
        wanted = _bits(first)
        self._remember(first)
        for turn in turns(repeats):
            assert _bits(taken(step(*arguments), arguments)) == wanted, (
                f"run {turn + 1} of the same step returned other bits than run 1"
            )
        return first

    @property
    def returned_an_earlier_result(self) -> bool:
        """Whether a result of the last run is, bit by bit, one of an earlier run."""
        *earlier, last = self._results or [()]
        return any(array in before for array in last for before in earlier)

    def _remember(self, result: Any) -> None:
        arrays = (array for array in jax.tree.leaves(result) if _is_telling(array))
        self._results = [*self._results[-3:], tuple(array.tobytes() for array in arrays)]

    def _program(self, call: Callable[..., Any]) -> Callable[..., Any]:
        at, self._next = self._next, self._next + 1
        if at < len(self._programs) and _is_same(self._programs[at][0], call):
            return self._programs[at][1]
        self._programs[at:] = [(call, jax.jit(call))]
        return self._programs[at][1]


FEW_REPEATS, REPEATS_S = 3, 10.0
"""A step runs so often at least with the same arrays, and no more after so many seconds: the limit
of a case is for the kernel, which may be slow and right.
"""


def turns(repeats: int) -> Iterator[int]:
    """Yield the numbers 1 to `repeats` - 1 of the runs after the first, and fewer for slow ones."""
    start = time.monotonic()
    for turn in range(1, repeats):
        if turn >= FEW_REPEATS and time.monotonic() - start > REPEATS_S:
            return
        yield turn


MIN_TELLING_BYTES = 16
"""Shorter results may be equal by chance."""


def _is_telling(array: np.ndarray) -> bool:
    """Return whether an equal array is no chance: it has several different finite numbers."""
    numbers = array.reshape(-1).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    return array.nbytes >= MIN_TELLING_BYTES and bool((numbers != numbers[:1]).any())


def _bits(results: Any) -> tuple[bytes, ...]:
    return tuple(array.tobytes() for array in jax.tree.leaves(results))
