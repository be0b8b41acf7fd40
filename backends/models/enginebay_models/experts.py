"""Mixture of experts: a router chooses some experts for each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from enginebay.contracts.model import TensorSource
from enginebay.ops.bound import Ops
from enginebay.ops.grouped_linear import GROUPED_LINEAR
from enginebay.ops.linear import LINEAR
from enginebay_models import tensors
from enginebay_models.activations import ACTIVATIONS
from enginebay_models.blocks import Mlp, parameter
from enginebay_models.fields import bad_field, flag, positive
from enginebay_models.hf_config import DecoderConfig
from enginebay_models.tensors import Index


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer.

    The fields are: the number of experts, how many each token is sent to, the width of each,
    whether the weights of the chosen ones are normalised to sum 1, and the layers that have a plain
    MLP. The experts are in `num_groups` equal groups; only those of the `num_chosen_groups` groups
    with the best scores are chosen. `scale` multiplies the weights of the chosen experts.
    """

    num_experts: int
    num_chosen: int
    width: int
    is_normed: bool
    plain_layers: frozenset[int]
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0

    def route(self, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (weights, ids int32), both [T, chosen], for scores f32 [T, experts]."""
        shares = jax.nn.softmax(scores, axis=-1)
        if self.num_chosen_groups < self.num_groups:
            groups = shares.reshape(-1, self.num_groups, self.num_experts // self.num_groups)
            best = jax.lax.top_k(groups.max(axis=-1), self.num_chosen_groups)[1]
            is_best = (best[:, :, None] == jnp.arange(self.num_groups)).any(axis=1)
            shares = jnp.where(is_best[:, :, None], groups, 0).reshape(shares.shape)
        weights, ids = jax.lax.top_k(shares, self.num_chosen)
        if self.is_normed:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights * self.scale, ids


def read_counts(config: Mapping[str, Any], count: int, chosen: int) -> tuple[int, int]:
    """Read the number of experts, and how many each token is sent to. `count` and `chosen` are the
    family's defaults; CheckpointError names a wrong field.
    """
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    count = positive(config, name, count)
    return count, positive(config, "num_experts_per_tok", chosen, most=count)


def read_experts(
    config: Mapping[str, Any], num_layers: int, *, count: int, chosen: int, width: int
) -> ExpertsConfig:
    """Read the fields of the experts as Qwen's families have them; CheckpointError names a wrong
    one. `count`, `chosen` and `width` are the family's defaults.
    """
    count, chosen = read_counts(config, count, chosen)
    step = positive(config, "decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(layer) is not int for layer in plain):
        raise bad_field("mlp_only_layers", plain, "a list of layer indices")
    sparse = {layer for layer in range(num_layers) if (layer + 1) % step == 0} - set(plain)
    return ExpertsConfig(
        count,
        chosen,
        positive(config, "moe_intermediate_size", width),
        flag(config, "norm_topk_prob", default=False),
        frozenset(range(num_layers)) - sparse,
    )


class Experts(nnx.Module):
    """Gated MLPs. The output of a token is the weighted sum of its chosen experts' outputs.

    The weights are the softmax of the router. `name` is the prefix of the tensors, such as
    "model.layers.0.mlp".
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
        """Return [T, hidden] for x [T, hidden]."""
        chosen = self.experts.num_chosen
        scores = ops[LINEAR](x, self.router.get_value(), out_dtype=jnp.float32)
        shares, ids = self.experts.route(scores)
        order = jnp.argsort(ids.reshape(-1))
        sizes = jnp.bincount(ids.reshape(-1), length=self.experts.num_experts).astype(jnp.int32)
        rows = x[order // chosen]
        gate = ops[GROUPED_LINEAR](rows, self.gate.get_value(), sizes)
        up = ops[GROUPED_LINEAR](rows, self.up.get_value(), sizes)
        opened = ACTIVATIONS[self.activation](gate.astype(jnp.float32)).astype(x.dtype) * up
        parts = ops[GROUPED_LINEAR](opened, self.down.get_value(), sizes, out_dtype=jnp.float32)
        by_token = parts[jnp.argsort(order)].reshape(x.shape[0], chosen, -1)
        return (by_token * shares[..., None]).sum(axis=1).astype(x.dtype)


class SharedExperts(nnx.Module):
    """Routed experts, and shared experts (one MLP) that compute every token.

    With `gate`, the name of a tensor [1, hidden], the output of the shared experts is multiplied by
    the sigmoid of the tensor's product with the token.
    """

    def __init__(
        self, routed: Experts, shared: Mlp, gate: str | None = None, hidden_size: int = 0
    ) -> None:
        self.routed = routed
        self.shared = shared
        row = (1, hidden_size)
        self.gate = None if gate is None else parameter((None, None), row, tensors.whole(gate, row))

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        shared = self.shared(x, ops)
        if self.gate is not None:
            share = jax.nn.sigmoid(ops[LINEAR](x, self.gate.get_value(), out_dtype=jnp.float32))
            shared = share.astype(x.dtype) * shared
        return self.routed(x, ops) + shared


def experts_or_mlp(
    decoder: DecoderConfig,
    experts: ExpertsConfig,
    add_shared: Callable[[str, Experts], Any] = lambda _, routed: routed,
) -> Callable[..., Any]:
    """Return a function that makes a layer's MLP, for Variant.mlp: experts, or a plain MLP in
    `plain_layers`. `add_shared(prefix, experts)` returns the experts with shared ones added.
    """

    def make(name: str, *sizes: int, **choices: Any) -> Any:
        if int(name.split(".")[2]) in experts.plain_layers:
            return Mlp(name, *sizes, **choices)
        return add_shared(name, Experts(name, decoder, experts))

    return make


def _stacked(prefix: str, kind: str, shape: tuple[int, int, int]) -> nnx.Param:
    """Stack one tensor per expert into a weight [experts, outputs, inputs]."""

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        return np.stack([reader[index[1:]] for reader in readers[index[0]]])

    names = tuple(f"{prefix}.{i}.{kind}.weight" for i in range(shape[0]))
    source = TensorSource(names, (shape[1:],) * shape[0], build)
    return parameter(("expert", None, None), shape, source, 1)
