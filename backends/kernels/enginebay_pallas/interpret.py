"""Interprets kernels on the host: simulates the memories, DMAs and semaphores of a TPU, and detects
races.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.pallas import tpu as pltpu

STATE = "jax._src.pallas.mosaic.interpret.interpret_pallas_call"
"""The module in which JAX keeps the findings of its race detector. jax 0.10 to 0.12 have no public
name for it.
"""

CLOCKS = 256
"""Entries of a vector clock, for cores and DMAs. By default there is one entry for DMAs per core,
that is one. A wait for any DMA then counts as a wait for all of them, and races in double buffering
are missed.
"""

RACE = "a kernel races with its own DMAs"


class RaceError(Exception):
    """An interpreted kernel accessed memory that one of its DMAs may access at the same time."""


def interpret_params() -> pltpu.InterpretParams:
    """Return parameters of a strict TPU.

    Unwritten memory is NaN, and a DMA moves its data when the kernel waits for it, not earlier.
    """
    fields = {field.name for field in dataclasses.fields(pltpu.InterpretParams)}
    # From jax 0.12 on the detector itself can raise, inside a callback whose error would stay with
    # the token of the order: see `interpreting`.
    found: dict[str, Any] = {"on_race": "warn"} if "on_race" in fields else {}
    return pltpu.InterpretParams(
        **found,
        detect_races=True,
        vector_clock_size=CLOCKS,
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )


def interpreting(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with its Pallas kernel interpreted, and raise the errors of the kernel.

    It works inside jit, loops and shard_map. The race detector is read before results are returned.
    A race raises RaceError. JAX runs the kernel and the check in callbacks, so callers see a
    JaxRuntimeError that names the race, or the read out of bounds. `call` may have one kernel only:
    of several, only the races of the last one would be found.
    """

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        with pltpu.force_tpu_interpret_mode(interpret_params()):
            results = call(*args, **kwargs)
        leaves, tree = jax.tree.flatten(results)
        flag = jax.ShapeDtypeStruct((), np.int32)
        ended = jnp.stack([jnp.ravel(leaf)[0] != 0 for leaf in leaves])
        # This callback is ordered, as the interpreter's own are. The error is raised outside of it,
        # because JAX would keep the error with the token of the order, and fail everything that is
        # interpreted later.
        found = io_callback(_find_races, flag, ended, ordered=True)
        passed = io_callback(_raise_race, flag, found)
        # XLA cannot fold this select, so no result is visible before the detector was read.
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
