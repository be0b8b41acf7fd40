"""The model contract: a model family makes a Model, that is weight shapes and a pure forward pass,
from the configuration of a checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from enginebay.contracts.cache import CacheArrays, CacheGroup
from enginebay.contracts.cache_state import StateGroup
from enginebay.errors import unknown_name
from enginebay.ops.bound import Ops
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay.weights import QuantizedArray, Weight, WeightFormat, WeightSpec

Weights = Mapping[str, Weight]
"""A model's weights by dotted path, such as "layers.0.attention.qkv". The dict is flat, so that a
step does not walk a tree.
"""

ModelCache = Mapping[str, Sequence[CacheArrays]]
"""Cache arrays by name of the cache group, then by layer of the group."""

Embeddings = tuple[jax.Array, jax.Array]
"""A mask bool [T] of the tokens in a step that are given as embeddings, and the embeddings f32
[T, hidden_size].
"""


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Facts about a model for engines, the loop and reports."""

    family: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    groups: tuple[CacheGroup, ...]
    attention: Mapping[str, AttnSpec]
    """Name of the cache group -> attention spec, with the heads of the whole model (not of a
    shard). In the plan of an engine `kv_dtype` is the dtype of the cache, elsewhere the dtype of
    the computation.
    """
    kv_head_repeat: int = 1
    """How often groups and weights repeat each KV head of the checkpoint, so that every shard has
    whole heads.
    """
    auto_max_model_len: int | None = None
    """The max_model_len to use when the configuration sets none; None: `max_model_len`.

    It is smaller than `max_model_len` for models whose rotary frequencies depend on the length: up
    to this length they equal the frequencies for short texts.
    """
    constants: str = ""
    """A text that names the constants in compiled steps: rotary positions, the activation, the
    epsilon of norms. Stored programs of a model with other constants are not reused.
    """
    states: tuple[StateGroup, ...] = ()
    """Groups of layers that keep a recurrent state. A model with one cannot use a proposer, because
    a rejected draft cannot be removed from the state.
    """
    padding_from: int | None = None
    """The first id of the vocabulary's padding: the tokenizer has no token for the ids from here to
    vocab_size - 1. Steps do not sample or report these ids. None: no padding is known.
    """
    unused_tensors: tuple[str, ...] = ()
    """First parts of the names of tensors that checkpoints may have, and that no weight reads."""

    @property
    def num_token_ids(self) -> int:
        """The number of ids that prompts and results may have: vocab_size without its padding."""
        return self.vocab_size if self.padding_from is None else self.padding_from

    @property
    def cache_groups(self) -> tuple[CacheGroup | StateGroup, ...]:
        """All cache groups, first those with attention, then those with a recurrent state."""
        return (*self.groups, *self.states)

    @property
    def hidden_dtype(self) -> jnp.dtype[Any]:
        """The dtype of hidden states, which is the dtype of the queries."""
        return jnp.dtype(next((spec.q_dtype for spec in self.attention.values()), "float32"))


def with_cache_dtypes(info: ModelInfo, chosen: Mapping[str, str]) -> ModelInfo:
    """Return `info` with the given dtypes of keys and values (cache group -> a float dtype, or a
    storage such as "int8"). UnknownNameError for a group that the model does not have.
    """
    for group in chosen:
        if group not in info.attention:
            raise unknown_name("cache group in kv_cache_dtype", group, info.attention)
    attention = {
        group: spec.stored_as(chosen.get(group, spec.kv_dtype))
        for group, spec in info.attention.items()
    }
    return dataclasses.replace(info, attention=attention)


def with_padding(info: ModelInfo, num_token_ids: int | None, tokens: TokenInfo) -> ModelInfo:
    """Return `info` with the padding of its vocabulary, for a tokenizer whose ids are below
    `num_token_ids` (None: unknown). The ids that end a sequence are no padding.
    """
    if num_token_ids is None:
        return info
    first = max(num_token_ids, *(one + 1 for one in tokens.eos_token_ids), 1)
    return dataclasses.replace(info, padding_from=first if first < info.vocab_size else None)


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """How to make a weight from tensors of the checkpoint: their names and shapes, and a function.

    `build(readers, index)` returns the part of the weight that one shard needs. `readers` are in
    the order of `names`, and there are none for a weight that is made of no tensor; a reader is
    indexed like an array, and reads only the indexed part from the file. `index` has one slice for
    each dimension of the weight.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    build: Any


def made_of_no_tensor(shape: tuple[int, ...]) -> TensorSource:
    """Return the source of a weight of this shape that no checkpoint has: it is made of zeros, and
    set later.
    """

    def zeros(readers: Sequence[Any], index: tuple[slice, ...]) -> np.ndarray:
        pairs = zip(index, shape, strict=True)
        return np.zeros([len(range(*piece.indices(size))) for piece, size in pairs], np.float32)

    return TensorSource((), (), zeros)


class Model(ABC):
    """A model of one configuration: weight shapes, the mapping from checkpoint tensors, and the
    forward pass. It holds no arrays.

    Invariants: `hidden` and `logits` are pure functions of their arguments and can be traced; they
    compute through `ops`; the rows of a batch do not influence one another. The head is a separate
    method, so that a step can sample, pool or score.
    """

    info: ModelInfo

    @abstractmethod
    def weight_specs(self) -> dict[str, WeightSpec]:
        """Return the spec of every weight, by dotted path."""

    @abstractmethod
    def tensor_sources(self) -> dict[str, TensorSource]:
        """Return the source of every weight, with the same keys as weight_specs()."""

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
        """Run the layers on token_ids int32 [T]. Returns the hidden states after the final norm
        [T, hidden_size], and the cache with the new tokens in it.

        `batches` has one AttnBatch for each cache group: the same rows with the page table of the
        group. `embeds` replaces the embeddings of some tokens, in a prefill only.
        """

    @abstractmethod
    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        """Return the logits f32 [S, vocab_size] of hidden states [S, hidden_size]."""


def with_info(model: Model, info: ModelInfo) -> Model:
    """Return a copy of a model with other facts about it."""
    made = copy.copy(model)
    made.info = info
    return made


class ModelFamily(ABC):
    """Makes models of some Hugging Face architectures. A plugin registers an instance as kind
    "model".
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
        """Make the model of a checkpoint. Raises CheckpointError for a configuration that the
        family does not support; the error names the field.

        config: the values of config.json. dtype: the dtype of the computation. num_shards: number
        of devices that share the KV heads; with fewer KV heads than devices each head is repeated,
        so that every device has a whole head. max_model_len: the max length of a row, for models
        whose rotary frequencies depend on it; None means ModelInfo.auto_max_model_len. The caller
        refuses a length above ModelInfo.max_model_len.
        """


@dataclasses.dataclass(frozen=True)
class TokenInfo:
    """The special tokens that the checkpoint and its generation configuration name."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


class Checkpoint(Protocol):
    """A stored model. A plugin of kind "checkpoint" opens it from a name or path; CheckpointError
    when it cannot be opened.
    """

    folder: Path
    config: Mapping[str, Any]
    architecture: str
    token_info: TokenInfo
    sampling_defaults: Mapping[str, Any]
    """Field of SamplingParams -> the value that the checkpoint recommends; may be empty."""
    quantization: str
    """Name of the form in which the checkpoint stores weights in fewer bits, such as "gptq"; "none"
    for a checkpoint without quantised weights.
    """

    def quantized_weights(self, model: Model) -> Mapping[str, QuantizedArray]:
        """Return how the checkpoint stores the quantised weights of `model`, by path, as
        StoredArrays; empty for a checkpoint without quantised weights. CheckpointError, which names
        the tensor, for tensors that do not fit together.
        """

    @property
    def num_token_ids(self) -> int | None:
        """One more than the largest id that the tokenizer has, added tokens included; None when it
        is not known without loading the tokenizer.
        """

    def load_tokenizer(self) -> Any:
        """Load the tokenizer, which has the interface of `enginebay.contracts.text.Tokenizer`."""

    def load_weights(
        self,
        model: Model,
        *,
        form: WeightFormat,
        place: Callable[[str, WeightSpec], Sharding | None],
        verify: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Weight]:
        """Load all weights of `model`, each shard directly to its device.

        `form` says how each weight is stored; weights that the checkpoint stores in fewer bits are
        dequantised where `form` has plain ones. `place(path, spec)` returns the sharding of a
        weight, or of an array of a quantised weight; None: the default device. CheckpointError,
        which names the tensor, for NaN or infinity in quantised weights, and in all weights with
        `verify`. `progress(bytes_done, bytes_total)` is called while loading.
        """
