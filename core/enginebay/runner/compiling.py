"""StepCompiler: makes the programs of a runner's steps from what the runner has when it is asked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from enginebay.cache import KVLayout
from enginebay.runner import device
from enginebay.runner.ahead import compile_ahead
from enginebay.runner.dump import dump_program
from enginebay.runner.keys import Kind, StepKey
from enginebay.runner.step import (
    Sampled,
    StepState,
    compact_decode_step,
    decode_step,
    prefill_step,
)
from enginebay.runner.tables import max_changes, on_tables
from enginebay.runner.verify import verify_step
from enginebay.runner.view import RunnerView

STEPS: dict[Kind, Callable[..., tuple[StepState, Sampled]]] = {
    "prefill": prefill_step,
    "decode": decode_step,
    "compact": compact_decode_step,
    "verify": verify_step,
}


Programs = MutableMapping[tuple[StepKey, tuple[tuple[str, KVLayout], ...]], Any]
"""Compiled steps by key and by the layouts of the cache."""


class StepCompiler:
    """Lowers and compiles steps, and keeps the programs where the runner looks them up.

    It holds what the runner had when it was made: the program, the layouts, and the shapes of
    weights and state. What the runner is given later, such as the ops of an override, and arrays
    that are dropped, do not change what it makes. So it may be used on another thread.
    """

    def __init__(self, runner: RunnerView, programs: Programs) -> None:
        """`programs`: where the runner looks for them."""
        self._program, self._placement = runner.program, runner.placement
        self._layouts = dict(runner.layouts)
        self._max_steps, self._options = runner.max_steps, runner.compile_options
        self._dump_folder, self._compilations = runner.dump_folder, runner.compilations
        self._held = jax.tree.map(_describe, (runner.weights, runner.state))
        self._programs = programs

    def make(self, key: StepKey) -> Any:
        """Lower, compile and keep the program of a step."""
        compiled = self._compile(key, self._lower(key))
        self._keep(key, compiled)
        return compiled

    def make_all(self, keys: Sequence[StepKey], told: Callable[[StepKey], None]) -> None:
        """Make the programs of these steps, two at a time, and call `told` after each; see
        `compile_ahead`.
        """

        def keep(key: StepKey, compiled: Any) -> None:
            self._keep(key, compiled)
            told(key)

        compile_ahead(keys, self._lower, self._compile, keep)

    def make_missing(self, key: StepKey, told: Callable[[StepKey], None]) -> None:
        """Make the program of a step, if nobody has made it meanwhile."""
        if (key, tuple(self._layouts.items())) not in self._programs:
            self.make(key)
            told(key)

    def _keep(self, key: StepKey, compiled: Any) -> None:
        self._programs[key, tuple(self._layouts.items())] = compiled
        self._compilations.add()

    def _compile(self, key: StepKey, lowered: Any) -> Any:
        compiled = lowered.compile(compiler_options=self._options)
        if self._dump_folder is not None:
            dump_program(self._dump_folder, str(key), self._layouts, lowered, compiled)
        return compiled

    def _lower(self, key: StepKey) -> Any:
        """The step of a key, traced. The caller's thread does all of it."""
        bucket = key.bucket
        changes = {
            g: jax.ShapeDtypeStruct((max_changes(bucket), 3), jnp.int32) for g in self._layouts
        }
        processors = tuple(
            (name, one)
            for name, one in self._program.processors
            if key.names is None or name in key.names
        )
        program = dataclasses.replace(
            self._program, full_vocab=key.full_vocab, processors=processors
        )
        verifies = key.kind == "verify"
        sizes: tuple[Any, ...] = (bucket,)
        if key.kind in ("decode", "compact"):
            sizes = (bucket, 1 if key.full_vocab else self._max_steps)
        step = on_tables(
            functools.partial(STEPS[key.kind], program, self._layouts, *sizes, variant=key.variant),
            key.kind,
            self._layouts,
            bucket,
        )
        if key.kind == "prefill":
            args: tuple[Any, ...] = (
                jax.ShapeDtypeStruct((bucket.tokens,), jnp.int32),
                jax.ShapeDtypeStruct((bucket.seqs, device.NUM_INT_COLUMNS), jnp.int32),
                jax.ShapeDtypeStruct((bucket.seqs, device.NUM_FLOAT_COLUMNS), jnp.float32),
                *((jax.ShapeDtypeStruct((bucket.tokens,), jnp.int32),) if key.full_vocab else ()),
            )
        else:
            what = (bucket.seqs, self._program.drafts_a_step(bucket)) if verifies else ()
            args = (
                jax.ShapeDtypeStruct((bucket.seqs,), jnp.int32),
                jax.ShapeDtypeStruct(what, jnp.int32),
            )
        outputs = None
        if (
            self._placement.mesh is not None
        ):  # donated arrays are reused only when they come back as they went
            outputs = (
                jax.tree.map(lambda a: a.sharding, self._held[1]),
                self._placement.replicated,
            )
        step.__name__ = f"enginebay_{key.kind}"  # what profiles and compile logs show
        return jax.jit(step, donate_argnums=1, out_shardings=outputs).lower(
            *self._held, changes, *args
        )


def _describe(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
