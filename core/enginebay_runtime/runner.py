"""Runner: the weights and the step state on the device, and the compiled programs of its steps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from enginebay.config import EngineConfig
from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import Step
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.engine import Pending
from enginebay.contracts.executor import EngineParts, Report
from enginebay.contracts.model import ModelInfo, Weights
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.errors import CompilationError, InternalError, explain
from enginebay.folders import make_writable
from enginebay.ops import prefill_columns as columns
from enginebay.waits import waiting
from enginebay_runtime.background import Background
from enginebay_runtime.compiling import StepCompiler
from enginebay_runtime.launched import LaunchedStep
from enginebay_runtime.programs import ProgramName, cost, covering, covers, parts_of, program_name
from enginebay_runtime.rowwriter import RowWriter
from enginebay_runtime.scoping import Scoping
from enginebay_runtime.shadow import Shadow
from enginebay_runtime.step import Program, StepState
from enginebay_runtime.tables import ResidentTables, max_changes


class Runner:
    """Owns weights and step state on the device. Not thread-safe: one thread launches steps."""

    def __init__(self, parts: EngineParts, compilations: Compilations) -> None:
        config = parts.config
        assert config.max_model_len is not None, "the composition root resolves max_model_len"
        self.parts = parts
        self.program = Program.of(parts)
        self.title = parts.title
        self.weights: Weights = {}
        self.placement = parts.placement
        self.num_rows, self.max_model_len = config.max_num_seqs, config.max_model_len
        self.max_steps = config.decode_steps
        self.compile_options = dict(parts.platform.compile_options())
        self.dump_folder = (
            None if config.dump_step is None else make_writable(config.dump_step, "dump_step")
        )
        self.layouts: dict[str, CacheLayout] = {}
        self.shapes: Mapping[str, CacheShape] = {}
        self.compilations = compilations
        self.shadow = None if parts.shadow is None else Shadow(parts.shadow)
        self.writer = RowWriter(self)
        self.tables = ResidentTables(self.num_rows, self.placement.replicated)
        self._state: StepState | None = None
        self._programs: dict[ProgramName, Any] = {}
        self._chosen: dict[tuple[StepKey, StepNeeds], StepKey] = {}
        """Results of `choose` for the current layouts and program."""
        self._scoping = Scoping(has_greedy=self.program.has_greedy)
        self._background = Background()

    def set_layouts(self, shapes: Mapping[str, CacheShape]) -> None:
        """Record the cache's sizes; all entries of the page tables become 0."""
        self.shapes, self.layouts = shapes, dict(self.parts.layouts(shapes))
        self.tables.forget({g: s.page_size for g, s in shapes.items()}, self.max_model_len)
        self._chosen.clear()

    @property
    def info(self) -> ModelInfo:
        """The model's facts."""
        return self.program.model.info

    @property
    def state(self) -> StepState:
        """The step state. InternalError after the arrays were dropped."""
        if self._state is None:
            raise InternalError("a step without arrays: they were dropped and not made again")
        return self._state

    @state.setter
    def state(self, state: StepState | None) -> None:
        self._state = state

    @property
    def has_state(self) -> bool:
        """Whether the arrays are allocated."""
        return self._state is not None

    @property
    def programs(self) -> list[StepKey]:
        """Keys of the compiled steps, for caches of any size; inside an override() block, only of
        its steps.
        """
        return [key for key, _ in list(self._programs) if key.kind not in ("forward", "sample")]

    def close(self) -> None:
        """Free weights, cache and programs."""
        self._state, self.weights = None, {}
        self._programs.clear()
        self._chosen.clear()

    def launch(self, step: Step) -> Pending:
        """Launch a step."""
        key = step.program
        program, num = self._compiled(key), max_changes(key.bucket)
        few = step.tables
        if few:
            many = {g: entries for g, entries in few.items() if len(entries) > num}
            if many:
                self._state = self.tables.write(self.state, many)
                few = {g: entries for g, entries in few.items() if g not in many}
            self.tables.note(few)
        if self.shadow is not None and _can_be_watched(step):
            row_ids = step.inputs[1][:, 0] if key.kind == "prefill" else step.inputs[0]
            tables = self.tables.of_rows(row_ids, key.bucket.pages_per_seq)
            self.shadow.watch(self, step, tables)
        self._state, sampled = program(
            self.weights, self.state, self.tables.padded(few, num), *step.inputs
        )
        return LaunchedStep(sampled, step)

    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        """Return the key of the program that runs a step of `key`: the smallest compiled program
        that serves `need`, or else a program to compile. While programs are compiled in the
        background, it may be a compiled one for a larger bucket.
        """
        found = self._chosen.get((key, need))
        if found is not None:
            return found
        base = key
        if not self._background.is_done:
            adapts = self.parts.adapters is not None
            smallest = replace(key, full_vocab=False, pools=False, embeds=False, adapts=adapts)
            base = replace(key, bucket=self._at_hand(smallest).bucket)
        for serves in self._scoping.serving(base, need):
            if self._cache_key(serves) in self._programs:
                if self._background.is_done:
                    self._chosen[key, need] = serves
                return serves
        return self._scoping.to_compile(base, need)

    def swap(self, program: Program, title: str) -> Callable[[], None]:
        """Compile and run steps of another program from now on; `title` names its kernels in
        progress messages. Returns a function that restores the former one.

        Until then a shadow is off, because the implementation that it compares with is not in use.
        """
        before = self.program, self.title, self._programs, self.shadow
        self.shadow = None
        self.program, self.title = program, title
        self._programs = {}
        self._chosen.clear()

        def swap_back() -> None:
            self.program, self.title, self._programs, self.shadow = before
            self._chosen.clear()

        return swap_back

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None = None) -> int:
        """Compile the missing programs, two at a time. Returns the number of all programs,
        including those that write rows.

        When `progress` raises, the programs that are being compiled finish first, and the others
        are not compiled.
        """
        num_writers = self.writer.compile_all()
        was_running = self._background.stop()
        keys = _warmed(keys, self.parts.config)
        missing = [key for key in keys if self._cache_key(key) not in self._programs]
        try:
            StepCompiler(self, self._programs).make_all(missing, _counted(progress, len(missing)))
        finally:
            if was_running:  # to compile the rest; without a swap of ops there is none
                self._background.start()
        return len({part for key in keys for part in parts_of(key)}) + num_writers

    def compile_first(self, keys: Sequence[StepKey], progress: Report | None = None) -> Background:
        """Compile the fewest programs that together serve every step, and those that write rows.
        Returns a Background that compiles the others after its start().

        Until the others are compiled, `choose` finds a larger program for each step. `progress`
        counts all programs; for the others it is called on their thread.
        """
        self.writer.compile_all()
        self._background.stop()
        keys = _warmed(keys, self.parts.config)
        first = set(covering(keys))
        missing = [key for key in keys if self._cache_key(key) not in self._programs]
        report = _counted(progress, len(missing))
        compiler = StepCompiler(self, self._programs)
        compiler.make_all([key for key in missing if key in first], report)
        others = [key for key in missing if key not in first]
        others.sort(key=lambda key: (*cost(key), key.full_vocab))
        jobs = [functools.partial(compiler.make_missing, key, report) for key in others]
        self._background = Background(jobs, "enginebay-compile")
        return self._background

    def _at_hand(self, key: StepKey) -> StepKey:
        """The smallest compiled program that serves a step, while others are compiled in the
        background. `key` itself when it is compiled, or when none serves.
        """

        def is_warm(one: StepKey) -> bool:
            # Whether all programs of this size are compiled that warmup() would compile.
            wanted = _warmed([one], self.parts.config)
            return all(self._cache_key(each) in self._programs for each in wanted)

        if is_warm(key):
            return key
        others = (other for other in self.programs if covers(other, key) and is_warm(other))
        return min(others, key=cost, default=key)

    def _cache_key(self, key: StepKey) -> ProgramName:
        return program_name(key, self.layouts)

    def _compiled(self, key: StepKey) -> Any:
        found = self._programs.get(self._cache_key(key))
        if found is not None:
            return found
        if self.compilations.forbidden:
            raise CompilationError(
                explain(
                    f"program not compiled: {key}",
                    "programs that warmup() compiled",
                    "Call warmup() first, or set forbid_compiling = false.",
                )
            )
        with waiting(f"compiling {key}, for {self.title}"):
            return StepCompiler(self, self._programs).make(key)


def _can_be_watched(step: Step) -> bool:
    """Whether a shadow can repeat a step: its tokens are in the step's inputs or in the rows."""
    if step.program.kind == "prefill":
        return not (
            step.program.embeds or (step.inputs[1][:, columns.SAMPLES] == columns.DECODES).any()
        )
    return step.program.kind != "verify"


def _warmed(keys: Sequence[StepKey], config: EngineConfig) -> list[StepKey]:
    """The keys, and the keys of the same steps with the additional results and with the adapters
    that the configuration enables.
    """
    every = list(keys)
    if config.full_vocab_logprobs:
        every += [replace(key, full_vocab=True) for key in every if key.kind != "verify"]
    if config.embeddings:
        every += [replace(key, pools=True) for key in every if key.kind == "prefill"]
    if config.prompt_embeds:
        every += [replace(key, embeds=True) for key in every if key.kind == "prefill"]
    if config.lora_slots:
        every += [replace(key, adapts=True) for key in every]
    return list(dict.fromkeys(every))


def _counted(progress: Report | None, total: int) -> Callable[[StepKey], None]:
    """A function that calls `progress` with the program's number, the total, and the program's
    name.
    """
    done = itertools.count(1)

    def report(key: StepKey) -> None:
        if progress:
            progress(next(done), total, str(key))

    return report
