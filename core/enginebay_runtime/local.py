"""LocalExecutor: owns the weights and the step state on the device, and runs commands in this
process.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from enginebay.contracts.cache import CacheLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import (
    ClearPages,
    CopyPages,
    DecodeInputs,
    Drop,
    ExecutorCommand,
    Grow,
    Make,
    PageIn,
    PageOut,
    PrefillInputs,
    Put,
    SetAdapter,
    SetParts,
    SetWeights,
    Step,
    Take,
    WriteRows,
)
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.executor import EngineParts, Executor, Report
from enginebay.contracts.model import ModelInfo, Weights
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.errors import CompilationError, InternalError, explain
from enginebay.folders import make_writable
from enginebay.jax_config import stored_programs_folder
from enginebay.ops import prefill_columns as columns
from enginebay.shadow_report import ShadowReport
from enginebay.waits import waiting
from enginebay.weights import merge_weights
from enginebay_runtime.background import AfterRuns, Background, EndedError
from enginebay_runtime.capture import Capture
from enginebay_runtime.compile_process import CompileProcess
from enginebay_runtime.compiling import CompileElsewhere, StepCompiler, StepSource, is_final
from enginebay_runtime.launched import LaunchedStep
from enginebay_runtime.pages import PageMover
from enginebay_runtime.programs import (
    ProgramName,
    Scoping,
    cost,
    covering,
    covers,
    in_order,
    is_near,
    parts_of,
    program_name,
    several_rows,
    several_tokens,
    warmed,
)
from enginebay_runtime.resize import CacheMaker
from enginebay_runtime.row_io import put_row, take_row
from enginebay_runtime.row_writer import RowWriter
from enginebay_runtime.shadow import Shadow
from enginebay_runtime.slots import SlotWriter
from enginebay_runtime.step import StepState
from enginebay_runtime.stored_programs import ProgramStore
from enginebay_runtime.tables import ResidentTables, max_changes

Result = TypeVar("Result")


WHOLE_AFTER = 256
"""After how many decoded tokens of all rows a LayeredStep, outside a warm-up, is replaced by the
whole step. A process that ends waits for the compiler, which takes longer than a short answer.
"""

BUSY_S = 0.3
"""How long after the launch of a step others are expected."""

PREFILL_COST = 64
"""As how many tokens a run of another LayeredStep counts."""


class LocalExecutor(Executor):
    """Runs commands in this process. Owns weights and step state on the device. Not thread-safe:
    one thread runs commands.
    """

    def __init__(self, parts: EngineParts) -> None:
        config = parts.config
        assert config.max_model_len is not None, "the composition root resolves max_model_len"
        self.parts, self.title = parts, parts.title
        self.model_weights: Weights = {}
        self.placement = parts.placement
        self.num_rows, self.max_model_len = config.max_num_seqs, config.max_model_len
        self.max_steps = config.decode_steps
        self.compile_options = dict(parts.platform.compile_options())
        self.dump_folder = (
            None if config.dump_step is None else make_writable(config.dump_step, "dump_step")
        )
        self.store = self._open_store()
        """Where compiled steps are kept for other processes; None: nowhere."""
        self.layouts: dict[str, CacheLayout] = {}
        self.shapes: Mapping[str, CacheShape] = {}
        self.compilations = Compilations()
        self.shadow = None if parts.shadow is None else Shadow(parts.shadow)
        self._capture = None if config.capture is None else Capture(config.capture, _facts(parts))
        self.tables = ResidentTables(self.num_rows, self.placement.replicated)
        self._state: StepState | None = None
        self._programs: dict[ProgramName, Any] = {}
        self._chosen: dict[tuple[StepKey, StepNeeds], StepKey] = {}
        """Results of `choose` for the current layouts and parts."""
        self._scoping = Scoping(has_greedy=parts.has_greedy)
        self._background = Background()
        self._process = CompileProcess(parts.config, parts.program_digest, self._is_busy)
        self._layered_runs = AfterRuns(WHOLE_AFTER, "enginebay-compile", self._process)
        self._has_layered, self._launched_s = False, -math.inf
        self._launched: Any = None
        """Tokens of the last step."""
        self._undo = list[Callable[[], None]]()
        self._writer = writer = RowWriter(self)
        self._mover = mover = PageMover(self)
        self._slots = SlotWriter(self)
        maker = CacheMaker(self, writer)
        self._run: Mapping[type[Any], Callable[[Any], Any]] = {
            WriteRows: writer.write,
            CopyPages: mover.copy,
            PageOut: mover.page_out,
            PageIn: mover.page_in,
            Make: maker.make,
            Grow: maker.grow,
            ClearPages: maker.clear,
            Drop: maker.drop,
            Take: functools.partial(take_row, self, writer),
            Put: functools.partial(put_row, self, writer),
            SetParts: self._set_parts,
            SetWeights: self._set_weights,
            SetAdapter: self._slots.write,
        }
        """What runs each command except Step."""

    def run(self, command: ExecutorCommand[Result]) -> Result:
        if not isinstance(command, Step):
            return cast("Result", self._run[type(command)](command))
        key, few = command.program, command.tables
        num = max_changes(key.bucket)
        program = self._programs.get(program_name(key, self.layouts))
        if program is None:
            program = self._compiled(key)
        if few:
            many = {g: entries for g, entries in few.items() if len(entries) > num}
            if many:
                tables = self.tables.write(self.state.tables, many)
                self._state = replace(self.state, tables=tables)
                few = {g: entries for g, entries in few.items() if g not in many}
            self.tables.note(few)
        for watcher in (self.shadow, self._capture):
            if watcher is not None and _can_be_watched(command):
                watcher.watch(self, command, self._pages_of(command))
        self._launched_s = math.inf  # some programs return only when the step has run
        try:
            self._state, sampled = program(
                self.model_weights, self.state, self.tables.padded(few, num), command.inputs
            )
        finally:
            self._launched_s = time.monotonic()
        self._launched = sampled.tokens
        if self._has_layered and self._background.is_done and not is_final(program):
            inputs, num = command.inputs, PREFILL_COST
            if isinstance(inputs, DecodeInputs):
                num = int(inputs.num_steps) * key.bucket.seqs
            self._layered_runs.count(key, functools.partial(self._making_whole, key), num)
        return cast("Result", LaunchedStep(sampled, command))

    def _is_busy(self) -> bool:
        """Whether a step runs, or was launched a moment ago."""
        tokens = self._launched
        runs = tokens is not None and not (tokens.is_deleted() or tokens.is_ready())
        return runs or time.monotonic() - self._launched_s < BUSY_S

    def _making_whole(self, key: StepKey) -> Callable[[], None]:
        """Return what compiles the whole program of a step."""
        source = StepSource.of(self)
        make = StepCompiler(source, self._programs).make_missing
        return functools.partial(make, key, self._counted(None, 0), self._process.of(source))

    def _open_store(self) -> ProgramStore | None:
        if self.parts.config.compile_cache == "off":
            return None
        folder = stored_programs_folder()
        if folder is None or not self.parts.program_digest or self.dump_folder is not None:
            return None
        return ProgramStore(folder, self.parts)

    def set_layouts(self, shapes: Mapping[str, CacheShape]) -> None:
        """Record the cache's sizes; all entries of the page tables become 0."""
        self.shapes, self.layouts = shapes, dict(self.parts.layouts(shapes))
        self.tables.forget({g: s.page_size for g, s in shapes.items()}, self.max_model_len)
        self._chosen.clear()

    @property
    def info(self) -> ModelInfo:
        """The model's facts."""
        return self.parts.info

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
        self._layered_runs.stop()
        self._background.stop()
        self._process.close()
        self._state, self.model_weights = None, {}
        self._programs.clear()
        self._chosen.clear()
        self._mover.forget()

    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        """The smallest compiled program that serves `need`, or else a program to compile. While
        programs are compiled in the background, it may be a compiled one for a larger bucket.
        """
        found = self._chosen.get((key, need))
        if found is not None:
            return found
        base, is_done = key, self._background.is_done
        if not is_done and (at_hand := self._at_hand(key)) is not None:
            base = replace(key, bucket=at_hand.bucket)
        for serves in self._scoping.serving(base, need):
            if program_name(serves, self.layouts) in self._programs:
                if is_done:
                    self._chosen[key, need] = serves
                return serves
        return self._scoping.to_compile(base, need)

    def serves(self, key: StepKey) -> bool:
        return self._background.is_done or self._at_hand(key) is not None

    def swap(self, parts: EngineParts) -> Callable[[], None]:
        # Until then no shadow runs: the implementation that it compares with is not in use.
        before = self.parts, self.title, self._programs, self.shadow, self.store
        self.shadow = None
        self.parts, self.title = parts, parts.title
        self._programs, self.store = {}, self._open_store()
        self._chosen.clear()

        def swap_back() -> None:
            self.parts, self.title, self._programs, self.shadow, self.store = before
            self._chosen.clear()

        return swap_back

    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        if copies:
            self._mover.compile()
        return self.compile_steps(keys, progress) + copies + self._slots.compile()

    def compile_steps(self, keys: Sequence[StepKey], progress: Report | None = None) -> int:
        """Compile the missing programs, two at a time. Returns the number of all programs,
        including those that write rows.

        When `progress` raises, the programs that are being compiled finish first, and the others
        are not compiled.
        """
        num_writers = self._writer.compile_all()
        was_running = self._background.stop()
        keys = warmed(keys, self.parts.config)
        missing = [key for key in keys if self._lacks(key)]
        try:
            compiler = StepCompiler(StepSource.of(self), self._programs)
            compiler.make_all(missing, self._counted(progress, len(missing)))
        finally:
            if was_running:  # to compile the rest; without a swap of ops there is none
                self._background.start()
        return len({part for key in keys for part in parts_of(key)}) + num_writers

    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> Background:
        if copies:
            self._mover.compile()
        self._slots.compile()
        return self.compile_first_steps(keys, progress)

    def compile_first_steps(
        self, keys: Sequence[StepKey], progress: Report | None = None
    ) -> Background:
        """Compile the programs of the first steps `in_order`, as LayeredSteps where they can be,
        and those that write rows. Returns a Background that compiles the others after its start():
        first steps of several rows and tokens as LayeredSteps, which make no way for steps, because
        until they are there batches and long prompts run in small parts; then the whole programs of
        the first steps, those that decode without pauses; then the others.

        Until the others are compiled, `choose` finds a larger program for each step that one
        `serves`. `progress` counts all programs; for the others it is called on their thread.
        """
        self._writer.compile_all()
        self._background.stop()
        first, later = in_order(keys, self.parts.config, self.parts.free_padding_rows)

        def missing(keys: Iterable[StepKey]) -> list[StepKey]:
            names = [(key, program_name(key, self.layouts)) for key in keys]
            return [key for key, name in names if name not in self._programs]

        first_missing, others = missing(first), missing(later)
        report = self._counted(progress, len(first_missing) + len(others))
        source = StepSource.of(self)
        layered = StepCompiler(source, self._programs, layered=True, one_sampler=True)
        layered.make_all(first_missing, report)
        whole = StepCompiler(source, self._programs)
        there = [key for key in (*first, *later) if key not in others and self._lacks(key)]
        every, free = [*first, *later], self.parts.free_padding_rows
        several = [*several_rows(every), *several_tokens(every, free)]
        several = [key for key in several if key in others]
        uncounted = self._counted(None, 0)
        process_of = functools.partial(self._process.of, source)
        self.compilations.coming = tuple(dict.fromkeys((*several, *others)))

        def made(
            compiler: StepCompiler,
            key: StepKey,
            report: Callable[[StepKey], None],
            elsewhere: CompileElsewhere | None,
        ) -> None:
            try:
                compiler.make_missing(key, report, elsewhere)
            except EndedError:
                raise
            except (
                BaseException
            ):  # the first step that needs it compiles again and raises the error
                self.compilations.came(key)
                raise

        decodes, prefills = (
            [key for key in there if (key.kind == "prefill") is kind] for kind in (False, True)
        )
        asked = [(layered, key, uncounted, process_of(priority="high")) for key in several]
        asked += [(whole, key, uncounted, process_of(priority="idle")) for key in decodes]
        asked += [(whole, key, uncounted, process_of()) for key in prefills]
        asked += [(whole, key, report, process_of()) for key in others]
        jobs = [functools.partial(made, *each) for each in asked]
        self._background = Background(jobs, "enginebay-compile", self._process)
        return self._background

    def _counted(self, progress: Report | None, total: int) -> Callable[[StepKey], None]:
        """A function that notes that a step's program is there, and calls `progress` with the
        program's number, the total, and its name.
        """
        done = itertools.count(1)

        def report(key: StepKey) -> None:
            self.compilations.came(key)
            if progress:
                progress(next(done), total, str(key))

        return report

    def _lacks(self, key: StepKey) -> bool:
        """Whether a program of the whole step is not compiled."""
        names = [program_name(one, self.layouts) for one in (key, *parts_of(key))]
        programs = [self._programs.get(name) for name in names]
        return not all(program is not None and is_final(program) for program in programs)

    def _at_hand(self, key: StepKey) -> StepKey | None:
        """The smallest compiled program that serves a step in all its variants, while others are
        compiled in the background; None when no program does.
        """
        adapts = self.parts.adapters is not None
        key = replace(key, full_vocab=False, pools=False, embeds=False, adapts=adapts)

        def is_warm(one: StepKey) -> bool:
            # Whether all programs of this size are compiled that warmup() would compile.
            wanted = covering(warmed([one], self.parts.config))
            return all(program_name(each, self.layouts) in self._programs for each in wanted)

        if is_warm(key):
            return key
        free = self.parts.free_padding_rows
        near = (o for o in self.programs if covers(o, key) and is_near(o, key, free))
        others = (other for other in near if is_warm(other))
        return min(others, key=cost, default=None)

    def _compiled(self, key: StepKey) -> Any:
        """Compile the program of a step now."""
        if self.compilations.forbidden:
            raise CompilationError(
                explain(
                    f"program not compiled: {key}",
                    "programs that warmup() compiled",
                    "Call warmup() first, or set forbid_compiling = false.",
                )
            )
        compiler = StepCompiler(StepSource.of(self), self._programs, layered=True)
        with waiting(f"compiling {key}, for {self.title}"):
            for part in compiler.missing([key]):
                program = compiler.load(part)
                if program is None:
                    program = compiler.compile(part, compiler.lower(part))
                compiler.keep(part, program)
            joined = compiler.joined(key)
        self._has_layered |= not is_final(joined)
        return joined

    def _pages_of(self, step: Step) -> Mapping[str, Any]:
        """The pages of a step's rows, int32 [S, P] by group."""
        inputs = step.inputs
        if isinstance(inputs, PrefillInputs):
            row_ids = inputs.ints[:, columns.ROW]
        else:
            row_ids = inputs.row_ids
        return self.tables.of_rows(row_ids, step.program.bucket.pages_per_seq)

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def weights(self) -> Weights:
        return self.model_weights

    def arrays(self) -> StepState:
        return self.state

    @property
    def shadow_report(self) -> ShadowReport | None:
        return None if self.shadow is None else self.shadow.report()

    def _set_parts(self, command: SetParts) -> None:
        if command.names:
            self._undo.append(self.swap(self.parts.changed(command.names)))
        else:
            self._undo.pop()()

    def _set_weights(self, command: SetWeights) -> None:
        self.model_weights = merge_weights(self.model_weights, command.weights)


def _facts(parts: EngineParts) -> dict[str, str]:
    """What the file of a capture tells of the run."""
    packages = {name: metadata.version(name) for name in ("enginebay", "jax")}
    env = parts.platform.env()
    device = env.device_kind or env.platform
    return {
        "model": Path(parts.config.model).name,
        "engine": parts.title,
        "device": device,
        **packages,
    }


def _can_be_watched(step: Step) -> bool:
    """Whether a step can be repeated: its tokens are in the step's inputs or in the rows."""
    if isinstance(step.inputs, PrefillInputs):
        samples = step.inputs.ints[:, columns.SAMPLES]
        return not (step.program.embeds or (samples == columns.DECODES).any())
    return step.program.kind != "verify"
