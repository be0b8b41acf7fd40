"""Programs: the compiled functions of an inference, one pair per shape. Each pair is compiled once,
even if several threads request it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import KVLayout
from enginebay.contracts.executor import EngineParts
from enginebay.errors import CompilationError, ConfigError, RequestError, StoppedError
from enginebay.types import MAX_STOP_TOKENS, ROW_VALUES
from enginebay.waits import waiting
from enginebay_contiguous.slot_sizes import slot_shape
from enginebay_runtime.engine import StepEngine
from enginebay_runtime.step import Program
from enginebay_vinference.functions import (
    Arrays,
    Function,
    InferenceShape,
    Recipe,
    decode_tokens,
    prefill,
)
from enginebay_vinference.partition import LEAF_NAMES, VIEWS, StatePlacement, leaf_path

log = logging.getLogger("enginebay.vinference")

ProgramKind = Literal["prefill", "decode"]
STEPS: dict[ProgramKind, Callable[..., Any]] = {"prefill": prefill, "decode": decode_tokens}
KINDS: tuple[ProgramKind, ProgramKind] = ("prefill", "decode")

SAMPLING: dict[str, Any] = {
    "max_length": np.int32,
    "prompt_length": np.int32,
    "stop_ids": np.int32,
} | {name: np.dtype(one.dtype) for name, one in ROW_VALUES.items()}
"""Dtypes of the rows' sampling parameters, by the names that the engine's rows use."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The compiled functions of one shape."""

    prefill: Function
    decode: Function


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramSet:
    """A program and the functions compiled from it. `always_compiles`: compile even if the engine
    forbids it.
    """

    program: Program
    pairs: dict[InferenceShape, Pair] = dataclasses.field(default_factory=dict)
    locks: dict[InferenceShape, threading.Lock] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(threading.Lock)
    )
    """Locks by shape, each held while its pair is compiled."""
    always_compiles: bool = False


class Programs:
    """Compiles and keeps Pairs. Thread-safe; a failed compilation can be retried.

    The program is the engine's at construction time. Overrides in an LLM with the same engine do
    not affect it.
    """

    def __init__(self, engine: StepEngine, placement: StatePlacement) -> None:
        self.engine = engine
        self.placement = placement
        # Reentrant: garbage collection may end a generator, and so its Use, while the lock is
        # held.
        self._lock = threading.RLock()
        self._current = ProgramSet(Program.of(engine.parts))
        self._num_uses = 0
        self._described: dict[tuple[InferenceShape, ProgramKind], Arrays] = {}

    @property
    def shapes(self) -> list[InferenceShape]:
        """The shapes that are compiled now."""
        return list(self._current.pairs)

    def use(self) -> Use:
        """Return a Use of the current functions."""
        return Use(self, self._current)

    def count(self, change: int) -> None:
        """Add `change` to the number of running generations."""
        with self._lock:
            self._num_uses += change

    def check_lasting(self) -> None:
        """Raise RequestError within a block of override(), whose functions are temporary."""
        if self._current.always_compiles:
            raise RequestError(
                "saving within a block of override()",
                "saving outside of it",
                "Save the inference after the block.",
            )

    @contextlib.contextmanager
    def override(self, parts: EngineParts) -> Iterator[None]:
        """Use functions made from other parts while the block lasts; the former functions return
        afterwards.

        RequestError while generations run. A generation still running at the end of the block stops
        with StoppedError.
        """
        with self._lock:
            if self._num_uses:
                raise RequestError(
                    "override() while generations run",
                    "override() without running generations",
                    "Wait for the generations, or close their generators.",
                )
            before = self._current
            self._current = ProgramSet(Program.of(parts), always_compiles=True)
        try:
            yield
        finally:
            with self._lock:
                self._current = before

    def get(
        self,
        shape: InferenceShape,
        *,
        ahead: bool,
        make: Callable[[], Pair] | None = None,
        current: ProgramSet | None = None,
    ) -> Pair:
        """Return the pair for `shape`, compiling it if needed. `make` replaces the compilation.

        Threads that request the same shape wait for one compilation. If it fails, or is
        interrupted, the next thread compiles. `ahead`: no request waits for this pair; otherwise
        CompilationError when the engine forbids compiling. `current`: where the pair is kept; None
        is the present program set.
        """
        current = current or self._current
        with self._lock:
            lock = current.locks[shape]
        with lock:
            pair = current.pairs.get(shape)
            if pair is None:
                may = ahead or current.always_compiles
                if not may and self.engine.compilations.forbidden:
                    raise CompilationError(
                        f"no program for {shape}",
                        "precompiled shapes",
                        "Call precompile() for this shape first.",
                    )
                pair = make() if make else self._compile(shape, current.program)
                current.pairs[shape] = pair
            return pair

    def _compile(self, shape: InferenceShape, program: Program) -> Pair:
        start = time.perf_counter()
        with waiting(f"compiling {shape}, for {self.engine.parts.title}"):
            recipe = self.recipe(shape, program)
            with self.engine.compilations.timed():
                lowered = [
                    self.jitted(shape, kind, recipe=recipe).lower(*self.describe(shape, kind))
                    for kind in KINDS
                ]
            pair = self.compile_lowered(lowered)
        log.info("compiled %s in %.2f s", shape, time.perf_counter() - start)
        return pair

    def compile_lowered(self, lowered: list[Any]) -> Pair:
        """Compile both functions in parallel."""
        options = dict(self.engine.parts.platform.compile_options())

        def compiled(one: Any) -> Any:
            with self.engine.compilations.timed():
                return one.compile(compiler_options=options)

        with ThreadPoolExecutor(len(KINDS)) as pool:
            made = list(pool.map(compiled, lowered))
        self.engine.compilations.count += len(KINDS)
        return Pair(*made)

    def jitted(
        self,
        shape: InferenceShape,
        kind: ProgramKind,
        function: Callable[..., Any] | None = None,
        recipe: Recipe | None = None,
    ) -> Any:
        """Return the jitted function of one kind, or `function` jitted in its place. The state's
        arrays are donated.

        `recipe` None is that of the current program.
        """
        step = (
            functools.partial(STEPS[kind], recipe or self.recipe(shape))
            if function is None
            else function
        )
        if function is None:
            # A partial has no name; profiles and compile logs show this one.
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
        """Return the Recipe of a shape; `program` None is the current program."""
        engine = self.engine
        slots = slot_shape(shape.num_rows, shape.width, engine.sizes.page_size)
        layouts = engine.parts.kv_layouts(dict.fromkeys(engine.sizes.whole, slots))
        return Recipe(program or self._current.program, shape, slots, layouts)

    def describe(
        self, shape: InferenceShape, kind: ProgramKind
    ) -> tuple[Any, Arrays, jax.ShapeDtypeStruct]:
        """Return shapes, dtypes and shardings of a function's arguments."""
        weights = jax.tree.map(
            lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding),
            self.engine.executor.weights(),
        )
        keys = jax.ShapeDtypeStruct(
            (shape.num_rows, 2), jnp.uint32, sharding=self.engine.parts.placement.replicated
        )
        return weights, self.arrays(shape, kind), keys

    def arrays(self, shape: InferenceShape, kind: ProgramKind) -> Arrays:
        """Return shapes, dtypes and shardings of the state's arrays before a function; cached."""
        found = self._described.get((shape, kind))
        if found is None:
            found = self._described[shape, kind] = self._arrays(shape, with_cache=kind == "decode")
        return found

    def _arrays(self, shape: InferenceShape, *, with_cache: bool) -> Arrays:
        rows, width = shape.num_rows, shape.width
        layouts: list[KVLayout] = []

        def ints(*size: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(size, jnp.int32)

        def placed(keys: Sequence[Any], array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            path = leaf_path(keys)
            layout = layouts[keys[3].idx] if path.startswith(VIEWS) else None
            sharding = self.placement.sharding(path, layout)
            try:
                sharding.shard_shape(array.shape)
            except ValueError as error:
                raise ConfigError(
                    f"{path} {list(array.shape)} under the partition rules ({error})",
                    "dimensions that are divisible by their mesh axes",
                    "Change the batch size, the prompt length or the partition rules.",
                ) from None
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        sizes = {"stop_ids": (rows, MAX_STOP_TOKENS)}
        kwargs: dict[str, Any] = {
            "attention_mask": ints(rows, width),
            "position_ids": ints(rows, 1),
            "sampling": {
                name: jax.ShapeDtypeStruct(sizes.get(name, (rows,)), dtype)
                for name, dtype in SAMPLING.items()
            },
        }
        if with_cache:
            recipe = self.recipe(shape)
            for group in recipe.program.model.info.groups:
                layouts += [recipe.layouts[group.name]] * group.num_layers
            views = [
                {LEAF_NAMES[name]: array for name, array in layout.shapes().items()}
                for layout in layouts
            ]
            kwargs["past_key_values"] = {"views": views}
        arrays = {
            "current_length": ints(),
            "sequences": ints(rows, width),
            "running_token": ints(rows, 1),
            "is_sequence_finished": jax.ShapeDtypeStruct((rows,), bool),
            "model_kwargs": kwargs,
        }
        return jax.tree_util.tree_map_with_path(placed, arrays)


class Use:
    """The functions that a generation started with. While it is entered, override() is refused."""

    def __init__(self, programs: Programs, current: ProgramSet) -> None:
        self._programs = programs
        self._current = current

    def __enter__(self) -> Self:
        self._programs.count(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._programs.count(-1)

    def get(self, shape: InferenceShape) -> Pair:
        """Return the pair for `shape`. StoppedError when override() has replaced the functions
        since.
        """
        if self._current is not self._programs._current:
            raise StoppedError(
                "a block of override() began or ended during the generation: generate again"
            )
        return self._programs.get(shape, ahead=False, current=self._current)
