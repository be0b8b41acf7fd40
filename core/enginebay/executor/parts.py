"""EngineParts: what the composition root hands to an engine. Executor: what runs its commands."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from enginebay.background import Background
from enginebay.cache import CacheGroup, CacheLayout, KVLayout
from enginebay.cache_shape import CacheShape
from enginebay.cache_state import StateGroup
from enginebay.config import EngineConfig
from enginebay.engine import AttentionProblem, Compilations
from enginebay.executor.buckets import BucketSizes, default_sizes
from enginebay.executor.commands import Command
from enginebay.executor.keys import StepKey, StepNeeds
from enginebay.executor.sharding import Placement
from enginebay.model import Model, Weights
from enginebay.ops.bound import Ops
from enginebay.ops.shadow import ShadowReport
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.platform import Platform
from enginebay.processor import Processors, Sizes
from enginebay.proposer import MAX_VERIFIED_ROWS
from enginebay.rows import RowTable
from enginebay.sampler import Sampler
from enginebay.weights import QuantizedArray, WeightFormat, stored_bytes

Layouts = Mapping[str, CacheLayout]
"""The cache layout of each group."""

OpsFactory = Callable[[Bucket, Layouts], Ops]
"""The chosen ops for a step's bucket and layouts; called while the step is traced."""


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What the sizes of an engine's steps depend on: known before its kernels are chosen, as they
    are chosen by these sizes.

    Three fields are what the decode kernel declares (`enginebay.ops.caps.Caps`), the one after them
    is the platform's. `states` are the model's, of which attention knows nothing.
    """

    config: EngineConfig
    groups: tuple[CacheGroup, ...]
    attention: Mapping[str, AttnSpec]
    """Per group name, of the whole model."""
    layout: str
    layout_type: type[KVLayout]
    min_rows: int
    compact_decode: bool = False
    ragged_decode: bool = False
    drafts_are_rows: bool = False
    one_prefill_width: bool = False
    states: tuple[StateGroup, ...] = dataclasses.field(default=(), kw_only=True)

    @property
    def sizes(self) -> BucketSizes:
        """The usual sizes of steps."""
        config = self.config
        assert config.max_model_len is not None, "the composition root resolves max_model_len"
        return default_sizes(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            min_rows=self.min_rows,
            ragged_decode=self.ragged_decode,
            one_prefill_width=self.one_prefill_width,
        )


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


AttentionProblemsOf = Callable[[StepFacts, Any], Sequence[AttentionProblem]]
"""What an engine's capability `attention_problems` names: from the facts and the engine's options
to its steps' problems.
"""


def engine_title(config: EngineConfig, kernels: Mapping[str, str]) -> str:
    """An engine with its attention kernels, such as "engine vinference, attention native and
    xla".
    """
    names = dict.fromkeys(name for op, name in kernels.items() if op.startswith("attention."))
    return f"engine {config.engine.name}, attention {' and '.join(names) or 'of its own'}"


@dataclasses.dataclass(frozen=True)
class ShadowParts:
    """A candidate for an op: its name, the share of steps, the ops that have it, and the phases it
    is for.

    `compact_decode`: attention that wants decode steps on one page a row. `chosen` are the names of
    the chosen implementations by phase.
    """

    op: str
    name: str
    share: float
    ops: OpsFactory
    compact_decode: bool
    chosen: Mapping[str, str]
    """Only the phases in which the candidate is compared."""


Result = TypeVar("Result")

Report = Callable[[int, int, str], None]
"""Called after each program that is compiled: how many there are now, of how many, and its name."""


class Executor(ABC):
    """Runs an engine's commands. `run` never waits for the device, but for commands that return
    what the device holds (Take, PageOut) and for arrays that are made.
    """

    compilations: Compilations

    @abstractmethod
    def run(self, command: Command[Result]) -> Result:
        """Run a command after all before it."""

    @abstractmethod
    def swap(self, parts: EngineParts) -> Callable[[], None]:
        """Run steps with the ops and the sampler of other parts, which have no names for SetParts:
        they stay in this process. The function that comes back returns to the former ones.
        """

    @abstractmethod
    def choose(self, key: StepKey, need: StepNeeds) -> StepKey:
        """The program that a Step for `key` should name: one that is compiled, if any serves."""

    @abstractmethod
    def compile_all(self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool) -> int:
        """Compile all programs for these steps that are missing, and those of the other commands;
        how many there are. `copies`: there will be CopyPages.
        """

    @abstractmethod
    def compile_first(
        self, keys: Sequence[StepKey], progress: Report | None, *, copies: bool
    ) -> Background:
        """Compile the fewest programs that serve all these steps; what comes back compiles the
        others once it is started.
        """

    @abstractmethod
    def close(self) -> None:
        """Free weights, cache and programs, for good."""

    @property
    def shadow_report(self) -> ShadowReport | None:
        """What shadow mode has found so far; None without it."""
        return None


@dataclasses.dataclass(frozen=True)
class EngineParts:
    """What the composition root hands to an engine."""

    config: EngineConfig
    model: Model
    load_weights: Callable[[], Weights]
    """Loads them; an engine calls it once, after its memory plan has passed."""
    ops: OpsFactory
    sampler: Sampler
    platform: Platform
    placement: Placement
    make_executor: Callable[[EngineParts], Executor]
    """What runs the engine's commands, of these parts."""
    layout: str
    layout_type: type[KVLayout]
    dtype: str
    weight_format: WeightFormat
    changed: Callable[[Mapping[str, object]], EngineParts]
    """These parts with others by setting, as `Engine.swap` takes them."""
    compact_decode: bool = False
    ragged_decode: bool = False
    drafts_are_rows: bool = False
    """Whether steps that verify drafts do it by the attention of decode steps, each draft as a row
    of its own.
    """
    kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of the chosen kernels by op, attention's by phase ("attention.decode"), and of the
    layout.
    """
    custom_calls: tuple[str, ...] = ()
    """The functions outside XLA that they call."""
    shadow: ShadowParts | None = None
    """What is compared with the chosen kernels on live steps."""
    returns_logits: bool = False
    """Whether steps give all their logits (`Pending.read_logits`), which the memory plan does not
    count.
    """
    has_greedy: bool = False
    """Whether steps of rows that all want the first best token may do without the sampler."""
    processors: Processors = ()
    """Logits processors that requests may use, in the order in which they are applied."""

    @property
    def title(self) -> str:
        """Engine and attention kernels, for whoever waits for them."""
        return engine_title(self.config, self.kernels)

    def kv_layouts(self, shapes: Mapping[str, CacheShape]) -> dict[str, KVLayout]:
        """The layouts of the groups with attention in a cache of these sizes."""
        return make_layouts(self.model.info.attention, self.layout_type, shapes)

    def layouts(self, shapes: Mapping[str, CacheShape]) -> Mapping[str, CacheLayout]:
        """The layouts of a cache of these sizes, by group; none of a state without a size."""
        states = {
            one.name: one.make_layout(shapes[one.name])
            for one in self.model.info.states
            if one.name in shapes
        }
        return {**self.kv_layouts(shapes), **states}

    def make_rows(self, page_size: int) -> RowTable:
        """An empty row table with pages of so many tokens in every cache group, and one page a row
        in groups with a state.
        """
        config, info = self.config, self.model.info
        assert config.max_model_len is not None, "the composition root resolves max_model_len"
        return RowTable(
            max_num_reqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=info.vocab_size,
            page_sizes=[page_size] * len(info.groups) + [config.max_model_len] * len(info.states),
        )

    def facts(self) -> StepFacts:
        """What the sizes of the engine's steps depend on."""
        return StepFacts(
            self.config,
            self.model.info.groups,
            self.model.info.attention,
            self.layout,
            self.layout_type,
            self.platform.min_rows(self.dtype),
            self.compact_decode,
            self.ragged_decode,
            self.drafts_are_rows,
            self.platform.one_prefill_width,
            states=self.model.info.states,
        )


def weight_bytes(model: Model, placement: Placement, form: WeightFormat) -> int:
    """Bytes of a model's weights on each device."""
    total = 0
    for weight in model.weight_specs().values():
        for array in jax.tree.leaves(form.stored(weight)):
            shards = math.prod(placement.num_shards(axis) for axis in array.spec.axes)
            total += stored_bytes(array.spec.shape, array.dtype) // shards
    return total


def step_workspace_bytes(parts: EngineParts) -> int:
    """Bytes that the largest step may need beside weights and cache.

    16 f32 activations a token, logits four times (penalties count tokens), the history of the rows'
    tokens twice, and the fields of logits processors twice. A step that verifies drafts has logits
    for each of one pass. Of quantised weights the largest one once more, in the computation's
    dtype.
    """
    info, config = parts.model.info, parts.config
    assert config.max_model_len is not None, "the composition root resolves max_model_len"
    row = 4 * info.vocab_size + 2 * config.max_model_len
    verified = (
        min(config.max_num_seqs, MAX_VERIFIED_ROWS) * (config.max_drafts + 1)
        if config.max_drafts
        else 0
    )
    rows = max(config.max_num_seqs * row, verified * 4 * info.vocab_size)
    own = _own_bytes(parts.processors, Sizes(info.vocab_size, config.max_model_len))
    widened = (
        math.prod(spec.shape)
        for spec in parts.model.weight_specs().values()
        if isinstance(parts.weight_format.stored(spec), QuantizedArray)
    )
    return (
        max(widened, default=0) * jnp.dtype(parts.dtype).itemsize
        + 4 * (16 * config.max_num_batched_tokens * info.hidden_size + rows)
        + 2 * config.max_num_seqs * own
    )


def _own_bytes(processors: Processors, sizes: Sizes) -> int:
    """Bytes of the fields that logits processors keep for each row."""
    fields = [field for _, processor in processors for field in processor.fields(sizes).values()]
    return sum(math.prod(field.shape) * jnp.dtype(field.dtype).itemsize for field in fields)
