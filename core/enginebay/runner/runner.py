"""Runner: compiles a step once per bucket, launches it with cache and rows donated, and hands back
its tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.background import Background
from enginebay.cache import KVLayout
from enginebay.engine import Compilations, Pending
from enginebay.errors import CompilationError, InternalError, explain
from enginebay.model import ModelInfo, Weights
from enginebay.ops.shadow import ShadowReport
from enginebay.ops.spec import Bucket
from enginebay.processor import Sizes, empty_rows
from enginebay.runner.compiling import StepCompiler
from enginebay.runner.device import DeviceRows
from enginebay.runner.dump import make_writable
from enginebay.runner.inputs import DecodeInputs, PrefillInputs
from enginebay.runner.keys import StepKey, covering
from enginebay.runner.launched import LaunchedStep
from enginebay.runner.parts import EngineParts
from enginebay.runner.rowwriter import RowWriter
from enginebay.runner.scoping import Scoping, StepNeeds
from enginebay.runner.shadow import Shadow, ShadowParts
from enginebay.runner.sharding import Placement
from enginebay.runner.step import (
    Program,
    StepState,
)
from enginebay.waits import waiting

Report = Callable[[int, int, str], None]
"""Told of each program that is compiled: how many there are now, of how many, and its name."""


@dataclasses.dataclass(frozen=True)
class RunnerSettings:
    """Rows of the device's row table, most tokens a row gets in one decode call, XLA options, most
    tokens of a row.

    `max_model_len` None is the model's own. `shadow`: what is compared with the chosen kernels on
    some steps. `dump_step`: the folder that every compiled program is described in.
    `warms_full_vocab`: compile_all makes the programs for full-vocabulary log-probabilities too.
    `title`: engine and kernels, for whoever waits for a program.
    """

    num_rows: int
    max_steps: int
    compile_options: Mapping[str, Any]
    max_model_len: int | None = None
    shadow: ShadowParts | None = None
    dump_step: str | None = None
    warms_full_vocab: bool = False
    title: str = "an engine"


class Runner:
    """Owns weights and step state on the device. Not thread-safe: one thread launches."""

    def __init__(
        self,
        program: Program,
        weights: Weights,
        placement: Placement,
        settings: RunnerSettings,
        compilations: Compilations,
    ) -> None:
        self.program = program
        self.weights = weights
        self.placement = placement
        self.num_rows = settings.num_rows
        self.max_steps = settings.max_steps
        self.max_model_len = settings.max_model_len or program.model.info.max_model_len
        self.compile_options = dict(settings.compile_options)
        self.dump_folder = (
            None if settings.dump_step is None else make_writable(settings.dump_step, "dump_step")
        )
        self._warms_full_vocab, self._title = settings.warms_full_vocab, settings.title
        self.layouts: dict[str, KVLayout] = {}
        self.compilations = compilations
        self.shadow = None if settings.shadow is None else Shadow(settings.shadow)
        self._state: StepState | None = None
        self._programs: dict[tuple[StepKey, tuple[tuple[str, KVLayout], ...]], Any] = {}
        self.writer = RowWriter(self)
        self._scoping = Scoping(has_greedy=program.has_greedy)
        self._background = Background()

    @property
    def info(self) -> ModelInfo:
        """The model's facts."""
        return self.program.model.info

    @property
    def state(self) -> StepState:
        """The step state; an error when the arrays were dropped."""
        if self._state is None:
            raise InternalError("the engine's arrays were dropped and not made again before a step")
        return self._state

    @state.setter
    def state(self, state: StepState | None) -> None:
        self._state = state

    @property
    def shadow_report(self) -> ShadowReport | None:
        """What a shadow has found so far; None without one."""
        return None if self.shadow is None else self.shadow.report()

    @property
    def has_state(self) -> bool:
        """Whether the arrays are there."""
        return self._state is not None

    @property
    def programs(self) -> list[StepKey]:
        """What is compiled, for caches of any size; within the block of an override(), for its
        steps.
        """
        return [key for key, _ in list(self._programs)]

    def make_state(self, layouts: Mapping[str, KVLayout]) -> None:
        """Allocate an empty cache of these layouts, and rows that are all finished."""
        self.layouts = dict(layouts)

        def empty(layout: KVLayout) -> dict[str, jax.Array]:
            where, shapes = self.placement.cache(layout), layout.shapes()
            return {n: jnp.zeros(s.shape, s.dtype, device=where[n]) for n, s in shapes.items()}

        cache = {
            group.name: tuple(empty(layouts[group.name]) for _ in range(group.num_layers))
            for group in self.info.groups
        }
        rows = DeviceRows.empty(self.num_rows, self.max_model_len)
        processor_state = empty_rows(
            self.program.processors, self.num_rows, Sizes(self.info.vocab_size, self.max_model_len)
        )
        rows, processor_state = jax.device_put((rows, processor_state), self.placement.replicated)
        self._state = StepState(cache, rows, processor_state)
        self.writer.forget()

    def prefill(self, bucket: Bucket, inputs: PrefillInputs, order: np.ndarray) -> Pending:
        """Launch a prefill; `order` picks the plan's rows out of the bucket's."""
        for known in inputs.known:
            self.writer.write_known(known)
        for used in inputs.used:
            self.writer.write_all(used.row, used.values)
        full_vocab = inputs.full_vocab
        key = self._scoped(
            StepKey("prefill", bucket, full_vocab=full_vocab is not None), inputs.need
        )
        step = self._compiled(key)
        if self.shadow is not None:
            self.shadow.watch(self, key, inputs)
        self._state, sampled = step(
            self.weights,
            self.state,
            inputs.token_ids,
            inputs.ints,
            inputs.floats,
            inputs.tables,
            *(() if full_vocab is None else (full_vocab.targets,)),
        )
        return LaunchedStep(sampled, order, full_vocab, returns_logprobs=inputs.returns_logprobs)

    def decode(self, key: StepKey, inputs: DecodeInputs, order: np.ndarray) -> Pending:
        """Launch a decode of up to inputs.num_steps tokens a row, or verify drafts; `order` as for
        prefill.
        """
        for update in inputs.updates:
            self.writer.update(update.row, update.values)
        key = self._scoped(
            dataclasses.replace(key, full_vocab=inputs.full_vocab is not None), inputs.need
        )
        if key.full_vocab and inputs.num_steps > 1:
            raise InternalError(
                f"{inputs.num_steps} steps of a decode that tells of the whole vocabulary"
            )
        step = self._compiled(key)
        if self.shadow is not None and inputs.draft_ids is None:
            self.shadow.watch(self, key, inputs)
        what = np.int32(inputs.num_steps) if inputs.draft_ids is None else inputs.draft_ids
        self._state, sampled = step(self.weights, self.state, inputs.row_ids, what, inputs.tables)
        return LaunchedStep(
            sampled, order, inputs.full_vocab, returns_logprobs=inputs.returns_logprobs
        )

    def _scoped(self, key: StepKey, need: StepNeeds) -> StepKey:
        """The least key that serves and is compiled, or the key of what is to be compiled."""
        for variant, names in self._scoping.serving(need):
            serves = dataclasses.replace(key, variant=variant, names=names)
            if self._cache_key(serves) in self._programs:
                return serves
        variant, names = self._scoping.to_compile(need)
        return dataclasses.replace(key, variant=variant, names=names)

    def swap(self, program: Program) -> Callable[[], None]:
        """Compile and run steps of another program from now on; the function that comes back
        returns to the former one.

        Until then a shadow rests: what it is compared with is not there.
        """
        before = self.program, self._programs, self.shadow
        self.shadow = None
        self.program = program
        self._programs = {}

        def swap_back() -> None:
            self.program, self._programs, self.shadow = before

        return swap_back

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None = None) -> int:
        """Compile the programs that are missing, two at a time, and return how many there are,
        those that write rows included.

        What `progress` raises ends it, after the programs that are being compiled.
        """
        num_writers = self.writer.compile_all()
        goes_on = self._background.stop()
        keys = _with_full_vocab(keys, warms_full_vocab=self._warms_full_vocab)
        missing = [key for key in keys if self._cache_key(key) not in self._programs]
        try:
            StepCompiler(self, self._programs).make_all(missing, _counted(progress, len(missing)))
        finally:
            if goes_on:  # with what is left, which is nothing unless ops were swapped
                self._background.start()
        return len(keys) + num_writers

    def compile_first(self, keys: Sequence[StepKey], progress: Report | None = None) -> Background:
        """Compile the fewest programs that together serve every step, and those that write rows.
        What comes back compiles the others, from its start() on.

        Until the others are compiled, `at_hand` finds a program for each step. `progress` counts
        all programs; for the others it is called on their thread.
        """
        self.writer.compile_all()
        self._background.stop()
        keys = _with_full_vocab(keys, warms_full_vocab=self._warms_full_vocab)
        first = set(covering(keys))
        missing = [key for key in keys if self._cache_key(key) not in self._programs]
        told = _counted(progress, len(missing))
        compiler = StepCompiler(self, self._programs)
        compiler.make_all([key for key in missing if key in first], told)
        others = [key for key in missing if key not in first]
        others.sort(key=lambda key: (*key.size, key.full_vocab))
        jobs = [functools.partial(compiler.make_missing, key, told) for key in others]
        self._background = Background(jobs, "enginebay-compile")
        return self._background

    def at_hand(self, key: StepKey) -> StepKey:
        """The smallest program that serves a step and is compiled, while others are compiled in the
        background; `key` itself when it is compiled, or when none serves.
        """

        def is_warm(one: StepKey) -> bool:
            # All that is compiled ahead for steps of this size is there.
            wanted = _with_full_vocab([one], warms_full_vocab=self._warms_full_vocab)
            return all(self._cache_key(each) in self._programs for each in wanted)

        if self._background.is_done or is_warm(key):
            return key
        others = (other for other in self.programs if other.covers(key) and is_warm(other))
        return min(others, key=lambda other: other.size, default=key)

    def _cache_key(self, key: StepKey) -> tuple[StepKey, tuple[tuple[str, KVLayout], ...]]:
        return key, tuple(self.layouts.items())

    def _compiled(self, key: StepKey) -> Any:
        found = self._programs.get(self._cache_key(key))
        if found is not None:
            return found
        if self.compilations.forbidden:
            raise CompilationError(
                explain(
                    f"program not compiled: {key}",
                    "programs that warmup() compiled",
                    "Call warmup() first, or allow compiling while serving.",
                )
            )
        with waiting(f"compiling {key}, for {self._title}"):
            return StepCompiler(self, self._programs).make(key)


def _with_full_vocab(keys: Sequence[StepKey], *, warms_full_vocab: bool) -> list[StepKey]:
    """The keys, and with `warms_full_vocab` those of the same steps that return full-vocabulary
    log-probabilities.
    """
    can_return = [key for key in keys if key.kind != "verify"] if warms_full_vocab else []
    return list(
        dict.fromkeys((*keys, *(dataclasses.replace(k, full_vocab=True) for k in can_return)))
    )


def _counted(progress: Report | None, total: int) -> Callable[[StepKey], None]:
    """What calls `progress` with the number of a program, the total and the program's name."""
    done = itertools.count(1)

    def told(key: StepKey) -> None:
        if progress:
            progress(next(done), total, str(key))

    return told


def make_runner(parts: EngineParts, compilations: Compilations) -> Runner:
    """Load the weights, for steps that are still to be compiled."""
    config = parts.config
    settings = RunnerSettings(
        config.max_num_seqs,
        config.decode_steps,
        parts.platform.compile_options(),
        config.max_model_len,
        parts.shadow,
        config.dump_step,
        config.full_vocab_logprobs,
        parts.title,
    )
    program = parts.program()
    return Runner(program, parts.load_weights(), parts.placement, settings, compilations)
