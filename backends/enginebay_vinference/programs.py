"""Programs: the compiled functions of an inference, one pair for each shape, made once however many
threads ask.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.cache import KVLayout
from enginebay.errors import CompilationError, ConfigError, RequestError, StoppedError
from enginebay.executor.parts import EngineParts
from enginebay.stepping.engine import StepEngine
from enginebay.types import MAX_STOP_TOKENS, ROW_VALUES
from enginebay.waits import waiting
from enginebay_executor.local import runner_of
from enginebay_executor.step import Program
from enginebay_vinference.functions import Arrays, Function, InferenceShape, Recipe, decode, prefill
from enginebay_vinference.partition import LEAF_NAMES, VIEWS, StatePlacement
from enginebay_vinference.slot_sizes import slot_shape

log = logging.getLogger("enginebay.vinference")

ProgramKind = Literal["prefill", "decode"]
STEPS: dict[ProgramKind, Callable[..., Any]] = {"prefill": prefill, "decode": decode}
KINDS: tuple[ProgramKind, ProgramKind] = ("prefill", "decode")

PATHS = {
    "tokens": "sequences",
    "mask": "model_kwargs/attention_mask",
    "position": "model_kwargs/position_ids",
    "last": "running_token",
    "finished": "is_sequence_finished",
    "column": "current_length",
}
"""Where the functions' arrays stand in a state."""

SAMPLING: dict[str, Any] = {
    "max_length": np.int32,
    "prompt_length": np.int32,
    "stop_ids": np.int32,
} | {name: np.dtype(one.dtype) for name, one in ROW_VALUES.items()}
"""Each row's sampling parameters, as the engine's rows name them, with their dtypes."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The compiled functions of one shape."""

    prefill: Function
    decode: Function


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """A program and what was compiled of it. `always_compiles`: whatever the engine forbids."""

    program: Program
    pairs: dict[InferenceShape, Pair] = dataclasses.field(default_factory=dict)
    locks: dict[InferenceShape, threading.Lock] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(threading.Lock)
    )
    """Held while the pair of a shape is compiled."""
    always_compiles: bool = False


class Programs:
    """Compiles, keeps and hands out Pairs. Safe from several threads; a shape whose compilation
    failed can be tried again.

    The program is the engine's as it was when this was made: what is swapped in an LLM that shares
    the engine stays there.
    """

    def __init__(self, engine: StepEngine, placement: StatePlacement) -> None:
        self.engine = engine
        self.placement = placement
        # A generator that is collected as garbage lets go of its use, perhaps while the lock is
        # held.
        self._lock = threading.RLock()
        self._made = Made(runner_of(engine).program)
        self._num_uses = 0
        self._described: dict[tuple[InferenceShape, ProgramKind], Arrays] = {}

    @property
    def shapes(self) -> list[InferenceShape]:
        """What is compiled now."""
        return list(self._made.pairs)

    def use(self) -> Use:
        """A hold on what is used now."""
        return Use(self, self._made)

    def count(self, change: int) -> None:
        """Take note that so many more uses are under way."""
        with self._lock:
            self._num_uses += change

    def check_lasting(self) -> None:
        """RequestError within a block of override(), whose functions nobody is to keep."""
        if self._made.always_compiles:
            raise RequestError(
                "functions of implementations that are swapped in, to be saved",
                "those that stay",
                "Save the inference after the block of override().",
            )

    @contextlib.contextmanager
    def override(self, parts: EngineParts) -> Iterator[None]:
        """While the block lasts, use functions made of other parts; those that were compiled come
        back afterwards.

        RequestError while there are uses under way; those that are at the end of the block end with
        StoppedError.
        """
        with self._lock:
            if self._num_uses:
                raise RequestError(
                    "generations are under way while implementations are to be swapped",
                    "none",
                    "Let them end, or close their generators, and try again.",
                )
            before, self._made = self._made, Made(Program.of(parts), always_compiles=True)
        try:
            yield
        finally:
            with self._lock:
                self._made = before

    def get(
        self,
        shape: InferenceShape,
        *,
        ahead: bool,
        make: Callable[[], Pair] | None = None,
        made: Made | None = None,
    ) -> Pair:
        """The pair for `shape`, compiled when there is none; `make` takes the place of compiling.

        Threads that ask for one shape wait for one compilation; after one that failed, or that
        Ctrl-C has ended, the next thread compiles. `ahead`: before any request waits for it. Raises
        CompilationError otherwise when the engine may compile no more. `made`: where it is looked
        for and kept; None: what is used now.
        """
        made = made or self._made
        with self._lock:
            lock = made.locks[shape]
        with lock:
            pair = made.pairs.get(shape)
            if pair is None:
                may = ahead or made.always_compiles
                if not may and self.engine.compilations.forbidden:
                    raise CompilationError(
                        f"no program for {shape}",
                        "shapes that precompile() was given",
                        "Precompile it first.",
                    )
                pair = made.pairs[shape] = make() if make else self._compile(shape, made.program)
            return pair

    def _compile(self, shape: InferenceShape, program: Program) -> Pair:
        start = time.perf_counter()
        with waiting(f"compiling {shape}, for {self.engine.parts.title}"):
            recipe = self.recipe(shape, program)
            lowered = [
                self.jitted(shape, kind, recipe=recipe).lower(*self.describe(shape, kind))
                for kind in KINDS
            ]
            pair = self.compile_lowered(lowered)
        log.info("compiled %s in %.2f s", shape, time.perf_counter() - start)
        return pair

    def compile_lowered(self, lowered: list[Any]) -> Pair:
        """Compile both functions, side by side."""
        options = dict(self.engine.parts.platform.compile_options())
        with ThreadPoolExecutor(len(KINDS)) as pool:
            made = list(pool.map(lambda one: one.compile(compiler_options=options), lowered))
        self.engine.compilations.count += len(KINDS)
        return Pair(*made)

    def jitted(
        self,
        shape: InferenceShape,
        kind: ProgramKind,
        function: Callable[..., Any] | None = None,
        recipe: Recipe | None = None,
    ) -> Any:
        """One of the functions (or `function` in its place), ready to be lowered: the state's
        arrays are donated.

        `recipe` None: that of what is used now.
        """
        step = (
            functools.partial(STEPS[kind], recipe or self.recipe(shape))
            if function is None
            else function
        )
        if function is None:
            # partial objects have no name; this one is what profiles and compile logs show
            step.__name__ = f"enginebay_vinference_{kind}"
        outputs = None
        if self.engine.parts.placement.mesh is not None:
            after = self.arrays(shape, "decode")
            outputs = (
                jax.tree.map(lambda a: a.sharding, after),
                self.engine.parts.placement.replicated,
            )
        return jax.jit(step, donate_argnums=1, out_shardings=outputs)

    def recipe(self, shape: InferenceShape, program: Program | None = None) -> Recipe:
        """What the functions of a shape are made of; `program` None: the one that is used now."""
        engine = self.engine
        slots = slot_shape(shape.num_rows, shape.width, engine.sizes.page_size)
        layouts = engine.parts.kv_layouts(dict.fromkeys(engine.sizes.whole, slots))
        return Recipe(program or self._made.program, shape, slots, layouts)

    def describe(
        self, shape: InferenceShape, kind: ProgramKind
    ) -> tuple[Any, Arrays, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of a function's arguments."""
        weights = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding),
            runner_of(self.engine).weights,
        )
        keys = jax.ShapeDtypeStruct(
            (shape.num_rows, 2), jnp.uint32, sharding=self.engine.parts.placement.replicated
        )
        return weights, self.arrays(shape, kind), keys

    def arrays(self, shape: InferenceShape, kind: ProgramKind) -> Arrays:
        """Shapes, dtypes and shardings of the state's arrays before a function; put together
        once.
        """
        found = self._described.get((shape, kind))
        if found is None:
            found = self._described[shape, kind] = self._arrays(shape, with_cache=kind == "decode")
        return found

    def _arrays(self, shape: InferenceShape, *, with_cache: bool) -> Arrays:
        rows, width = shape.num_rows, shape.width
        sizes = {
            "tokens": (rows, width),
            "mask": (rows, width),
            "position": (rows, 1),
            "last": (rows, 1),
        }

        def one(
            path: str, size: tuple[int, ...], dtype: Any, layout: KVLayout | None = None
        ) -> jax.ShapeDtypeStruct:
            sharding = self.placement.sharding(path, layout)
            try:
                sharding.shard_shape(size)
            except ValueError as error:
                raise ConfigError(
                    f"{path} {list(size)} as the partition rules lay it out ({error})",
                    "dimensions that their mesh axes divide",
                    "Change the batch size or the prompt length, or the partition rules.",
                ) from None
            return jax.ShapeDtypeStruct(size, dtype, sharding=sharding)

        arrays: Arrays = {name: one(PATHS[name], size, jnp.int32) for name, size in sizes.items()}
        arrays["finished"] = one(PATHS["finished"], (rows,), bool)
        arrays["column"] = one(PATHS["column"], (), jnp.int32)
        arrays["sampling"] = {
            name: one(
                f"model_kwargs/sampling/{name}",
                (rows, MAX_STOP_TOKENS) if name == "stop_ids" else (rows,),
                dtype,
            )
            for name, dtype in SAMPLING.items()
        }
        if with_cache:
            view = 0
            arrays["cache"] = {}
            for group in self.engine.parts.model.info.groups:
                layout = self.recipe(shape).layouts[group.name]
                layers = []
                for _ in range(group.num_layers):
                    layers.append(
                        {
                            name: one(
                                f"{VIEWS}/{view}/{LEAF_NAMES[name]}", s.shape, s.dtype, layout
                            )
                            for name, s in layout.shapes().items()
                        }
                    )
                    view += 1
                arrays["cache"][group.name] = tuple(layers)
        return arrays


class Use:
    """A hold on what a generation began with: entered, it is under way, so that nothing may be
    swapped.
    """

    def __init__(self, programs: Programs, made: Made) -> None:
        self._programs = programs
        self._made = made

    def __enter__(self) -> Self:
        self._programs.count(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._programs.count(-1)

    def get(self, shape: InferenceShape) -> Pair:
        """The pair for `shape`; StoppedError when others are used by now."""
        if self._made is not self._programs._made:
            raise StoppedError(
                "a block of override() has begun or ended meanwhile: generate it again"
            )
        return self._programs.get(shape, ahead=False, made=self._made)
