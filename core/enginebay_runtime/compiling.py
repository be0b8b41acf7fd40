"""StepCompiler: compiles the programs of an executor's steps."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.commands import DecodeInputs, PrefillInputs, VerifyInputs
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import Weights
from enginebay.contracts.step_key import Kind, StepKey
from enginebay.jax_config import seen_entries
from enginebay.memory_maps import require_maps
from enginebay.ops import prefill_columns as columns
from enginebay_runtime.full_vocab import FullVocab
from enginebay_runtime.layered import MIN_LAYERS, LayeredStep, ProgramCalls, split_step
from enginebay_runtime.prefill import forward_step, sample_step
from enginebay_runtime.programs import ProgramName, parts_of, program_name
from enginebay_runtime.small_programs import abstract_array
from enginebay_runtime.step import (
    Sampled,
    StepState,
    compact_decode_step,
    decode_step,
    nothing_sampled,
)
from enginebay_runtime.stored_programs import ProgramStore, trace_settings
from enginebay_runtime.tables import max_changes
from enginebay_runtime.verify import drafts_a_step, verify_step
from enginebay_runtime.view import ExecutorView

log = logging.getLogger("enginebay_runtime")

STEPS: dict[Kind, Callable[..., Any]] = {
    "forward": forward_step,
    "sample": sample_step,
    "decode": decode_step,
    "compact": compact_decode_step,
    "verify": verify_step,
}


CompiledPrograms = MutableMapping[ProgramName, Any]
"""Compiled steps by key and cache layouts; a prefill is in it as a whole and as its parts."""


Key = TypeVar("Key")

COMPILE_THREADS = 2


def compile_ahead(
    keys: Iterable[Key],
    lower: Callable[[Key], Any],
    compile_lowered: Callable[[Key, Any], Any],
    keep: Callable[[Key, Any], None],
) -> None:
    """Lower each key on this thread, compile it on one of COMPILE_THREADS threads, and call `keep`
    on this thread with the key and its program, in order.

    When any of the three functions raises, the programs that are being compiled finish first, and
    the others are not compiled.
    """

    def compiled(key: Key, lowered: Any) -> Any:
        program = compile_lowered(key, lowered)
        release_memory()
        return program

    pool = ThreadPoolExecutor(COMPILE_THREADS)
    running: collections.deque[tuple[Key, Future[Any]]] = collections.deque()
    try:
        for key in keys:
            running.append((key, pool.submit(compiled, key, lower(key))))
            # The next key is lowered only when a thread is free: a lowered program of unrolled
            # layers takes tens of MB until it is compiled.
            if len(running) >= COMPILE_THREADS:
                ready, program = running.popleft()
                keep(ready, program.result())
        for ready, program in running:
            keep(ready, program.result())
    finally:
        pool.shutdown(cancel_futures=True)
        release_memory()


BACKGROUND_NICE = 10
"""What is added to the nice value of threads that compile beside requests."""


def lower_priority() -> None:
    """Give this thread a low priority, on Linux, where threads have their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICE)


def release_memory() -> None:
    """Return memory that the compiler has freed to the system; glibc would keep it, tens of MB per
    program.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # musl has no such function
            ctypes.CDLL(None).malloc_trim(0)


MEMORY_FIGURES = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
)


def dump_program(
    folder: Path, title: str, layouts: Mapping[str, CacheLayout], lowered: Any, compiled: Any
) -> None:
    """Write NAME.stablehlo.txt, NAME.hlo.txt and NAME.json; NAME is made of the title and the
    cache's size.

    The JSON has the title, the cache size of each group, and XLA's memory analysis in bytes per
    device, null where the platform has none. Aliased bytes count as arguments and as outputs: they
    are the cache, which is updated in place.
    """
    sizes = {name: f"{at.num_pages}x{at.page_size}" for name, at in layouts.items()}
    name = re.sub(
        r"[^a-z0-9]+", "-", " ".join([title, *dict.fromkeys(sizes.values())]).lower()
    ).strip("-")
    (folder / f"{name}.stablehlo.txt").write_text(lowered.as_text(), encoding="utf-8")
    (folder / f"{name}.hlo.txt").write_text(compiled.as_text() or "", encoding="utf-8")
    analysis = compiled.memory_analysis()
    memory = (
        None
        if analysis is None
        else {figure: getattr(analysis, figure) for figure in MEMORY_FIGURES}
    )
    record = {"program": title, "pages": sizes, "memory": memory}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    log.info("described %s in %s", title, folder / name)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A prefill as one call: runs its forward program, then the smallest of its `samplers` (by
    number of rows) that holds the rows whose prompt ends here, if there are any. For more rows than
    the largest one holds, it runs several times.
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
        most, full = max(self.samplers), sampled.full_vocab
        held = state.rows, state.processor_state
        new = Sampled(sampled.tokens, sampled.logprobs, None, full and FullVocab(full.rows))
        for first in range(0, len(sampling), most):
            some = sampling[first : first + most]
            num = next(size for size in self.samplers if size >= len(some))
            places = np.full(num, len(ints), np.int32)
            places[: len(some)] = some
            row_ids = np.zeros(num, np.int32)
            row_ids[: len(some)] = ints[some, columns.ROW]
            held, new = self.samplers[num](weights, held, last, new, row_ids, places)
        if full and new.full_vocab:
            full = dataclasses.replace(full, rows=new.full_vocab.rows)
        state = dataclasses.replace(state, rows=held[0], processor_state=held[1])
        return state, Sampled(new.tokens, new.logprobs, sampled.logits, full, sampled.hidden)


def is_final(program: Callable[..., Any]) -> bool:
    """Whether no part of a step's program is a LayeredStep that the whole step is to replace."""
    if isinstance(program, Prefill):
        return all(map(is_final, (program.forward, *program.samplers.values())))
    return not isinstance(program, LayeredStep) or program.calls.is_final


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The lowered program of a part; with `calls` those of a LayeredStep."""

    programs: Sequence[Any]
    calls: ProgramCalls | None = None


Options = Mapping[str, Any]
"""XLA's options for a compilation."""


def compiled_with_entries(lowered: Any, options: Options) -> tuple[Any, list[bytes]]:
    """Compile a program. Returns it, and its entries in JAX's cache."""
    with seen_entries() as entries:
        compiled = lowered.compile(compiler_options=options)
    return compiled, entries


class SharedPrograms:
    """compiled_with_entries, except that equal programs are compiled once, whichever threads ask
    for them: steps share some of the programs of LayeredSteps.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Future[tuple[Any, list[bytes]]]] = {}

    def __call__(self, lowered: Any, options: Options) -> tuple[Any, list[bytes]]:
        """Return the program and its entries."""
        text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        with self._lock:
            found = self._found.get(text)
            mine = self._found.setdefault(text, Future())
        if found is not None:
            return found.result()
        try:
            mine.set_result(compiled_with_entries(lowered, options))
        except BaseException as error:
            mine.set_exception(error)
            raise
        return mine.result()


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """What, besides the parts of an engine, the programs of its steps depend on: cache layouts, the
    shapes of weights and state, tokens of one decode step, JAX's settings, and whether they become
    LayeredSteps.
    """

    layouts: Mapping[str, CacheLayout]
    held: tuple[Any, Any]
    max_steps: int
    settings: tuple[tuple[str, str], ...]
    layered: bool = False


@dataclasses.dataclass(frozen=True)
class StepSource:
    """What the steps of an executor are compiled from, and where their programs are stored. Later
    changes of the executor, such as the ops of an override or dropped arrays, do not affect it.
    """

    parts: EngineParts
    shapes: StepShapes
    compilations: Compilations
    store: ProgramStore | None = None
    dump_folder: Path | None = None

    @staticmethod
    def of(executor: ExecutorView) -> StepSource:
        """The present source of an executor."""
        held = jax.tree.map(abstract_array, (executor.model_weights, executor.state))
        shapes = StepShapes(dict(executor.layouts), held, executor.max_steps, trace_settings())
        return StepSource(
            executor.parts, shapes, executor.compilations, executor.store, executor.dump_folder
        )

    @property
    def is_host(self) -> bool:
        """Whether the steps run on the processors that also run Python."""
        return {device.platform for device in self.parts.placement.devices} == {"cpu"}

    @property
    def can_be_split(self) -> bool:
        """Whether the steps have so many layers that small programs are compiled in a fraction of
        the time of the whole step.
        """
        num_layers = sum(group.num_layers for group in self.parts.info.groups)
        is_able = self.parts.placement.mesh is None and self.dump_folder is None
        return is_able and num_layers >= MIN_LAYERS

    def splits(self, key: StepKey, *, layered: bool = False) -> bool:
        """Whether a step becomes a LayeredStep: if `layered`, or for good, because on a CPU calls
        from Python are nothing beside the work of a prefill of many tokens.
        """
        is_long = key.kind == "forward" and key.bucket.tokens >= MANY_TOKENS
        return self.can_be_split and (layered or (self.is_host and is_long))


MANY_TOKENS = 128
"""A prefill of fewer tokens is slower as a LayeredStep: by a tenth for 20 tokens and 125 million
weights.
"""

CompileElsewhere = Callable[[StepShapes, StepKey], bool]
"""Compiles a part of a step into the store. Returns whether it did."""


class StepCompiler:
    """Lowers and compiles steps, and stores the programs where the executor looks them up. Any
    thread may use it.
    """

    def __init__(
        self,
        source: StepSource,
        programs: CompiledPrograms,
        *,
        layered: bool = False,
        one_sampler: bool = False,
    ) -> None:
        """`programs`: the executor's compiled programs, which this adds to. `layered`: whether it
        makes LayeredSteps also of steps that do not stay so. `one_sampler`: whether these prefills
        get only the program that samples one row.
        """
        self._parts, self._placement = source.parts, source.parts.placement
        self._shapes, self._layouts = source.shapes, source.shapes.layouts
        self._held, self._max_steps = source.shapes.held, source.shapes.max_steps
        self._options = dict(source.parts.platform.compile_options())
        self._dump_folder, self._compilations = source.dump_folder, source.compilations
        self._store = source.store
        self.settings = trace_settings()
        """JAX's settings, where the programs are traced."""
        self._programs = programs
        self._source = source
        self._layered = layered and source.can_be_split
        self._one_sampler = one_sampler and self._layered
        self._shared = SharedPrograms()

    def make_all(self, keys: Sequence[StepKey], report: Callable[[StepKey], None]) -> None:
        """Compile the programs of these steps, two at a time, and call `report` after each; see
        `compile_ahead`.
        """
        waiting = collections.deque(keys)

        def join() -> None:
            while waiting and not self.missing([waiting[0]]):
                self.joined(waiting[0])
                report(waiting.popleft())

        def keep_and_join(part: StepKey, program: Any) -> None:
            self.keep(part, program)
            join()

        join()
        missing = self.missing(keys)
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            for part, program in zip(missing, pool.map(self.load, missing), strict=True):
                if program is not None:
                    keep_and_join(part, program)
        compile_ahead(self.missing(keys), self.lower, self.compile, keep_and_join)

    def make_missing(
        self,
        key: StepKey,
        report: Callable[[StepKey], None],
        elsewhere: CompileElsewhere | None = None,
    ) -> None:
        """Compile the program of a step, unless it was compiled meanwhile. `elsewhere` may compile
        it. If it does not, XLA compiles here, with a low priority, so that steps which run at the
        same time come first.
        """
        self.settings = trace_settings()  # of this thread, which is another one
        shapes = dataclasses.replace(self._shapes, settings=self.settings, layered=self._layered)
        missing = self.missing([key])
        if missing or not is_final(self._programs[program_name(key, self._layouts)]):
            for part in missing:
                program = self.load(part)
                if program is None and elsewhere is not None and elsewhere(shapes, part):
                    program = self.load(part)
                if program is None:
                    lowered = self.lower(part)
                    # On a thread of its own: a thread cannot raise its priority again, and this
                    # one holds the interpreter's lock, for which others would wait.
                    with ThreadPoolExecutor(1, "enginebay-compile", lower_priority) as pool:
                        program = pool.submit(self.compile, part, lowered).result()
                self.keep(part, program)
            self.joined(key)
            release_memory()
        report(key)

    def missing(self, keys: Sequence[StepKey]) -> list[StepKey]:
        """The keys of the steps' programs (`parts_of`) that are not compiled, or only as a
        LayeredStep where the program of the whole step is asked for.
        """
        parts = dict.fromkeys(part for key in keys for part in self._parts_of(key))
        have = {part: self._programs.get(program_name(part, self._layouts)) for part in parts}
        return [p for p, at in have.items() if at is None or not (self._layered or is_final(at))]

    def _parts_of(self, key: StepKey) -> tuple[StepKey, ...]:
        return parts_of(key)[:2] if self._one_sampler else parts_of(key)

    def joined(self, key: StepKey) -> Any:
        """The program of a step whose parts are all compiled."""
        parts = self._parts_of(key)
        forward, *samplers = (self._programs[program_name(part, self._layouts)] for part in parts)
        if not samplers:
            return forward
        sizes = [part.bucket.tokens for part in parts[1:]]
        joined = Prefill(forward, dict(zip(sizes, samplers, strict=True)))
        self._programs[program_name(key, self._layouts)] = joined
        return joined

    def compile(self, key: StepKey, lowered: Lowered) -> Any:
        """Compile a lowered part. Any thread may call this. CompilationError where the process has
        no memory maps left.
        """
        require_maps(str(key))
        is_layered = lowered.calls is not None
        compiled = self._shared if is_layered else compiled_with_entries
        with self._compilations.timed():
            pairs = [compiled(one, self._options) for one in lowered.programs]
        programs = [one for one, _ in pairs]
        entries = [entry for _, seen in pairs for entry in seen[-1:]]
        program = programs[0] if lowered.calls is None else LayeredStep(lowered.calls, programs)
        if self._store is not None and len(entries) == len(programs):
            self._store.save(program, entries, *self.stored_name(key), is_layered)
        if self._dump_folder is not None:
            dump_program(self._dump_folder, str(key), self._layouts, lowered.programs[0], program)
        return program

    def stored_name(self, key: StepKey) -> tuple[object, ...]:
        """All that tells the program of a part from others, besides what the store knows."""
        parts = self._parts
        processors = [name for name, _ in parts.processors]
        # The order of a set in a repr is another one in each process.
        chosen = None if key.names is None else sorted(key.names)
        own = (parts.returns_logits, parts.has_greedy, processors, chosen)
        name = program_name(dataclasses.replace(key, names=None), self._layouts)
        return name, own, self._max_steps, self._options, self._held, self.settings

    def load(self, part: StepKey) -> Any | None:
        """The program of a part that another process has stored, or None. Any thread may call
        this. CompilationError as for compile().
        """
        if self._store is None:
            return None
        require_maps(str(part))
        name = self.stored_name(part)
        with self._compilations.timed():
            splits = self._source.splits(part, layered=self._layered)
            found = self._store.load(*name, True) if splits else None
            return self._store.load(*name, False) if found is None else found

    def keep(self, part: StepKey, program: Any) -> None:
        """Put a part where the executor looks it up."""
        self._programs[program_name(part, self._layouts)] = program
        self._compilations.add()

    def lower(self, key: StepKey) -> Lowered:
        """The traced program of a key. Runs on the caller's thread only."""
        held, args = self._arguments(key)
        options: dict[str, Any] = {}
        is_decode = key.kind in ("decode", "compact")
        splits = self._source.splits(key, layered=self._layered)
        if is_decode:
            options["max_steps"] = 1 if key.full_vocab else self._max_steps
        step, sampled, more = STEPS[key.kind], None, tuple[Any, ...]()
        with self._compilations.timed():
            if splits and is_decode:  # one token at a time
                shape = key.bucket.seqs, options["max_steps"]
                sampled = jax.eval_shape(lambda: nothing_sampled(self._parts, key, shape))
                step, more = decode_step, (jax.ShapeDtypeStruct((), jnp.int32), sampled)
            traced = self._jitted(step, key, held, options).trace(self._held[0], held, *args, *more)
            found = split_step(traced, sampled) if splits else None
            if found is not None:
                calls, pieces = found
                # On a CPU, a thread that calls takes time from those that compute.
                waits, final = self._source.is_host and is_decode, self._source.splits(key)
                calls = dataclasses.replace(calls, waits=waits, is_final=final)
                return Lowered([piece.lower() for piece in pieces], calls)
            if more:
                jitted = self._jitted(STEPS[key.kind], key, held, options)
                traced = jitted.trace(self._held[0], held, *args)
            return Lowered([traced.lower()])

    def _jitted(
        self, step: Callable[..., Any], key: StepKey, held: Any, options: Mapping[str, Any]
    ) -> Any:
        outputs = None
        # Donated arrays are reused only when they are returned with the same sharding.
        if self._placement.mesh is not None:
            state = jax.tree.map(lambda a: a.sharding, held)
            others = (self._placement.replicated,) * (2 if key.kind == "forward" else 1)
            outputs = (state, *others)
        donated = (1, 3) if key.kind == "sample" else (1,)
        function: Any = functools.partial(
            step, parts=self._parts, layouts=self._layouts, key=key, **options
        )
        # A partial object has no name; profiles and compile logs show this one.
        function.__name__ = f"enginebay_{key.kind}"
        return jax.jit(function, donate_argnums=donated, out_shardings=outputs)

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
