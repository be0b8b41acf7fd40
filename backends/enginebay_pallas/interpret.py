"""Kernels by interpretation on the host: a TPU's memories, DMAs and semaphores simulated, with a
race detector.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.pallas import tpu as pltpu

STATE = "jax._src.pallas.mosaic.interpret.interpret_pallas_call"
"""Where JAX keeps what its race detector found; it has no public name for it (jax 0.10 and 0.11
alike).
"""

CLOCKS = 256
"""Places in a vector clock, of cores and DMAs. By default there are as many for DMAs as there are
cores, that is one, and a wait for any DMA then seems to have been one for all: races in double
buffering go unseen.
"""

RACE = "a kernel races with its own DMAs"


class RaceError(Exception):
    """A kernel that was interpreted read or wrote memory that a DMA of its own may write or read at
    the same time.
    """


def interpret_params() -> pltpu.InterpretParams:
    """A strict TPU: memory that nobody wrote is NaN, a DMA moves its data when it is waited for,
    and no earlier.
    """
    return pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=CLOCKS,
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )


def interpreting(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls Pallas kernels with every kernel in it interpreted; raises what goes
    wrong in them.

    Works inside jit, loops and shard_map. Results come back when the race detector has been asked:
    a race raises RaceError, as the cause that a JaxRuntimeError tells of (JAX runs it in a
    callback), as do reads out of bounds. Only for functions with one kernel: of several, the races
    of the last would be seen.
    """

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        with pltpu.force_tpu_interpret_mode(interpret_params()):
            results = call(*args, **kwargs)
        leaves, tree = jax.tree.flatten(results)
        flag = jax.ShapeDtypeStruct((), np.int32)
        ended = jnp.stack([jnp.ravel(leaf)[0] != 0 for leaf in leaves])
        # Asked in the order of kernels, which the interpreter keeps too; raised outside of it,
        # because an error would stay with JAX's token of that order, and fail whatever is
        # interpreted later.
        found = io_callback(_find_races, flag, ended, ordered=True)
        passed = io_callback(_raise_race, flag, found)
        # A select that XLA cannot fold: nothing sees a result before the detector was asked.
        return jax.tree.unflatten(
            tree, [jnp.where(passed == 0, leaf, jnp.zeros_like(leaf)) for leaf in leaves]
        )

    return interpreted


def _find_races(_: np.ndarray) -> np.int32:
    races = importlib.import_module(STATE).races
    return np.int32(races is not None and races.races_found)


def _raise_race(found: np.ndarray) -> np.int32:
    if found:
        raise RaceError(RACE)
    return np.int32(0)
