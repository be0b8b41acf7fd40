"""The model contract: a family turns a checkpoint's configuration into weights' shapes and a pure
forward pass.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginebay.cache import CacheArrays, CacheGroup
from enginebay.cache_state import StateGroup
from enginebay.errors import unknown_name
from enginebay.ops.bound import Ops
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay.weights import Quantization, Weight, WeightSpec

Weights = Mapping[str, Weight]
"""A model's weights by dotted path, such as "layers.0.attention.qkv". One flat dict: nothing is
walked per step.
"""

ModelCache = Mapping[str, Sequence[CacheArrays]]
"""Cache arrays per group name and layer of the group."""

Embeddings = tuple[jax.Array, jax.Array]
"""Which tokens of a step are embeddings, bool [T], and these, f32 [T, hidden_size]."""


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What engines, loop and reports need to know of a model."""

    family: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    groups: tuple[CacheGroup, ...]
    attention: Mapping[str, AttnSpec]
    """Per group name; heads as the whole model has them. `kv_dtype` is the cache's in the plan of
    an engine, and else that of the computation.
    """
    kv_head_repeat: int = 1
    """How often each of the checkpoint's KV heads stands in groups and weights, so that every shard
    has whole ones.
    """
    auto_max_model_len: int | None = None
    """The max_model_len taken where the configuration gives none; None: max_model_len.

    Shorter where rotary frequencies depend on the length: up to here they are those of short texts.
    """
    constants: str = ""
    """Numbers and functions that compiled steps hold besides shapes: rotary positions, the
    activation, the norms' epsilon.

    Programs that were stored for other ones are not run.
    """
    states: tuple[StateGroup, ...] = ()
    """Groups of layers that keep a recurrent state. Proposers are refused to a model that has one:
    drafts that do not hold would be in the state.
    """

    @property
    def cache_groups(self) -> tuple[CacheGroup | StateGroup, ...]:
        """All groups, those with attention first."""
        return (*self.groups, *self.states)

    @property
    def hidden_dtype(self) -> jnp.dtype[Any]:
        """The dtype of hidden values: that of the queries."""
        return jnp.dtype(next((spec.q_dtype for spec in self.attention.values()), "float32"))


def with_cache_dtypes(info: ModelInfo, chosen: Mapping[str, str]) -> ModelInfo:
    """The same model with keys and values of the chosen dtypes in the caches of these groups.
    UnknownNameError for a group that the model does not have.
    """
    for group in chosen:
        if group not in info.attention:
            raise unknown_name("cache group in kv_cache_dtype", group, info.attention)
    attention = {
        group: dataclasses.replace(spec, kv_dtype=chosen.get(group, spec.kv_dtype))
        for group, spec in info.attention.items()
    }
    return dataclasses.replace(info, attention=attention)


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """Where a weight comes from: checkpoint tensors by name with their shapes, and how they are put
    together.

    `build` takes readers in the order of `names` and the index of the part wanted (one slice per
    dimension of the weight, as a shard needs it) and returns that part; a reader is indexed like an
    array and reads only what is asked.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    build: Any


class Model(ABC):
    """A model of one configuration: shapes, checkpoint mapping and the forward pass. Holds no
    arrays.

    Invariants: `hidden` and `logits` are pure and can be traced; they compute through `ops` alone
    and look at nothing but their arguments; rows of a batch never influence one another; the head
    is a separate call, so that a step may sample, pool or score.
    """

    info: ModelInfo

    @abstractmethod
    def weight_specs(self) -> dict[str, WeightSpec]:
        """Every weight by dotted path."""

    @abstractmethod
    def tensor_sources(self) -> dict[str, TensorSource]:
        """The checkpoint tensors behind each weight, same keys as weight_specs()."""

    @abstractmethod
    def hidden(
        self,
        weights: Weights,
        ops: Ops,
        token_ids: jax.Array,
        cache: ModelCache,
        batches: Mapping[str, AttnBatch],
        embeds: Embeddings | None = None,
    ) -> tuple[jax.Array, dict[str, tuple[CacheArrays, ...]]]:
        """token_ids int32 [T] -> (final-normed hidden states [T, hidden_size], the cache with these
        tokens in it).

        `batches` has the step's rows per cache group: the same rows, each group with its own page
        table. `embeds`, of a prefill only, stand in place of the embeddings of some tokens.
        """

    @abstractmethod
    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        """hidden [S, hidden_size] -> f32 [S, vocab_size]."""


class ModelFamily(ABC):
    """What a plugin registers as kind "model": the Hugging Face architectures it serves and how to
    make a Model.
    """

    name: str
    architectures: tuple[str, ...]

    @abstractmethod
    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        """The model of a checkpoint's config.json, computing in `dtype`, for KV heads split over
        `num_shards`.

        With fewer KV heads than shards each head is repeated, so that every shard holds a whole
        one. Rotary frequencies that depend on the length are chosen for rows of `max_model_len`
        tokens, None: ModelInfo.auto_max_model_len. A length above ModelInfo.max_model_len is
        refused later, not here. Raises CheckpointError for a configuration that the family cannot
        serve, naming the field.
        """


def count_weights(model: Model) -> int:
    """Number of values in all weights."""
    return sum(int(np.prod(spec.shape)) for spec in model.weight_specs().values())


@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """Special tokens as checkpoint and generation configuration name them."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


class Checkpoint(Protocol):
    """A stored model, as a plugin of kind "checkpoint" opens it from a name or path
    (CheckpointError if it can't).
    """

    folder: Path
    config: Mapping[str, Any]
    architecture: str
    token_info: TokenInfo
    sampling_defaults: Mapping[str, Any]
    """Values by field of SamplingParams that the checkpoint recommends; {} when it recommends none.
    """

    def load_tokenizer(self) -> Any:
        """The tokenizer, by the interface of `enginebay.text.Tokenizer`."""

    def load_weights(
        self,
        model: Model,
        *,
        dtype: str,
        place: Callable[[str, WeightSpec], Sharding | None],
        quantization: Quantization | None = None,
        verify: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Weight]:
        """Every weight of `model`, each shard read from the file straight to its device.

        `place` gives the sharding of a weight, or of an array of a quantised one (None: the default
        device). `quantization` is applied to the weights that have `num_inputs`. CheckpointError on
        NaN or infinity, naming the tensor, in such weights and with `verify` in all. `progress` is
        called with bytes done and bytes in all.
        """
