"""EngineParts: what an engine and its steps are made of. Executor: the contract of what runs its
commands.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from enginebay.config import EngineConfig
from enginebay.contracts.adapters import Adapters
from enginebay.contracts.cache import CacheLayout, KVLayout
from enginebay.contracts.cache_shape import CacheShape
from enginebay.contracts.commands import ExecutorCommand, Take
from enginebay.contracts.compilations import Compilations
from enginebay.contracts.engine import AttentionProblem, LaterCompilation
from enginebay.contracts.model import Model, ModelInfo, Weights
from enginebay.contracts.placement import Placement
from enginebay.contracts.platform import Platform
from enginebay.contracts.processor import Processors
from enginebay.contracts.sampler import Sampler
from enginebay.contracts.step_key import StepKey, StepNeeds
from enginebay.errors import InternalError, UnsupportedError
from enginebay.ops.bound import Ops
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.weights import WeightFormat, stored_bytes

Layouts = Mapping[str, CacheLayout]
"""The cache layout of each group."""

OpsFactory = Callable[[Bucket, Layouts], Ops]
"""Returns the chosen ops for a step's bucket and layouts; called while the step is traced."""


def make_layouts(
    attention: Mapping[str, AttnSpec],
    layout_type: type[KVLayout],
    shapes: Mapping[str, CacheShape],
) -> dict[str, KVLayout]:
    """The layouts of a cache of these sizes, by group."""
    return {
        group: spec.make_layout(layout_type, shapes[group].num_pages, shapes[group].page_size)
        for group, spec in attention.items()
    }


def engine_title(config: EngineConfig, kernels: Mapping[str, str]) -> str:
    """An engine with its attention kernels, such as "engine vinference, attention native and
    xla".
    """
    names = dict.fromkeys(name for op, name in kernels.items() if op.startswith("attention."))
    return f"engine {config.engine.name}, attention {' and '.join(names) or 'of its own'}"


@dataclasses.dataclass(frozen=True)
class ShadowParts:
    """A shadow candidate for an op: its name, the share of steps on which it runs, and ops that use
    it.

    `compact_decode`: attention that wants decode steps with one page per row. `chosen`: names of
    the chosen implementations by phase.
    """

    op: str
    name: str
    share: float
    ops: OpsFactory
    compact_decode: bool
    chosen: Mapping[str, str]
    """Only of the phases in which the candidate is compared."""


Result = TypeVar("Result")

Report = Callable[[int, int, str], None]
"""Called after each compiled program with (number of programs so far, total number, name of the
program).
"""


class Executor(ABC):
    """Runs an engine's commands. `run` does not wait for the device, except for commands that
    return data of the device (Take) and for allocation.
    """

    compilations: Compilations

    @abstractmethod
    def run(self, command: ExecutorCommand[Result]) -> Result:
        """Run a command after all earlier commands."""

    @abstractmethod
    def swap(self, parts: EngineParts) -> Callable[[], None]:
        """Run steps with the ops and the sampler of other parts, which have no names and so cannot
        be sent as SetParts. Returns a function that restores the former ones.
        """

    @abstractmethod
    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        """The program that a Step for `key` should use: a compiled one, if any serves it."""

    @abstractmethod
    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        """Compile all missing programs for these steps and for the other commands. Returns their
        total number. `copies`: CopyPages will be used.
        """

    @abstractmethod
    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> LaterCompilation | None:
        """Compile a few programs that serve all these steps, the larger ones in several parts (see
        `serves`). Returns the compilation of the others, which the caller starts; None when no
        program is left.
        """

    def serves(self, key: StepKey) -> bool:
        """Whether a step of this key may run as a whole: a compiled program serves it, or it is
        compiled now because nothing is left that `compile_first` compiles later. Where it is False,
        the engine runs the step as several smaller ones.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """Free weights, cache and programs for good."""

    def wait(self) -> None:
        """Wait until the device has run all commands. The default reads a row, which waits; an
        executor without arrays need not support it.
        """
        self.run(Take(0, {}, np.zeros(0, np.int32)))

    def weights(self) -> Weights:
        """The weights on the device by path. They are not changed: SetWeights replaces them.

        UnsupportedError, with the name of the executor's class, where they are not in this process.
        """
        raise self._elsewhere("weights and programs")

    def arrays(self) -> Any:
        """The other arrays on the device (cache and rows), as a pytree of the executor's own, for
        measurements and checks, which must not change them. The next command may donate them.

        UnsupportedError as for `weights`.
        """
        raise self._elsewhere("arrays")

    def _elsewhere(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"the {what} of a {type(self).__name__}",
            "an engine whose executor runs commands in this process",
            "Leave `executor` out of the configuration.",
        )

    @property
    def shadow_report(self) -> Any:
        """The comparisons that shadow mode has made so far, in a record of the executor's own; None
        without shadow mode.
        """
        return None


def _not_chosen(*args: Any, **kwargs: Any) -> Any:
    """Stands in EngineParts for what is chosen after the sizes of the engine's steps."""
    raise InternalError("these parts describe the sizes of steps: kernels are not chosen yet")


@dataclasses.dataclass(frozen=True)
class EngineParts:
    """What an engine and its compiled steps are made of.

    The sizes of an engine's steps depend on the fields without a default, which are known before
    kernels are chosen, because the choice depends on the sizes. `compact_decode`, `ragged_decode`
    and `drafts_are_rows` are declared by the decode kernel (`enginebay.ops.caps.Caps`);
    `free_padding_rows` by the kernels of products (`enginebay.ops.caps.SkipsPadding`).
    """

    config: EngineConfig
    model: Model
    platform: Platform
    placement: Placement
    weight_format: WeightFormat
    layout: str
    layout_type: type[KVLayout]
    compact_decode: bool = False
    ragged_decode: bool = False
    drafts_are_rows: bool = False
    """Whether verify steps use the attention of decode steps, with each draft as a row of its
    own.
    """
    free_padding_rows: int = 0
    """The largest number of rows of a step whose padding takes next to no time."""
    ops: OpsFactory = _not_chosen
    sampler: Sampler = _not_chosen
    has_greedy: bool = False
    """Whether steps whose rows all take the first best token may skip the sampler."""
    processors: Processors = ()
    """Logits processors that requests may use, in the order of their application."""
    returns_logits: bool = False
    """Whether steps return all their logits (`Pending.read_logits`). The memory plan does not count
    them.
    """
    adapters: Adapters | None = None
    """The adapters that requests may use; None: the model has no slots for adapters."""
    shadow: ShadowParts | None = None
    """The shadow candidate that is compared with the chosen kernels on live steps."""
    kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of the chosen kernels by op, of attention by phase ("attention.decode"), and of the
    layout.
    """
    custom_calls: tuple[str, ...] = ()
    """Functions outside XLA that the kernels call."""
    register_call: Callable[[str], None] = _not_chosen
    """Registers one of `custom_calls` with XLA, before a program that calls it is loaded."""
    program_digest: str = ""
    """Names all that steps are traced from besides the sizes of arrays, so that another process can
    use their programs; "" for parts that were passed to override(), which may be functions without
    a name.
    """
    load_weights: Callable[[], Weights] = _not_chosen
    """Loads the weights. An engine calls it once, after its memory plan was accepted."""
    measured_centers: Callable[[Weights], Mapping[str, jax.Array]] = _not_chosen
    """Returns the centres of keys that other weights of the model need, by path
    (`enginebay.ops.key_centers`).
    """
    make_executor: MakeExecutor | None = None
    """Makes the executor of the engine, from these parts; None: the engine uses its own."""
    changed: Callable[[Mapping[str, object]], EngineParts] = _not_chosen
    """These parts with others by setting, as in `Engine.swap`."""

    @property
    def info(self) -> ModelInfo:
        """The model's facts."""
        return self.model.info

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return self.config.dtype

    @property
    def min_rows(self) -> int:
        """The smallest number of rows of a decode step (`Platform.min_rows`)."""
        return self.platform.min_rows(self.dtype)

    @property
    def title(self) -> str:
        """Engine and attention kernels, for progress messages."""
        return engine_title(self.config, self.kernels)

    def kv_layouts(self, shapes: Mapping[str, CacheShape]) -> dict[str, KVLayout]:
        """The layouts of the groups with attention, in a cache of these sizes."""
        return make_layouts(self.model.info.attention, self.layout_type, shapes)

    def layouts(self, shapes: Mapping[str, CacheShape]) -> Mapping[str, CacheLayout]:
        """The layouts of a cache of these sizes, by group. State groups without a size are left
        out.
        """
        states = {
            one.name: one.make_layout(shapes[one.name])
            for one in self.model.info.states
            if one.name in shapes
        }
        return {**self.kv_layouts(shapes), **states}


AttentionProblemsOf = Callable[[EngineParts, Any], Sequence[AttentionProblem]]
"""The function that an engine's capability `attention_problems` names: returns the attention
problems of the engine's steps, from parts whose kernels are not chosen yet and the engine's
options.
"""


MakeExecutor: TypeAlias = Callable[[EngineParts], Executor]
"""What the setting `executor` names by its import path, such as the class of an executor."""


def weight_bytes(model: Model, placement: Placement, form: WeightFormat) -> int:
    """Bytes of a model's weights on each device."""
    total = 0
    for path, weight in model.weight_specs().items():
        for array in jax.tree.leaves(form.stored(path, weight)):
            shards = math.prod(placement.num_shards(axis) for axis in array.spec.axes)
            total += stored_bytes(array.spec.shape, array.dtype) // shards
    return total
