"""StepCompiler: compiles the programs of an executor's steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.commands import DecodeInputs, PrefillInputs, VerifyInputs
from enginebay.contracts.model import Weights
from enginebay.contracts.step_key import Kind, StepKey
from enginebay.ops import prefill_columns as columns
from enginebay_runtime.compile_ahead import compile_ahead, release_memory
from enginebay_runtime.dump import dump_program
from enginebay_runtime.full_vocab import FullVocab
from enginebay_runtime.prefill import forward_step, sample_step
from enginebay_runtime.programs import ProgramName, parts_of, program_name
from enginebay_runtime.step import (
    Sampled,
    StepState,
    compact_decode_step,
    decode_step,
    nothing_sampled,
)
from enginebay_runtime.tables import max_changes
from enginebay_runtime.verify import drafts_a_step, verify_step
from enginebay_runtime.view import ExecutorView

STEPS: dict[Kind, Callable[..., Any]] = {
    "forward": forward_step,
    "sample": sample_step,
    "decode": decode_step,
    "compact": compact_decode_step,
    "verify": verify_step,
}


CompiledPrograms = MutableMapping[ProgramName, Any]
"""Compiled steps by key and cache layouts; a prefill is in it as a whole and as its parts."""


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A prefill as one call: runs its forward program, then the smallest of its `samplers` (by
    number of rows) that holds the rows whose prompt ends here, if there are any.
    """

    forward: Callable[..., Any]
    samplers: Mapping[int, Callable[..., Any]]

    def __call__(
        self,
        weights: Weights,
        state: StepState,
        changes: Any,
        inputs: PrefillInputs,
    ) -> tuple[StepState, Sampled]:
        state, last, sampled = self.forward(weights, state, changes, inputs)
        ints = inputs.ints
        sampling = np.flatnonzero(ints[:, columns.SAMPLES])
        if not len(sampling):
            return state, sampled
        num = next(size for size in self.samplers if size >= len(sampling))
        places = np.full(num, len(ints), np.int32)
        places[: len(sampling)] = sampling
        row_ids = np.zeros(num, np.int32)
        row_ids[: len(sampling)] = ints[sampling, columns.ROW]
        full = sampled.full_vocab
        given = Sampled(sampled.tokens, sampled.logprobs, None, full and FullVocab(full.rows))
        (rows, processor_state), new = self.samplers[num](
            weights, (state.rows, state.processor_state), last, given, row_ids, places
        )
        if full and new.full_vocab:
            full = dataclasses.replace(full, rows=new.full_vocab.rows)
        state = dataclasses.replace(state, rows=rows, processor_state=processor_state)
        return state, Sampled(new.tokens, new.logprobs, sampled.logits, full, sampled.hidden)


class StepCompiler:
    """Lowers and compiles steps, and stores the programs where the executor looks them up.

    It copies what it needs of the executor when it is made: the program, the layouts, the shapes of
    weights and state. Later changes of the executor, such as the ops of an override or dropped
    arrays, do not affect it. So it may be used on another thread.
    """

    def __init__(self, executor: ExecutorView, programs: CompiledPrograms) -> None:
        """`programs`: the executor's compiled programs, which this adds to."""
        self._parts, self._placement = executor.parts, executor.placement
        self._layouts = dict(executor.layouts)
        self._max_steps, self._options = executor.max_steps, executor.compile_options
        self._dump_folder, self._compilations = executor.dump_folder, executor.compilations
        self._held = jax.tree.map(_describe, (executor.model_weights, executor.state))
        self._programs = programs

    def make_all(self, keys: Sequence[StepKey], report: Callable[[StepKey], None]) -> None:
        """Compile the programs of these steps, two at a time, and call `report` after each; see
        `compile_ahead`.
        """
        waiting = collections.deque(keys)

        def keep_and_join(part: StepKey, compiled: Any) -> None:
            self.keep(part, compiled)
            join()

        def join() -> None:
            while waiting and not self.missing([waiting[0]]):
                self.joined(waiting[0])
                report(waiting.popleft())

        join()
        compile_ahead(self.missing(keys), self.lower, self.compile, keep_and_join)

    def make_missing(self, key: StepKey, report: Callable[[StepKey], None]) -> None:
        """Compile the program of a step, unless it was compiled meanwhile."""
        if program_name(key, self._layouts) not in self._programs:
            for part in self.missing([key]):
                self.keep(part, self.compile(part, self.lower(part)))
            self.joined(key)
            release_memory()
            report(key)

    def missing(self, keys: Sequence[StepKey]) -> list[StepKey]:
        """The parts of steps that are not compiled."""
        parts = dict.fromkeys(part for key in keys for part in parts_of(key))
        return [part for part in parts if program_name(part, self._layouts) not in self._programs]

    def keep(self, part: StepKey, compiled: Any) -> None:
        """Store a compiled part where the executor looks it up."""
        self._programs[program_name(part, self._layouts)] = compiled
        self._compilations.add()

    def joined(self, key: StepKey) -> Any:
        """The program of a step whose parts are all compiled."""
        forward, *samplers = (
            self._programs[program_name(part, self._layouts)] for part in parts_of(key)
        )
        if not samplers:
            return forward
        sizes = [part.bucket.tokens for part in parts_of(key)[1:]]
        joined = Prefill(forward, dict(zip(sizes, samplers, strict=True)))
        self._programs[program_name(key, self._layouts)] = joined
        return joined

    def compile(self, key: StepKey, lowered: Any) -> Any:
        """Compile a lowered part. Any thread may call this."""
        with self._compilations.timed():
            compiled = lowered.compile(compiler_options=self._options)
        if self._dump_folder is not None:
            dump_program(self._dump_folder, str(key), self._layouts, lowered, compiled)
        return compiled

    def lower(self, key: StepKey) -> Any:
        """The traced program of a key. Runs on the caller's thread only."""
        held, args = self._arguments(key)
        options: dict[str, Any] = {}
        if key.kind in ("decode", "compact"):
            options["max_steps"] = 1 if key.full_vocab else self._max_steps
        step: Callable[..., Any] = functools.partial(
            STEPS[key.kind], parts=self._parts, layouts=self._layouts, key=key, **options
        )
        # A partial object has no name; profiles and compile logs show this one.
        step.__name__ = f"enginebay_{key.kind}"
        outputs = None
        # Donated arrays are reused only when they are returned with the same sharding.
        if self._placement.mesh is not None:
            state = jax.tree.map(lambda a: a.sharding, held)
            others = (self._placement.replicated,) * (2 if key.kind == "forward" else 1)
            outputs = (state, *others)
        donated = (1, 3) if key.kind == "sample" else 1
        jitted = jax.jit(step, donate_argnums=donated, out_shardings=outputs)
        with self._compilations.timed():
            return jitted.lower(self._held[0], held, *args)

    def _arguments(self, key: StepKey) -> tuple[Any, tuple[Any, ...]]:
        """The state that a program changes, and the shapes of its other arguments."""
        bucket, kind, info = key.bucket, key.kind, self._parts.info
        num, state = bucket.seqs, self._held[1]

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        changes = {g: ints(max_changes(bucket), 3) for g in self._layouts}
        if kind == "forward":
            width = (bucket.tokens, info.hidden_size)
            floats: Any = jax.ShapeDtypeStruct((num, columns.NUM_FLOAT_COLUMNS), jnp.float32)
            embeds: Any = jax.ShapeDtypeStruct(width, jnp.float32) if key.embeds else None
            inputs = PrefillInputs(
                ints(bucket.tokens),
                ints(num, columns.NUM_INT_COLUMNS),
                floats,
                targets=ints(bucket.tokens) if key.full_vocab else None,
                embeds=embeds,
            )
            return state, (changes, inputs)
        if kind == "sample":
            last = jax.ShapeDtypeStruct((num, info.hidden_size), info.hidden_dtype)
            sampled = jax.eval_shape(lambda: nothing_sampled(self._parts, key, (num, 1)))
            given = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(
                    a.shape, a.dtype, sharding=self._placement.replicated
                ),
                (last, sampled),
            )
            own = ints(bucket.tokens)
            return (state.rows, state.processor_state), (*given, own, own)
        if kind == "verify":
            drafts = ints(num, drafts_a_step(self._parts, bucket))
            return state, (changes, VerifyInputs(ints(num), drafts))
        return state, (changes, DecodeInputs(ints(num), ints()))


def _describe(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
