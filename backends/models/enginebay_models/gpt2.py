"""The GPT-2 family: learned positions, LayerNorm with a bias, and an MLP without a gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from enginebay.contracts.cache import CacheArrays, CacheGroup
from enginebay.contracts.model import Model, ModelFamily, ModelInfo, TensorSource
from enginebay.ops.attention import ATTENTION
from enginebay.ops.bound import Ops
from enginebay.ops.caps import LAYER
from enginebay.ops.linear import LINEAR
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay_models import tensors
from enginebay_models.blocks import (
    Decoder,
    DecoderLayer,
    InputRule,
    LayerNorm,
    PlainMlp,
    parameter,
    vector,
)
from enginebay_models.decoder import FULL, NnxModel
from enginebay_models.fields import bad_field, flag, number, positive, with_own_names
from enginebay_models.hf_config import MAX_LAYERS, activation, check_heads
from enginebay_models.tensors import Index

_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.embed_positions.": "transformer.wpe.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""

_USUAL = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
"""Fields of config.json, and the names in other families, which they may have too."""


@dataclasses.dataclass(frozen=True)
class Gpt2Config:
    """One attention layer and its cache group."""

    hidden_size: int
    spec: AttnSpec
    cache_group: str = FULL

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        return self.spec.q_dtype


class Gpt2Attention(nnx.Module):
    """Multi-head attention without rotary positions; `name` is the prefix of its tensors:
    "transformer.h.0.attn".
    """

    def __init__(self, name: str, config: Gpt2Config, layer: int) -> None:
        self.layer = layer
        spec, hidden = config.spec, config.hidden_size
        heads, size = spec.num_q_heads, spec.head_dim
        wide, tall = (heads, 3, size, hidden), (hidden, heads, 1, size)
        qkv = _by_heads(f"{name}.c_attn.weight", wide)
        bias = _by_heads(f"{name}.c_attn.bias", wide[:3])
        self.qkv = parameter(("kv_heads", None, None, None), wide, qkv, 1)
        self.qkv_bias = parameter(("kv_heads", None, None), wide[:3], bias)
        out = _columns_by_heads(f"{name}.c_proj.weight", tall)
        self.out = parameter((None, "kv_heads", None, None), tall, out, 3)
        self.out_bias = vector(f"{name}.c_proj.bias", hidden)
        self.config = config

    def __call__(
        self, x: jax.Array, cache: CacheArrays, batch: AttnBatch, ops: Ops
    ) -> tuple[jax.Array, CacheArrays]:
        """Return (out [T, hidden], the layer's cache with the new tokens) for x [T, hidden]."""
        qkv = ops[LINEAR](x, self.qkv.get_value(), self.qkv_bias.get_value())
        q, k, v = (qkv[:, :, part] for part in range(3))
        spec, inputs = self.config.spec, {LAYER: self.layer}
        mixed, cache, _ = ops[ATTENTION](q, k, v, cache, batch, spec=spec, inputs=inputs)
        return ops[LINEAR](
            mixed[:, :, None], self.out.get_value(), self.out_bias.get_value()
        ), cache


def _by_heads(name: str, shape: tuple[int, ...]) -> TensorSource:
    """Read a tensor [hidden, 3 * heads * head_dim], or a bias [3 * heads * head_dim], as a weight
    [heads, 3, head_dim, hidden], or [heads, 3, head_dim].
    """
    heads, _, size, *inputs = shape

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(heads)
        parts = [
            readers[0][..., (part * heads + first) * size : (part * heads + last) * size].T
            for part in range(3)
        ]
        return np.stack([part.reshape(last - first, size, *inputs) for part in parts], axis=1)

    return TensorSource((name,), ((*inputs, 3 * heads * size),), build)


def _columns_by_heads(name: str, shape: tuple[int, int, int, int]) -> TensorSource:
    """Read a tensor [heads * head_dim, out] as a weight [out, heads, 1, head_dim]."""
    num_out, heads, _, size = shape

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[1].indices(heads)
        part = readers[0][first * size : last * size, index[0]].T
        return part.reshape(part.shape[0], last - first, 1, size)

    return TensorSource((name,), ((heads * size, num_out),), build)


class Gpt2Family(ModelFamily):
    """Full attention without groups, learned positions, LayerNorm, a plain MLP, and biases
    everywhere.

    `scale_attn_by_inverse_layer_idx` and `add_cross_attention` are refused.
    """

    name = "gpt2"
    architectures = ("GPT2LMHeadModel",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        config = with_own_names(config, _USUAL)
        hidden, heads = positive(config, "n_embd", 768), positive(config, "n_head", 12)
        check_heads("n_embd", hidden, "n_head", heads, num_shards=num_shards)
        for name, value in (
            ("scale_attn_by_inverse_layer_idx", False),
            ("add_cross_attention", False),
        ):
            if config.get(name, value) != value:
                raise bad_field(name, config[name], "false, or absent", is_null=True)
        act = activation(config, "activation_function", "gelu_new")
        inner = 4 * hidden if config.get("n_inner") is None else positive(config, "n_inner")
        eps = number(config, "layer_norm_epsilon", 1e-5)
        num_layers = positive(config, "n_layer", 12, most=MAX_LAYERS)
        vocab_size, longest = (
            positive(config, "vocab_size", 50257),
            positive(config, "n_positions", 1024),
        )
        scale = None if flag(config, "scale_attn_weights", default=True) else 1.0
        size = hidden // heads
        spec = AttnSpec(heads, heads, size, scale=scale, q_dtype=dtype, kv_dtype=dtype)
        attention = Gpt2Config(hidden, spec)

        def layer(index: int) -> DecoderLayer:
            name = f"transformer.h.{index}"
            before, between = (
                LayerNorm(f"{name}.ln_{one}", hidden, eps, bias=True) for one in (1, 2)
            )
            mlp = PlainMlp(
                f"{name}.mlp.c_fc",
                f"{name}.mlp.c_proj",
                (hidden, inner),
                activation=act,
                bias=True,
                read=tensors.transposed,
            )
            return DecoderLayer(
                Gpt2Attention(f"{name}.attn", attention, index), mlp, before, between
            )

        module = Decoder(
            [layer(i) for i in range(num_layers)],
            LayerNorm("transformer.ln_f", hidden, eps, bias=True),
            (vocab_size, hidden),
            tied=flag(config, "tie_word_embeddings", default=True),
            inputs=InputRule(num_positions=longest),
        )
        info = ModelInfo(
            self.name,
            vocab_size,
            hidden,
            longest,
            (CacheGroup(FULL, num_layers, heads, size, size),),
            {FULL: spec},
            constants=repr((act, eps)),
        )
        return NnxModel(info, module, _NAMES)


family = Gpt2Family()
