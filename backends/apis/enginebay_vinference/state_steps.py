"""The compiled functions of the vInference API on a state's arrays: prefill of the prompts, and one
chunk of decode steps. Each pair of functions is compiled once per shape.

A SampleState owns its arrays, cache included, and the documents let users pass weights, replace a
function and save it; so the functions take all arrays as arguments, and no executor owns them.
They convert a state's arrays for the contiguous engine's `BatchSteps`, and back.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.cache import KVLayout
from enginebay.contracts.executor import EngineParts
from enginebay.contracts.model import Weights
from enginebay.errors import CompilationError, ConfigError, RequestError, StoppedError
from enginebay.memory_maps import require_maps
from enginebay.types import MAX_STOP_TOKENS, ROW_VALUES
from enginebay.waits import waiting
from enginebay_contiguous.batch_steps import BatchResult, BatchSteps, batch_rows
from enginebay_contiguous.engine import ContiguousEngine
from enginebay_vinference.partition import LEAF_NAMES, VIEWS, StatePlacement, leaf_path

log = logging.getLogger("enginebay.vinference")

Arrays = dict[str, Any]
"""The ARRAY_FIELDS of a SampleState by name, which the functions take (donated) and return. The
cache, model_kwargs/past_key_values, exists after the prefill.
"""

Function = Callable[[Weights, Arrays, jax.Array], tuple[Arrays, jax.Array]]
"""(weights, arrays, the rows' raw keys uint32 [B, 2]) -> (arrays, int32 [2]: number of sampled
tokens, number of unfinished rows).
"""


@dataclasses.dataclass(frozen=True)
class InferenceShape:
    """Sizes of one pair of compiled functions.

    num_rows: B. prefill_length: columns of the padded prompt. width: all columns. chunk: tokens per
    decode call. max_batched_tokens: max tokens of one pass over the prompts; more tokens take
    several passes. pad_token_id: written to the columns of finished rows.
    """

    num_rows: int
    prefill_length: int
    width: int
    chunk: int
    max_batched_tokens: int
    pad_token_id: int


def prefill(
    steps: BatchSteps, shape: InferenceShape, weights: Weights, arrays: Arrays, keys: jax.Array
) -> tuple[Arrays, jax.Array]:
    """Process the prompts in sequences[:, :prefill_length] with a new cache, and sample each row's
    first token.

    Padding may be anywhere: only tokens under the mask count, in order. A row without tokens is
    finished.
    """
    prompts = arrays["sequences"][:, : shape.prefill_length]
    is_token = arrays["model_kwargs"]["attention_mask"][:, : shape.prefill_length] > 0
    lens = is_token.sum(axis=1, dtype=jnp.int32)
    rows = _rows(arrays, keys, length=lens, finished=lens == 0)
    return _arrays_after(shape, arrays, steps.prefill(weights, prompts, is_token, rows))


def decode_tokens(
    steps: BatchSteps, shape: InferenceShape, weights: Weights, arrays: Arrays, keys: jax.Array
) -> tuple[Arrays, jax.Array]:
    """Sample up to `chunk` tokens for each unfinished row."""
    kwargs = arrays["model_kwargs"]
    length = kwargs["position_ids"][:, 0] + 1
    rows = _rows(arrays, keys, length=length, finished=arrays["is_sequence_finished"])
    names = {leaf: name for name, leaf in LEAF_NAMES.items()}
    layers = [
        {names[leaf]: array for leaf, array in view.items()}
        for view in kwargs["past_key_values"]["views"]
    ]
    return _arrays_after(shape, arrays, steps.decode(weights, layers, rows, shape.chunk))


def _rows(arrays: Arrays, keys: jax.Array, *, length: jax.Array, finished: jax.Array) -> Any:
    kwargs = arrays["model_kwargs"]
    columns = {
        "last_token": arrays["running_token"][:, 0],
        "length": length,
        "finished": finished,
        "keys": keys,
        **kwargs["sampling"],
    }
    return batch_rows(columns, arrays["sequences"], kwargs["attention_mask"] > 0)


def _arrays_after(
    shape: InferenceShape, before: Arrays, result: BatchResult
) -> tuple[Arrays, jax.Array]:
    """The arrays after a step, whose tokens are appended."""
    sampled, rows, layers = result
    new, kwargs = sampled >= 0, before["model_kwargs"]
    num_run = new.any(axis=0).sum(dtype=jnp.int32)
    step = jnp.arange(sampled.shape[1], dtype=jnp.int32)
    column = jnp.where(step < num_run, before["current_length"] + step, shape.width)
    tokens = jnp.where(new, sampled, shape.pad_token_id)
    mask = kwargs["attention_mask"].at[:, column].set(new.astype(jnp.int32), mode="drop")
    after = {
        "current_length": before["current_length"] + num_run,
        "sequences": before["sequences"].at[:, column].set(tokens, mode="drop"),
        "running_token": rows.last_token[:, None],
        "is_sequence_finished": rows.finished,
        "model_kwargs": {
            "attention_mask": mask,
            "position_ids": rows.length[:, None] - 1,
            "sampling": kwargs["sampling"],
            "past_key_values": {"views": [_renamed(layer) for layer in layers]},
        },
    }
    return after, jnp.stack([new.sum(dtype=jnp.int32), (~rows.finished).sum(dtype=jnp.int32)])


def _renamed(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer's arrays by their names in a state."""
    return {LEAF_NAMES[name]: array for name, array in layer.items()}


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
    """Parts and the functions compiled from them. `always_compiles`: compile even if the engine
    forbids it.
    """

    parts: EngineParts
    pairs: dict[InferenceShape, Pair] = dataclasses.field(default_factory=dict)
    locks: dict[InferenceShape, threading.Lock] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(threading.Lock)
    )
    """Locks by shape, each held while its pair is compiled."""
    always_compiles: bool = False


class Programs:
    """Compiles and keeps Pairs. Thread-safe; a failed compilation can be retried.

    The parts are the engine's. Overrides in an LLM with the same engine do not affect them.
    """

    def __init__(self, engine: ContiguousEngine, placement: StatePlacement) -> None:
        self.engine = engine
        self.placement = placement
        # Reentrant: garbage collection may end a generator, and so its Use, while the lock is
        # held.
        self._lock = threading.RLock()
        self._current = ProgramSet(engine.parts)
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
            self._current = ProgramSet(parts, always_compiles=True)
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
                pair = make() if make else self._compile(shape, current.parts)
                current.pairs[shape] = pair
            return pair

    def _compile(self, shape: InferenceShape, parts: EngineParts) -> Pair:
        start = time.perf_counter()
        with waiting(f"compiling {shape}, for {self.engine.parts.title}"):
            steps = self.steps(shape, parts)
            with self.engine.compilations.timed():
                lowered = [
                    self.jitted(shape, kind, steps=steps).lower(*self.describe(shape, kind))
                    for kind in KINDS
                ]
            pair = self.compile_lowered(lowered)
        log.info("compiled %s in %.2f s", shape, time.perf_counter() - start)
        return pair

    def compile_lowered(self, lowered: list[Any]) -> Pair:
        """Compile both functions in parallel."""
        require_maps("a generation's step")
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
        steps: BatchSteps | None = None,
    ) -> Any:
        """Return the jitted function of one kind, or `function` jitted in its place. The state's
        arrays are donated.

        `steps` None are those of the current parts.
        """
        step = (
            functools.partial(STEPS[kind], steps or self.steps(shape), shape)
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

    def steps(self, shape: InferenceShape, parts: EngineParts | None = None) -> BatchSteps:
        """Return the steps of a shape; `parts` None are the current parts."""
        return BatchSteps.of(
            parts or self._current.parts,
            page_size=self.engine.sizes.page_size,
            num_rows=shape.num_rows,
            prefill_length=shape.prefill_length,
            width=shape.width,
            max_batched_tokens=shape.max_batched_tokens,
        )

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
            layouts += self.steps(shape).layer_layouts
            kwargs["past_key_values"] = {"views": [_renamed(one.shapes()) for one in layouts]}
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
