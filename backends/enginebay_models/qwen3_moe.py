"""The Qwen3-MoE family: Qwen3 whose MLPs are experts, of which a router chooses some for each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from enginebay.model import Model, ModelFamily, TensorSource
from enginebay.ops.bound import Ops
from enginebay_models import tensors
from enginebay_models.activations import ACTIVATIONS
from enginebay_models.blocks import Mlp, parameter
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import bad_field, flag, positive
from enginebay_models.hf_config import DEFAULT_WINDOW, DecoderConfig, read_decoder
from enginebay_models.tensors import Index
from enginebay_xla.ops import GROUPED_LINEAR, LINEAR

_DEFAULT_KV_HEADS = 4
_DEFAULT_EXPERTS, _DEFAULT_CHOSEN, _DEFAULT_WIDTH = 128, 8, 768


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer: their number, how many a token gets, the width of each, whether the
    weights of the chosen ones sum to 1, and the layers that have a plain MLP.
    """

    num_experts: int
    num_chosen: int
    width: int
    is_normed: bool
    plain_layers: frozenset[int]


class Experts(nnx.Module):
    """A gated MLP for each expert; a token's output is the sum of its chosen ones, weighted by the
    softmax of the router. `name` is the checkpoint's prefix, "model.layers.0.mlp".
    """

    def __init__(self, name: str, config: DecoderConfig, experts: ExpertsConfig) -> None:
        hidden, count, width = config.hidden_size, experts.num_experts, experts.width
        router = (count, hidden)
        self.router = parameter((None, None), router, tensors.whole(f"{name}.gate.weight", router))
        wide, tall = (count, width, hidden), (count, hidden, width)
        self.gate = _stacked(f"{name}.experts", "gate_proj", wide)
        self.up = _stacked(f"{name}.experts", "up_proj", wide)
        self.down = _stacked(f"{name}.experts", "down_proj", tall)
        self.activation = config.activation
        self.experts = experts

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """x [T, hidden] -> [T, hidden]."""
        chosen = self.experts.num_chosen
        scores = ops[LINEAR](x, self.router.get_value(), out_dtype=jnp.float32)
        shares, ids = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), chosen)
        if self.experts.is_normed:
            shares = shares / shares.sum(axis=-1, keepdims=True)
        order = jnp.argsort(ids.reshape(-1))
        sizes = jnp.bincount(ids.reshape(-1), length=self.experts.num_experts).astype(jnp.int32)
        rows = x[order // chosen]
        gate = ops[GROUPED_LINEAR](rows, self.gate.get_value(), sizes)
        up = ops[GROUPED_LINEAR](rows, self.up.get_value(), sizes)
        opened = ACTIVATIONS[self.activation](gate.astype(jnp.float32)).astype(x.dtype) * up
        parts = ops[GROUPED_LINEAR](opened, self.down.get_value(), sizes, out_dtype=jnp.float32)
        by_token = parts[jnp.argsort(order)].reshape(x.shape[0], chosen, -1)
        return (by_token * shares[..., None]).sum(axis=1).astype(x.dtype)


def _stacked(prefix: str, kind: str, shape: tuple[int, int, int]) -> nnx.Param:
    """The weight [experts, outputs, inputs] of one tensor for each expert."""

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        return np.stack([reader[index[1:]] for reader in readers[index[0]]])

    names = tuple(f"{prefix}.{i}.{kind}.weight" for i in range(shape[0]))
    source = TensorSource(names, (shape[1:],) * shape[0], build)
    return parameter(("expert", None, None), shape, source, 1)


def read_experts(config: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """The fields of the experts. CheckpointError names what is wrong."""
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    count = positive(config, name, _DEFAULT_EXPERTS)
    chosen = positive(config, "num_experts_per_tok", _DEFAULT_CHOSEN, most=count)
    step = positive(config, "decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(layer) is not int for layer in plain):
        raise bad_field("mlp_only_layers", plain, "a list of numbers of layers")
    sparse = {layer for layer in range(num_layers) if (layer + 1) % step == 0} - set(plain)
    return ExpertsConfig(
        count,
        chosen,
        positive(config, "moe_intermediate_size", _DEFAULT_WIDTH),
        flag(config, "norm_topk_prob", default=False),
        frozenset(range(num_layers)) - sparse,
    )


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window of every layer."""
    if flag(config, "use_sliding_window", default=False):
        if config.get("sliding_window", DEFAULT_WINDOW) is not None:
            return positive(config, "sliding_window", DEFAULT_WINDOW)
    return None


class Qwen3MoeFamily(ModelFamily):
    """Attention as in Qwen3, but head_dim is hidden_size / num_attention_heads unless it is given, and
    with a sliding window every layer has it.
    """

    name = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(config, kv_heads=_DEFAULT_KV_HEADS, max_model_len=max_model_len)
        experts = read_experts(config, decoder.num_layers)
        bias = flag(config, "attention_bias", default=False)
        windows = (_window(config),) * decoder.num_layers

        def make_mlp(name: str, *sizes: int, **choices: Any) -> Mlp | Experts:
            is_plain = int(name.split(".")[2]) in experts.plain_layers
            return Mlp(name, *sizes, **choices) if is_plain else Experts(name, decoder, experts)

        variant = Variant(windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True, mlp=make_mlp)
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = Qwen3MoeFamily()
