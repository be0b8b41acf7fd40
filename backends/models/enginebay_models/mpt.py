"""The MPT family: ALiBi instead of rotary positions, LayerNorm, and an MLP without a gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from enginebay.contracts.cache import CacheArrays, CacheGroup
from enginebay.contracts.model import Model, ModelFamily, ModelInfo, TensorSource
from enginebay.ops.attention import ATTENTION, NamedInputs
from enginebay.ops.bound import Ops
from enginebay.ops.caps import LAYER
from enginebay.ops.linear import LINEAR
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay_models import tensors
from enginebay_models.alibi import SLOPES, slopes_of
from enginebay_models.blocks import Decoder, DecoderLayer, LayerNorm, PlainMlp, parameter
from enginebay_models.decoder import NnxModel
from enginebay_models.fields import bad_field, flag, number, positive, with_own_names
from enginebay_models.hf_config import MAX_LAYERS, check_heads, refuse_unserved_features
from enginebay_models.tensors import Index

FULL = "full"
_GROWTH, _MAX_BIAS = 4, 8
_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.blocks.",
    "model.norm.": "transformer.norm_f.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""

_USUAL = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
}
"""Fields of config.json, and the names of other families that they may also have."""


@dataclasses.dataclass(frozen=True)
class MptConfig:
    """One attention layer and its cache group.

    Queries, keys and values are clipped to `clip`, if it is given.
    """

    hidden_size: int
    spec: AttnSpec
    clip: float | None
    cache_group: str = FULL

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        return self.spec.q_dtype


class MptAttention(nnx.Module):
    """Multi-head attention; `name` is the prefix of its tensors: "model.layers.0.attn"."""

    def __init__(self, name: str, config: MptConfig, layer: int) -> None:
        self.layer = layer
        spec, hidden = config.spec, config.hidden_size
        heads, size = spec.num_q_heads, spec.head_dim
        wide, tall = (heads, 3, size, hidden), (hidden, heads, 1, size)
        self.qkv = parameter(
            ("kv_heads", None, None, None), wide, _fused(f"{name}.Wqkv.weight", wide), 1
        )
        out = tensors.split_columns(f"{name}.out_proj.weight", tall)
        self.out = parameter((None, "kv_heads", None, None), tall, out, 3)
        self.config = config

    def __call__(
        self, x: jax.Array, cache: CacheArrays, batch: AttnBatch, ops: Ops
    ) -> tuple[jax.Array, CacheArrays]:
        """Return (out [T, hidden], the layer's cache with the new tokens) for x [T, hidden]."""
        spec, clip = self.config.spec, self.config.clip
        qkv = ops[LINEAR](x, self.qkv.get_value())
        if clip is not None:
            qkv = jnp.clip(qkv, -clip, clip)
        q, k, v = (qkv[:, :, part] for part in range(3))
        inputs: NamedInputs = {
            LAYER: self.layer,
            SLOPES: jnp.asarray(slopes_of(spec.num_q_heads)),
        }
        mixed, cache, _ = ops[ATTENTION](q, k, v, cache, batch, spec=spec, inputs=inputs)
        return ops[LINEAR](mixed[:, :, None], self.out.get_value()), cache


def _fused(name: str, shape: tuple[int, int, int, int]) -> TensorSource:
    """Read a tensor [3 * heads * head_dim, hidden] as a weight [heads, 3, head_dim, hidden]."""
    heads, _, size, hidden = shape

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(heads)
        parts = [
            readers[0][(part * heads + first) * size : (part * heads + last) * size]
            for part in range(3)
        ]
        return np.stack([part.reshape(last - first, size, hidden) for part in parts], axis=1)

    return TensorSource((name,), ((3 * heads * size, hidden),), build)


class MptFamily(ModelFamily):
    """Full attention without groups or biases, with slopes by distance (ALiBi) and no rotary
    positions; a plain MLP.

    `attn_config` may have `clip_qkv` and `softmax_scale`.
    """

    name = "mpt"
    architectures = ("MptForCausalLM", "MPTForCausalLM")

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_unserved_features(config)
        config = with_own_names(config, _USUAL)
        hidden, heads = positive(config, "d_model", 2048), positive(config, "n_heads", 16)
        check_heads("d_model", hidden, "n_heads", heads, num_shards=num_shards)
        attention = _read_attention(config, hidden, heads, dtype)
        eps = number(config, "layer_norm_epsilon", 1e-5)
        num_layers = positive(config, "n_layers", 24, most=MAX_LAYERS)
        vocab_size, longest = positive(config, "vocab_size"), positive(config, "max_seq_len", 2048)

        def layer(index: int) -> DecoderLayer:
            name = f"model.layers.{index}"
            before, between = (LayerNorm(f"{name}.norm_{one}", hidden, eps) for one in (1, 2))
            up, down = (f"{name}.ffn.{one}_proj" for one in ("up", "down"))
            return DecoderLayer(
                MptAttention(f"{name}.attn", attention, index),
                PlainMlp(up, down, (hidden, _GROWTH * hidden), activation="gelu"),
                before,
                between,
            )

        module = Decoder(
            [layer(i) for i in range(num_layers)],
            LayerNorm("model.norm", hidden, eps),
            (vocab_size, hidden),
            tied=flag(config, "tie_word_embeddings", default=True),
        )
        size = hidden // heads
        info = ModelInfo(
            self.name,
            vocab_size,
            hidden,
            longest,
            (CacheGroup(FULL, num_layers, heads, size, size),),
            {FULL: attention.spec},
            constants=repr((attention, eps)),
        )
        return NnxModel(info, module, _NAMES)


def _read_attention(config: Mapping[str, Any], hidden: int, heads: int, dtype: str) -> MptConfig:
    """Read the fields of attention; CheckpointError for a value that is not supported."""
    given = config.get("attn_config")
    own: Mapping[str, Any] = {} if given is None else given
    if not isinstance(own, Mapping):
        raise bad_field("attn_config", given, "an object, or absent")
    for fields, path, only in (
        (config, "", {"expansion_ratio": _GROWTH, "no_bias": True, "logit_scale": None}),
        (
            own,
            "attn_config.",
            {
                "attn_type": "multihead_attention",
                "alibi": True,
                "alibi_bias_max": _MAX_BIAS,
                "prefix_lm": False,
                "qk_ln": False,
                "rope": False,
            },
        ),
    ):
        for name, value in only.items():
            if fields.get(name, value) != value:
                raise bad_field(path + name, fields[name], f"{value}, or absent")
    scale, clip = (
        None if own.get(name) is None else number(own, name, 1.0, path=f"attn_config.{name}")
        for name in ("softmax_scale", "clip_qkv")
    )
    spec = AttnSpec(
        heads,
        heads,
        hidden // heads,
        scale=scale,
        inputs=(SLOPES,),
        q_dtype=dtype,
        kv_dtype=dtype,
    )
    return MptConfig(hidden, spec, clip)


family = MptFamily()
