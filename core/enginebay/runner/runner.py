"""Runner: compiles a step once per bucket, launches it with cache and rows donated, and hands back
its tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import KVLayout
from enginebay.engine import AttentionProblem, Compilations, Pending
from enginebay.errors import CompilationError, InternalError, explain
from enginebay.model import ModelInfo, Weights
from enginebay.ops.shadow import ShadowReport
from enginebay.ops.spec import Bucket
from enginebay.processor import Sizes, empty_rows
from enginebay.runner import device
from enginebay.runner.ahead import compile_ahead
from enginebay.runner.device import DeviceRows
from enginebay.runner.dump import dump_program, make_writable
from enginebay.runner.full_vocab import FullVocabInputs
from enginebay.runner.launched import LaunchedStep
from enginebay.runner.parts import EngineParts
from enginebay.runner.rowwriter import RowUpdate, RowWriter
from enginebay.runner.scoping import UNKNOWN, Need, Scoping
from enginebay.runner.shadow import Shadow, ShadowParts
from enginebay.runner.sharding import Placement
from enginebay.runner.step import (
    Program,
    Sampled,
    Scope,
    StepState,
    compact_decode_step,
    decode_step,
    prefill_step,
)
from enginebay.runner.verify import draft_rows, verify_step
from enginebay.waits import waiting

log = logging.getLogger("enginebay.runner")

Kind = Literal["prefill", "decode", "compact", "verify"]
STEPS: dict[Kind, Callable[..., tuple[StepState, Sampled]]] = {
    "prefill": prefill_step,
    "decode": decode_step,
    "compact": compact_decode_step,
    "verify": verify_step,
}


@dataclasses.dataclass(frozen=True)
class StepKey:
    """What one compiled step is for. "compact" decodes on a copy of the rows' cache.

    `wide`: it tells wide log-probabilities too; a decode then has one token a row. `names`: its
    logits processors, None for all.
    """

    kind: Kind
    bucket: Bucket
    scope: Scope = "full"
    full_vocab: bool = False
    names: frozenset[str] | None = None

    def __str__(self) -> str:
        b = self.bucket
        size = f"{b.tokens} tokens" if self.kind == "prefill" else f"{b.seqs} rows"
        scope = "" if self.scope == "full" else f", {self.scope}"
        full_vocab = ", full-vocabulary log-probabilities" if self.full_vocab else ""
        return f"{self.kind} {size}, {b.mode}, context {b.max_kv_len}{scope}{full_vocab}"

    def attention(
        self, layouts: Mapping[str, KVLayout], *, by_rows: bool = False
    ) -> AttentionProblem:
        """The bucket and the layouts that its attention sees: those of the copy, if there is one;
        `by_rows`: drafts are rows.
        """
        if self.kind != "compact":
            return draft_rows(
                self.bucket
            ) if by_rows and self.kind == "verify" else self.bucket, layouts
        rows, length = self.bucket.seqs, self.bucket.max_kv_len
        small = {
            name: layout.resized(num_pages=rows, page_size=length)
            for name, layout in layouts.items()
        }
        return dataclasses.replace(self.bucket, rows_are_pages=True, pages_per_seq=1), small


@dataclasses.dataclass(frozen=True, slots=True)
class KnownTokens:
    """The first tokens of a row, int32, which no chunk brings."""

    row: int
    token_ids: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillInputs:
    """Host arrays of a prefill call; see `prefill_step`. `known` is written to the rows' history
    before, and `used`, an entry for each row that samples, becomes all that these rows have of
    logits processors.

    `returns_logprobs`: a row asks for log-probabilities, so that they are sent to the host with the
    tokens. `need`: the least that serves the rows. `wide`: what a wide step is asked for.
    """

    token_ids: np.ndarray
    ints: np.ndarray
    floats: np.ndarray
    tables: Mapping[str, np.ndarray]
    known: tuple[KnownTokens, ...] = ()
    returns_logprobs: bool = False
    need: Need = UNKNOWN
    used: tuple[RowUpdate, ...] = ()
    full_vocab: FullVocabInputs | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Host arrays of a decode call; see `decode_step`, and PrefillInputs. `updates` are written
    before.

    With `draft_ids` they are those of a `verify_step`.
    """

    row_ids: np.ndarray
    num_steps: int
    tables: Mapping[str, np.ndarray]
    returns_logprobs: bool = False
    need: Need = UNKNOWN
    updates: tuple[RowUpdate, ...] = ()
    full_vocab: FullVocabInputs | None = None
    draft_ids: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class RunnerSettings:
    """Rows of the device's row table, most tokens a row gets in one decode call, XLA options, most
    tokens of a row.

    `max_model_len` None is the model's own. `shadow`: what is compared with the chosen kernels on
    some steps. `dump_step`: the folder that every compiled program is described in. `warms_wide`:
    compile_all makes the programs for wide log-probabilities too. `title`: engine and kernels, for
    whoever waits for a program.
    """

    num_rows: int
    max_steps: int
    compile_options: Mapping[str, Any]
    max_model_len: int | None = None
    shadow: ShadowParts | None = None
    dump_step: str | None = None
    warms_wide: bool = False
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
        self._warms_wide, self._title = settings.warms_wide, settings.title
        self.layouts: dict[str, KVLayout] = {}
        self.compilations = compilations
        self.shadow = None if settings.shadow is None else Shadow(settings.shadow)
        self._state: StepState | None = None
        self._programs: dict[tuple[StepKey, tuple[tuple[str, KVLayout], ...]], Any] = {}
        self.writer = RowWriter(self)
        self._scoping = Scoping(has_greedy=program.has_greedy)

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
        return [key for key, _ in self._programs]

    def make_state(self, layouts: Mapping[str, KVLayout]) -> None:
        """Allocate an empty cache of these layouts, and rows that are all finished."""
        self.layouts = dict(layouts)
        cache = {
            group.name: tuple(
                self._empty_layer(layouts[group.name]) for _ in range(group.num_layers)
            )
            for group in self.info.groups
        }
        rows = DeviceRows.empty(self.num_rows, self.max_model_len)
        processor_state = empty_rows(
            self.program.processors, self.num_rows, Sizes(self.info.vocab_size, self.max_model_len)
        )
        rows, processor_state = jax.device_put((rows, processor_state), self.placement.replicated)
        self._state = StepState(cache, rows, processor_state)
        self.writer.forget()

    def _empty_layer(self, layout: KVLayout) -> dict[str, jax.Array]:
        where = self.placement.cache(layout)
        return {n: jnp.zeros(s.shape, s.dtype, device=where[n]) for n, s in layout.shapes().items()}

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

    def _scoped(self, key: StepKey, need: Need) -> StepKey:
        """The key of the least form that serves and is compiled, or of what is to be compiled."""
        forms = (
            dataclasses.replace(key, scope=scope, names=n) for scope, n in self._scoping.forms(need)
        )
        found = next((form for form in forms if self._cache_key(form) in self._programs), None)
        if found is not None:
            return found
        scope, names = self._scoping.to_compile(need)
        return dataclasses.replace(key, scope=scope, names=names)

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

    def compile_all(
        self, keys: Sequence[StepKey], progress: Callable[[int, int, str], None] | None = None
    ) -> int:
        """Compile the programs that are missing, two at a time, and return how many there are,
        those that write rows included.

        What `progress` raises ends it, after the programs that are being compiled.
        """
        num_writers = self.writer.compile_all()
        can_return_full_vocab = (
            [key for key in keys if key.kind != "verify"] if self._warms_wide else []
        )
        keys = [
            *keys,
            *(dataclasses.replace(key, full_vocab=True) for key in can_return_full_vocab),
        ]
        missing = [key for key in dict.fromkeys(keys) if self._cache_key(key) not in self._programs]
        done = itertools.count(1)

        def keep(key: StepKey, compiled: Any) -> None:
            self._programs[self._cache_key(key)] = compiled
            self.compilations.count += 1
            if progress:
                progress(next(done), len(missing), str(key))

        compile_ahead(missing, self._lower, functools.partial(_compile, self), keep)
        return len(keys) + num_writers

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
            found = _compile(self, key, self._lower(key))
        self._programs[self._cache_key(key)] = found
        self.compilations.count += 1
        return found

    def _lower(self, key: StepKey) -> Any:
        bucket = key.bucket
        tables = {
            g: jax.ShapeDtypeStruct((bucket.seqs, bucket.pages_per_seq), jnp.int32)
            for g in self.layouts
        }
        held = jax.tree.map(_describe, (self.weights, self.state))
        processors = tuple(
            (name, one)
            for name, one in self.program.processors
            if key.names is None or name in key.names
        )
        program = dataclasses.replace(
            self.program, full_vocab=key.full_vocab, processors=processors
        )
        if key.kind == "prefill":
            step = functools.partial(
                prefill_step, program, dict(self.layouts), bucket, scope=key.scope
            )
            args: tuple[Any, ...] = (
                jax.ShapeDtypeStruct((bucket.tokens,), jnp.int32),
                jax.ShapeDtypeStruct((bucket.seqs, device.NUM_INT_COLUMNS), jnp.int32),
                jax.ShapeDtypeStruct((bucket.seqs, device.NUM_FLOAT_COLUMNS), jnp.float32),
                tables,
                *((jax.ShapeDtypeStruct((bucket.tokens,), jnp.int32),) if key.full_vocab else ()),
            )
        else:
            verifies = key.kind == "verify"
            sizes = (bucket,) if verifies else (bucket, 1 if key.full_vocab else self.max_steps)
            step = functools.partial(
                STEPS[key.kind], program, dict(self.layouts), *sizes, scope=key.scope
            )
            args = (
                jax.ShapeDtypeStruct((bucket.seqs,), jnp.int32),
                jax.ShapeDtypeStruct(
                    (bucket.seqs, self.program.drafts_a_step(bucket)) if verifies else (), jnp.int32
                ),
                tables,
            )
        outputs = None
        if (
            self.placement.mesh is not None
        ):  # donated arrays are reused only when they come back as they went
            outputs = (jax.tree.map(lambda a: a.sharding, self.state), self.placement.replicated)
        # partial objects have no name; this one is what profiles and compile logs show
        step.__name__ = f"enginebay_{key.kind}"  # type: ignore[attr-defined]
        return jax.jit(step, donate_argnums=1, out_shardings=outputs).lower(*held, *args)


def _compile(runner: Runner, key: StepKey, lowered: Any) -> Any:
    compiled = lowered.compile(compiler_options=runner.compile_options)
    if runner.dump_folder is not None:
        dump_program(runner.dump_folder, str(key), runner.layouts, lowered, compiled)
    return compiled


def _describe(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


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
