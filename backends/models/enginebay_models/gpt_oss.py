"""The gpt-oss family: attention with sinks, windows in every other layer, experts with biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from enginebay.contracts.model import Model, ModelFamily, TensorSource
from enginebay.ops.bound import Ops
from enginebay.ops.grouped_linear import GROUPED_LINEAR
from enginebay.ops.linear import LINEAR
from enginebay_models import tensors
from enginebay_models.blocks import parameter, vector
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.experts import ExpertsConfig
from enginebay_models.fields import flag, number, positive, with_own_names
from enginebay_models.hf_config import mixed_windows, read_decoder
from enginebay_models.tensors import Index

_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 131072, "rope_theta": 150000.0}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclasses.dataclass(frozen=True)
class OssExpertsConfig:
    """Experts whose gates are clipped from above to `limit`, and ups from both sides. They return
    (up + 1) * gate * sigmoid(alpha * gate), before their second product.
    """

    routing: ExpertsConfig
    alpha: float
    limit: float


class OssExperts(nnx.Module):
    """Experts with biases, and a router with one. The features of gates and ups take turns in the
    checkpoint, where a weight is [experts, inputs, outputs].
    """

    def __init__(self, name: str, hidden_size: int, config: OssExpertsConfig) -> None:
        count, width = config.routing.num_experts, config.routing.width
        router = (count, hidden_size)
        source = tensors.whole(f"{name}.router.weight", router)
        self.router = parameter((None, None), router, source)
        self.router_bias = vector(f"{name}.router.bias", count)
        wide, tall = (count, 2 * width, hidden_size), (count, hidden_size, width)
        turns = np.arange(2 * width).reshape(width, 2).T.ravel()
        in_turn = np.arange(hidden_size)
        axes = ("expert", None, None)
        first, second = (f"{name}.experts.{one}_proj" for one in ("gate_up", "down"))
        self.gate_up = parameter(axes, wide, _turned(first, wide, turns), 1)
        self.down = parameter(axes, tall, _turned(second, tall, in_turn), 1)
        self.gate_up_bias = parameter(
            (None, None), wide[:2], _turned_bias(f"{first}_bias", wide[:2], turns)
        )
        self.down_bias = parameter(
            (None, None), tall[:2], _turned_bias(f"{second}_bias", tall[:2], in_turn)
        )
        self.config = config

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        routing, limit = self.config.routing, self.config.limit
        scores = ops[LINEAR](
            x, self.router.get_value(), self.router_bias.get_value(), out_dtype=jnp.float32
        )
        shares, ids = routing.route(scores)
        order = jnp.argsort(ids.reshape(-1))
        experts = ids.reshape(-1)[order]
        sizes = jnp.bincount(experts, length=routing.num_experts).astype(jnp.int32)
        both = ops[GROUPED_LINEAR](
            x[order // routing.num_chosen], self.gate_up.get_value(), sizes, out_dtype=jnp.float32
        )
        both = both + self.gate_up_bias.get_value()[experts].astype(jnp.float32)
        gate, up = jnp.split(both, 2, axis=-1)
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        opened = ((up + 1) * gate * jax.nn.sigmoid(self.config.alpha * gate)).astype(x.dtype)
        parts = ops[GROUPED_LINEAR](opened, self.down.get_value(), sizes, out_dtype=jnp.float32)
        parts = parts + self.down_bias.get_value()[experts].astype(jnp.float32)
        by_token = parts[jnp.argsort(order)].reshape(x.shape[0], routing.num_chosen, -1)
        return (by_token * shares[..., None]).sum(axis=1).astype(x.dtype)


def _turned(name: str, shape: tuple[int, int, int], order: np.ndarray) -> TensorSource:
    """Read a tensor [experts, inputs, outputs] as a weight [experts, outputs, inputs], whose output
    i is output order[i] of the tensor.
    """
    experts, outputs, inputs = shape

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        part = readers[0][index[0], index[2]]
        return np.swapaxes(part, 1, 2)[:, order[index[1]]]

    return TensorSource((name,), ((experts, inputs, outputs),), build)


def _turned_bias(name: str, shape: tuple[int, int], order: np.ndarray) -> TensorSource:
    """Read a tensor [experts, outputs] whose output order[i] is output i of the weight."""

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        return readers[0][index[0], :][:, order[index[1]]]

    return TensorSource((name,), (shape,), build)


class GptOssFamily(ModelFamily):
    """Full attention and, in every other layer or as `layer_types` says, a window of
    `sliding_window` tokens, both with sinks; experts with biases, whose weights are normalised to
    sum 1. Biases: `attention_bias`. Experts in mxfp4, as in the first files, are refused.
    """

    name = "gpt_oss"
    architectures = ("GptOssForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        shared = _DEFAULTS | dict(config)
        if not shared.get("rope_parameters") and not shared.get("rope_scaling"):
            shared["rope_scaling"] = _YARN
        decoder = read_decoder(
            shared,
            head_dim=64,
            kv_heads=8,
            max_model_len=max_model_len,
            eps=("rms_norm_eps", 1e-5),
        )
        own = with_own_names(config, {"num_local_experts": "num_experts"})
        count = positive(own, "num_local_experts", 128)
        routing = ExpertsConfig(
            count,
            positive(own, "num_experts_per_tok", 4, most=count),
            decoder.intermediate_size,
            is_normed=True,
            plain_layers=frozenset(),
        )
        alpha, limit = number(own, "swiglu_alpha", 1.702), number(own, "swiglu_limit", 7.0)
        experts = OssExpertsConfig(routing, alpha, limit)
        bias = flag(config, "attention_bias", default=True)
        window = positive(config, "sliding_window", 128)
        variant = Variant(
            windows=mixed_windows(config, decoder.num_layers, window, every=2),
            qkv_bias=bias,
            out_bias=bias,
            sinks=True,
            mlp=lambda name, hidden, *_, **__: OssExperts(name, hidden, experts),
            mlp_config=experts,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = GptOssFamily()
