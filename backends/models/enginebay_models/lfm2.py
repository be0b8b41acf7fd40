"""The LFM2 family (text): layers with attention, and layers with a gated short convolution over a
few tokens. The last inputs of the convolution are a recurrent state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.cache_state import StateArray, StateGroup
from enginebay.contracts.model import Model, ModelFamily, TensorSource
from enginebay.ops.bound import Ops
from enginebay.ops.linear import LINEAR
from enginebay.ops.short_conv import SHORT_CONV
from enginebay.ops.spec import AttnBatch
from enginebay_models import tensors
from enginebay_models.blocks import parameter
from enginebay_models.decoder import Mixer, Variant, build_decoder
from enginebay_models.fields import bad_field, flag, number, positive
from enginebay_models.hf_config import FULL, DecoderConfig, check_layer_types, read_decoder
from enginebay_models.tensors import Index

CONV = "conv"
_DEFAULT_THETA = 1_000_000.0
NAMES = {
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.": ".feed_forward.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
    "model.norm.": "model.embedding_norm.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""


@dataclasses.dataclass(frozen=True)
class ShortConvConfig:
    """A short convolution with `taps` taps over hidden states of this size and dtype."""

    hidden_size: int
    taps: int
    dtype: str
    bias: bool
    cache_group: str = CONV


class ShortConv(nnx.Module):
    """Computes out(c * conv(b * x)), where b, c and x are the thirds of one projection.

    `name` is the prefix of its tensors, such as "model.layers.0.conv".
    """

    def __init__(self, name: str, config: ShortConvConfig) -> None:
        self.config = config
        hidden, taps, bias = config.hidden_size, config.taps, config.bias
        thirds, wide = (3, hidden), (3, hidden, hidden)
        self.inputs = parameter(
            (None, "mlp", None), wide, _thirds(f"{name}.in_proj.weight", wide), 1
        )
        self.taps = parameter(
            ("mlp", None), (hidden, taps), tensors.taps(f"{name}.conv.weight", (hidden, taps))
        )
        out, square = f"{name}.out_proj.weight", (hidden, hidden)
        self.out = parameter((None, "mlp"), square, tensors.whole(out, square), 1)
        first, names = _thirds(f"{name}.in_proj.bias", thirds), (f"{name}.conv", f"{name}.out_proj")
        taps_bias, out_bias = (tensors.whole(f"{one}.bias", (hidden,)) for one in names)
        self.inputs_bias = parameter((None, "mlp"), thirds, first) if bias else None
        self.taps_bias = parameter(("mlp",), (hidden,), taps_bias) if bias else None
        self.out_bias = parameter((None,), (hidden,), out_bias) if bias else None

    def __call__(
        self, x: jax.Array, cache: CacheArrays, batch: AttnBatch, ops: Ops
    ) -> tuple[jax.Array, CacheArrays]:
        """Return (out [T, hidden], the layer's state after the tokens) for x [T, hidden]."""
        biases = (
            None if one is None else one.get_value()
            for one in (self.inputs_bias, self.taps_bias, self.out_bias)
        )
        inputs_bias, taps_bias, out_bias = biases
        thirds = ops[LINEAR](x, self.inputs.get_value(), inputs_bias)
        b, c, mixed = thirds[:, 0], thirds[:, 1], thirds[:, 2]
        mixed, cache = ops[SHORT_CONV](b * mixed, self.taps.get_value(), taps_bias, cache, batch)
        return ops[LINEAR](c * mixed, self.out.get_value(), out_bias), cache


def _thirds(name: str, shape: tuple[int, ...]) -> TensorSource:
    """Read a tensor [3 * channels, ...] as a weight [3, channels, ...]."""

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        first, last, _ = index[1].indices(shape[1])
        parts = range(*index[0].indices(3))
        return np.stack(
            [
                readers[0][(slice(i * shape[1] + first, i * shape[1] + last), *index[2:])]
                for i in parts
            ]
        )

    return TensorSource((name,), ((3 * shape[1], *shape[2:]),), build)


class Lfm2Family(ModelFamily):
    """Full attention, with norms of queries and keys, in the layers that `layer_types` or
    `full_attn_idxs` names.

    The others have gated short convolutions. config.json has the MLP's width before rounding.
    Biases: `conv_bias`.
    """

    name = "lfm2"
    architectures = ("Lfm2ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = _read(config, max_model_len)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qk_norm=True,
            names=NAMES,
            mixer=short_convs(config, decoder, dtype),
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def short_convs(config: Mapping[str, Any], decoder: DecoderConfig, dtype: str) -> Mixer | None:
    """Return the convolutions of the layers without attention; None if all have attention."""
    taps = positive(config, "conv_L_cache", 3, most=64)
    if taps < 2:
        raise bad_field("conv_L_cache", taps, "2 to 64")
    bias, hidden = flag(config, "conv_bias", default=False), decoder.hidden_size
    inputs = StateArray("inputs", (taps - 1, hidden), dtype, (None, "mlp"))
    kinds = _layer_kinds(config, decoder.num_layers)
    convs = tuple(i for i, kind in enumerate(kinds) if kind == CONV)
    conv = ShortConvConfig(hidden, taps, dtype, bias)

    def make(prefix: str) -> ShortConv:
        return ShortConv(f"{prefix}.conv", conv)

    return Mixer(make, convs, StateGroup(CONV, len(convs), (inputs,))) if convs else None


def read_shared(config: Mapping[str, Any], max_model_len: int | None) -> DecoderConfig:
    """Read the shared fields, some of which have other names here."""
    shared = {"tie_word_embeddings": True, "num_key_value_heads": 8} | dict(config)
    shared |= {"rms_norm_eps": config.get("norm_eps", 1e-5), "hidden_act": "silu"}
    if "tie_embedding" in config:
        shared["tie_word_embeddings"] = config["tie_embedding"]
    if config.get("rope_theta") is None:
        shared["rope_theta"] = _DEFAULT_THETA
    return read_decoder(shared, max_model_len=max_model_len)


def _read(config: Mapping[str, Any], max_model_len: int | None) -> DecoderConfig:
    """Read the shared fields, and the width of the MLP."""
    shared = dict(config)
    if "block_ff_dim" in config:
        shared["intermediate_size"] = config["block_ff_dim"]
    decoder = read_shared(shared, max_model_len)
    if not flag(config, "block_auto_adjust_ff_dim", default=True):
        return decoder
    width, step = 2 * decoder.intermediate_size // 3, positive(config, "block_multiple_of", 256)
    if config.get("block_ffn_dim_multiplier", 1.0) is not None:
        width = int(number(config, "block_ffn_dim_multiplier", 1.0) * width)
        width = -(-width // step) * step
    return dataclasses.replace(decoder, intermediate_size=width)


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return FULL or CONV for each layer; at least one is FULL."""
    kinds = check_layer_types(config, num_layers, (FULL, CONV))
    if not kinds:
        full = config.get("full_attn_idxs")
        full = list(range(num_layers)) if full is None else full
        if not isinstance(full, list) or any(type(layer) is not int for layer in full):
            raise bad_field("full_attn_idxs", full, "a list of layer indices")
        kinds = [FULL if i in full else CONV for i in range(num_layers)]
    if FULL not in kinds:
        raise bad_field("layer_types", kinds, f"at least one layer of {FULL}")
    return kinds


family = Lfm2Family()
