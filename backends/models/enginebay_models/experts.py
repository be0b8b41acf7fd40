"""Mixture of experts: a router chooses some experts for each token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
from enginebay_models.blocks import FusedMlp, Mlp, PlainMlp, parameter, value_of, vector
from enginebay_models.fields import bad_field, flag, number, positive, refuse_others
from enginebay_models.hf_config import DecoderConfig
from enginebay_models.tensors import Index


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a layer.

    The fields are: the number of experts, how many each token is sent to, the width of each,
    whether the weights of the chosen ones are normalised to sum 1, and the layers that have a plain
    MLP. The weights of experts are the softmax or the sigmoid of their scores, as `scoring` says.
    With `correction`, the shape of its tensor, experts are chosen by their weights plus learned
    ones, in float32, as is then the router. The experts are in `num_groups` equal groups; only
    those of the `num_chosen_groups` groups that are best by their `best_of_group` best experts are
    chosen. `scale` multiplies the weights of the chosen experts, whose sum counts as `least_sum`
    where it is less, and has `added_to_sum` added. `is_fused`: gates and ups of all experts are one
    tensor, and downs another. Without `is_gated` an expert is down(activation(up(x))). With a
    `latent` size, experts read a projection of the token to it, and their sum is projected back;
    both projections have biases with `latent_bias`.
    """

    num_experts: int
    num_chosen: int
    width: int
    is_normed: bool
    plain_layers: frozenset[int]
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction: tuple[int, ...] | None = None
    best_of_group: int = 1
    least_sum: float = 0.0
    added_to_sum: float = 0.0
    is_fused: bool = False
    is_gated: bool = True
    latent: int | None = None
    latent_bias: bool = False

    def route(
        self, scores: jax.Array, correction: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return (weights, ids int32), both [T, chosen], for scores f32 [T, experts], and for a
        correction f32 [experts].
        """
        shares = jax.nn.softmax(scores) if self.scoring == "softmax" else jax.nn.sigmoid(scores)
        choice = shares if correction is None else shares + correction
        if self.num_chosen_groups < self.num_groups:
            groups = choice.reshape(-1, self.num_groups, self.num_experts // self.num_groups)
            of_groups = jax.lax.top_k(groups, self.best_of_group)[0].sum(axis=-1)
            best = jax.lax.top_k(of_groups, self.num_chosen_groups)[1]
            is_best = (best[:, :, None] == jnp.arange(self.num_groups)).any(axis=1)
            choice = jnp.where(is_best[:, :, None], groups, -jnp.inf).reshape(shares.shape)
        weights, ids = jax.lax.top_k(choice, self.num_chosen)
        if correction is not None:
            weights = jnp.take_along_axis(shares, ids, axis=-1)
        if self.is_normed:
            total = weights.sum(axis=-1, keepdims=True)
            weights = weights / (jnp.maximum(total, self.least_sum) + self.added_to_sum)
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


def read_sigmoid_experts(
    config: Mapping[str, Any],
    num_layers: int,
    *,
    count: int,
    width: int,
    groups: tuple[int, int],
    first: int,
    scale: float,
) -> ExpertsConfig:
    """Read the fields of experts that are chosen by sigmoids and a correction, as DeepSeek-V3 has
    them; CheckpointError names a wrong one. The arguments are the family's defaults; `groups`: how
    many, and how many of them are chosen; `first`: the first layer with experts.
    """
    refuse_others(
        config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    )
    count = positive(config, "n_routed_experts", count)
    found = config.get("first_k_dense_replace", first)
    if type(found) is not int or found < 0:
        raise bad_field("first_k_dense_replace", found, "a whole number of layers")
    num_groups = positive(config, "n_group", groups[0], most=count)
    chosen_groups = positive(config, "topk_group", groups[1], most=num_groups)
    if count % num_groups or count == num_groups:
        allowed = f"a divisor of n_routed_experts = {count} that leaves two experts or more"
        raise bad_field("n_group", num_groups, allowed)
    return ExpertsConfig(
        count,
        positive(config, "num_experts_per_tok", 8, most=count // num_groups * chosen_groups),
        positive(config, "moe_intermediate_size", width),
        flag(config, "norm_topk_prob", default=True),
        frozenset(range(min(found, num_layers))),
        num_groups=num_groups,
        num_chosen_groups=chosen_groups,
        scale=number(config, "routed_scaling_factor", scale),
        scoring="sigmoid",
        correction=(count,),
        best_of_group=2,
        least_sum=1e-20,
    )


class Experts(nnx.Module):
    """MLPs with gates or without. A token's output is the weighted sum of its chosen experts'.

    `name` is the prefix of the tensors, such as "model.layers.0.mlp".
    """

    def __init__(self, name: str, config: DecoderConfig, experts: ExpertsConfig) -> None:
        hidden, count, width = config.hidden_size, experts.num_experts, experts.width
        router, exact = (count, hidden), None if experts.correction is None else "float32"
        source = tensors.whole(f"{name}.gate.weight", router)
        self.router = parameter((None, None), router, source, dtype=exact)
        self.correction = (
            None
            if experts.correction is None
            else _correction(f"{name}.gate.e_score_correction_bias", experts.correction)
        )
        read = experts.latent or hidden
        wide, tall = (count, width, read), (count, read, width)
        stacked, prefix = _stacked, f"{name}.experts"
        if experts.is_fused:
            stacked, wide = _whole, (count, 2 * width, read)
        gate = "gate_up_proj" if experts.is_fused else "gate_proj"
        self.gate = stacked(prefix, gate, wide) if experts.is_gated else None
        self.up = None if experts.is_fused else stacked(prefix, "up_proj", wide)
        self.down = stacked(prefix, "down_proj", tall)
        ways = ((read, hidden), (hidden, read))
        self.latent_in, self.latent_out = (
            None if experts.latent is None else _dense(f"{name}.fc{i}_latent_proj", shape)
            for i, shape in enumerate(ways, 1)
        )
        self.latent_in_bias, self.latent_out_bias = (
            vector(f"{name}.fc{i}_latent_proj.bias", shape[0]) if experts.latent_bias else None
            for i, shape in enumerate(ways, 1)
        )
        self.activation = config.activation
        self.experts = experts

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        chosen = self.experts.num_chosen
        read = x if self.correction is None else x.astype(jnp.float32)
        scores = ops[LINEAR](read, self.router.get_value(), out_dtype=jnp.float32)
        shares, ids = self.experts.route(scores, value_of(self.correction))
        order = jnp.argsort(ids.reshape(-1))
        sizes = jnp.bincount(ids.reshape(-1), length=self.experts.num_experts).astype(jnp.int32)
        if self.latent_in is not None:
            x = ops[LINEAR](x, self.latent_in.get_value(), value_of(self.latent_in_bias))
        opened = self._opened(x[order // chosen], sizes, ops)
        parts = ops[GROUPED_LINEAR](opened, self.down.get_value(), sizes, out_dtype=jnp.float32)
        by_token = parts[jnp.argsort(order)].reshape(x.shape[0], chosen, -1)
        total = (by_token * shares[..., None]).sum(axis=1).astype(x.dtype)
        if self.latent_out is None:
            return total
        return ops[LINEAR](total, self.latent_out.get_value(), value_of(self.latent_out_bias))

    def _opened(self, rows: jax.Array, sizes: jax.Array, ops: Ops) -> jax.Array:
        """Return what downs read [T * chosen, width], for the tokens of all experts in turn."""

        def product(weight: nnx.Param) -> jax.Array:
            found: jax.Array = ops[GROUPED_LINEAR](rows, weight.get_value(), sizes)
            return found

        activate = ACTIVATIONS[self.activation]
        if self.gate is None:
            assert self.up is not None, "an expert without a gate has ups"
            up = product(self.up)
            return activate(up.astype(jnp.float32)).astype(up.dtype)
        if self.up is None:
            gate, up = jnp.split(product(self.gate), 2, axis=-1)
        else:
            gate, up = product(self.gate), product(self.up)
        return activate(gate.astype(jnp.float32)).astype(gate.dtype) * up


class SharedExperts(nnx.Module):
    """Routed experts, and shared experts (one MLP) that compute every token.

    With `gate`, the name of a tensor [1, hidden], the output of the shared experts is multiplied by
    the sigmoid of the tensor's product with the token.
    """

    def __init__(
        self,
        routed: Experts,
        shared: Mlp | FusedMlp | PlainMlp,
        gate: str | None = None,
        hidden_size: int = 0,
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


def shared_mlp(decoder: DecoderConfig, width: int) -> Callable[[str, Experts], SharedExperts]:
    """Return a function for `experts_or_mlp` that adds shared experts: one MLP of this width."""

    def add(name: str, routed: Experts) -> SharedExperts:
        sizes = decoder.hidden_size, width
        mlp = Mlp(f"{name}.shared_experts", *sizes, activation=decoder.activation)
        return SharedExperts(routed, mlp)

    return add


def _correction(name: str, shape: tuple[int, ...]) -> nnx.Param:
    """Return a placeholder f32 [experts] of a tensor of this shape, which has as many numbers."""

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        return readers[0][:].reshape(-1)[index]

    return parameter(
        (None,), (math.prod(shape),), TensorSource((name,), (shape,), build), dtype="float32"
    )


def _dense(name: str, shape: tuple[int, int]) -> nnx.Param:
    """Return a placeholder of a weight [outputs, inputs]."""
    return parameter((None, None), shape, tensors.whole(f"{name}.weight", shape), 1)


def _whole(prefix: str, kind: str, shape: tuple[int, int, int]) -> nnx.Param:
    """Return a placeholder of a weight [experts, outputs, inputs] that is one tensor."""
    source = tensors.whole(f"{prefix}.{kind}.weight", shape)
    return parameter(("expert", None, None), shape, source, 1)


def _stacked(prefix: str, kind: str, shape: tuple[int, int, int]) -> nnx.Param:
    """Stack one tensor per expert into a weight [experts, outputs, inputs]."""

    def build(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
        return np.stack([reader[index[1:]] for reader in readers[index[0]]])

    names = tuple(f"{prefix}.{i}.{kind}.weight" for i in range(shape[0]))
    source = TensorSource(names, (shape[1:],) * shape[0], build)
    return parameter(("expert", None, None), shape, source, 1)
