"""Building blocks of decoder families in flax.nnx: attention, MLP, layer, and the whole decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.model import TensorSource
from enginebay.ops.attention import ATTENTION, NamedInputs
from enginebay.ops.bound import Ops
from enginebay.ops.caps import LAYER
from enginebay.ops.linear import LINEAR
from enginebay.ops.norm import ADD_RMS_NORM, RMS_NORM
from enginebay.ops.rope import ROPE
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnBatch, AttnSpec
from enginebay.weights import WeightSpec
from enginebay_models import tensors
from enginebay_models.activations import ACTIVATIONS
from enginebay_models.alibi import SLOPES, slopes_of
from enginebay_models.tensors import APART, QkvRows

SINKS = "sinks"
"""Name of attention's input f32 [query heads], in `AttnSpec.inputs` of models that have it."""

Batches = Mapping[str, AttnBatch]
"""The batch record of the step for each cache group."""


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """A factor on queries that grows with their position p: 1 + beta * log(1 + p // context)."""

    beta: float
    context: float

    def at(self, positions: jax.Array) -> jax.Array:
        """Return the factors f32 [T] for positions int32 [T]."""
        return 1 + self.beta * jnp.log1p(jnp.floor(positions / self.context))


@dataclasses.dataclass(frozen=True)
class AttentionLayerConfig:
    """One kind of attention layer, with its cache group.

    `repeats` is how often `spec` has each KV head of the checkpoint. With `rope` None, the layer
    has no rotary positions. With `qk_norm_eps` None, queries and keys are not normed; with
    `qk_norm_joint` one norm is over all heads; with `qk_norm_last` they are normed after they were
    rotated. With `clip`, queries, keys and values are clipped to it from both sides, before all
    else. RmsNorm describes `norm_offset`, QkvRows `qkv_rows`, QueryScale `query_scale`.
    """

    hidden_size: int
    spec: AttnSpec
    rope: RopeSpec | None
    cache_group: str
    repeats: int = 1
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    qk_norm_joint: bool = False
    qk_norm_last: bool = False
    clip: float | None = None
    norm_offset: float = 0.0
    qkv_rows: QkvRows = APART
    query_scale: QueryScale | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        return self.spec.q_dtype


def parameter(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    source: TensorSource,
    num_inputs: int | None = None,
    dtype: str | None = None,
) -> nnx.Param:
    """Return a placeholder of a weight, with its checkpoint tensors and its WeightSpec.

    The dtype of the placeholder has no meaning: weights have the dtype in which they are loaded.
    """
    spec = WeightSpec(shape, axes, num_inputs, dtype)
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), spec=spec, source=source)


def vector(name: str, size: int) -> nnx.Param:
    """Return a placeholder of a weight of one dimension, which is replicated on all devices."""
    return parameter((None,), (size,), tensors.whole(name, (size,)))


class RmsNorm(nnx.Module):
    """Root-mean-square norm over the last axis, times the checkpoint's weight plus `offset`."""

    def __init__(self, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        self.scale = vector(f"{name}.weight", size)
        self.eps = eps
        self.offset = offset

    def _factor(self) -> jax.Array:
        scale: jax.Array = self.scale.get_value()
        return scale.astype(jnp.float32) + self.offset if self.offset else scale

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return the norm of x [..., size]."""
        return ops[RMS_NORM](x, self._factor(), eps=self.eps)

    def of_sum(
        self, x: jax.Array, branch: jax.Array | None, ops: Ops
    ) -> tuple[jax.Array, jax.Array]:
        """Return (norm of x + branch, x + branch), both [..., size]; a branch of None is 0."""
        if branch is None:
            return self(x, ops), x
        return ops[ADD_RMS_NORM](x, branch, self._factor(), eps=self.eps)


class JointRmsNorm(nnx.Module):
    """Root-mean-square norm of a token's queries or keys over all heads together.

    `heads` is the shape of the weight: KV heads of the model, query heads of each, head size. Of
    keys, `repeats` KV heads of the model are one of the checkpoint.
    """

    def __init__(self, name: str, heads: tuple[int, int, int], eps: float, repeats: int) -> None:
        source = tensors.heads_of_vector(f"{name}.weight", heads, repeats)
        self.scale = parameter(("kv_heads", None, None), heads, source)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the norm of x [T, *heads] in x's dtype, computed in f32."""
        wide = x.astype(jnp.float32)
        mean = jnp.square(wide).mean(axis=(1, 2, 3), keepdims=True)
        factor = self.scale.get_value().astype(jnp.float32)
        return (wide * jax.lax.rsqrt(mean + self.eps) * factor).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / standard deviation over the last axis, times the checkpoint's weight plus
    `offset`, if it has one, plus a bias if the family has one.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        weight: bool = True,
        bias: bool = False,
        offset: float = 0.0,
    ) -> None:
        self.scale = vector(f"{name}.weight", size) if weight else None
        self.bias = vector(f"{name}.bias", size) if bias else None
        self.eps = eps
        self.offset = offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the norm of x [..., size] in x's dtype, computed in f32."""
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.eps)
        if self.scale is not None:
            factor = self.scale.get_value().astype(jnp.float32)
            normed *= factor + self.offset if self.offset else factor
        bias = value_of(self.bias)
        return (normed if bias is None else normed + bias.astype(jnp.float32)).astype(x.dtype)

    def of_sum(
        self, x: jax.Array, branch: jax.Array | None, ops: Ops
    ) -> tuple[jax.Array, jax.Array]:
        """Return (norm of x + branch, x + branch), both [..., size]; a branch of None is 0."""
        total = x if branch is None else x + branch
        return self(total), total


class NormOfSum(Protocol):
    """A norm before attention, an MLP or the head."""

    def of_sum(
        self, x: jax.Array, branch: jax.Array | None, ops: Ops
    ) -> tuple[jax.Array, jax.Array]:
        """Return (norm of x + branch, x + branch), as RmsNorm.of_sum does."""


class NoNorm(nnx.Module):
    """In place of a norm, in families that norm results alone."""

    def of_sum(
        self, x: jax.Array, branch: jax.Array | None, ops: Ops
    ) -> tuple[jax.Array, jax.Array]:
        """Return x + branch twice; a branch of None is 0."""
        total = x if branch is None else x + branch
        return total, total


class StreamNorm(nnx.Module):
    """A norm of the residual stream itself: attention or an MLP is added to what it reads."""

    def __init__(self, norm: NormOfSum) -> None:
        self.norm = norm

    def of_sum(
        self, x: jax.Array, branch: jax.Array | None, ops: Ops
    ) -> tuple[jax.Array, jax.Array]:
        """Return the norm of x + branch twice, as what is read and as the stream."""
        normed, _ = self.norm.of_sum(x, branch, ops)
        return normed, normed


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions. If `spec.inputs` has them, it has slopes by
    distance (ALiBi), or sinks: learned scores of no key, one for each query head.

    `name` is the prefix of its tensors, such as "model.layers.0.self_attn".
    """

    def __init__(self, name: str, config: AttentionLayerConfig, layer: int) -> None:
        """`layer`: its number, which kernels may ask for."""
        self.layer = layer
        spec, hidden = config.spec, config.hidden_size
        heads = (spec.num_kv_heads, spec.group, spec.head_dim)
        fused = (spec.num_kv_heads, spec.group + 2, spec.head_dim)
        qkv_rows, repeats = config.qkv_rows, config.repeats
        own = ("q_proj", "k_proj", "v_proj") if qkv_rows.place == "apart" else ("qkv_proj",)
        weights, biases = (
            tuple(f"{name}.{one}.{kind}" for one in own) for kind in ("weight", "bias")
        )
        qkv = tensors.fused_qkv(
            weights, heads, repeats=repeats, features=(hidden,), qkv_rows=qkv_rows
        )
        qkv_bias = tensors.fused_qkv(biases, heads, repeats=repeats, qkv_rows=qkv_rows)
        out = tensors.split_columns(f"{name}.o_proj.weight", (hidden, *heads))
        self.qkv = parameter(("kv_heads", None, None, None), (*fused, hidden), qkv, 1)
        self.qkv_bias = (
            parameter(("kv_heads", None, None), fused, qkv_bias) if config.qkv_bias else None
        )
        self.out = parameter((None, "kv_heads", None, None), (hidden, *heads), out, 3)
        self.out_bias = vector(f"{name}.o_proj.bias", hidden) if config.out_bias else None
        eps = None if config.qk_norm_joint else config.qk_norm_eps
        self.q_norm, self.k_norm = (
            None
            if eps is None
            else RmsNorm(f"{name}.{one}_norm", spec.head_dim, eps, config.norm_offset)
            for one in "qk"
        )
        self.joint_q_norm, self.joint_k_norm = (
            JointRmsNorm(f"{name}.{one}_norm", (heads[0], count, heads[2]), eps, times)
            if config.qk_norm_joint and (eps := config.qk_norm_eps) is not None
            else None
            for one, count, times in (("q", spec.group, 1), ("k", 1, repeats))
        )
        sinks = tensors.heads_of_vector(f"{name}.sinks", (*heads[:2], 1), 1)
        self.sinks = (
            parameter(("kv_heads", None, None), (*heads[:2], 1), sinks)
            if SINKS in spec.inputs
            else None
        )
        self.config = config

    def __call__(
        self, x: jax.Array, cache: CacheArrays, batch: AttnBatch, ops: Ops
    ) -> tuple[jax.Array, CacheArrays]:
        """Return (out [T, hidden], the layer's cache with the new tokens) for x [T, hidden]."""
        spec = self.config.spec
        qkv = ops[LINEAR](x, self.qkv.get_value(), value_of(self.qkv_bias))
        if self.config.clip is not None:
            qkv = jnp.clip(qkv, -self.config.clip, self.config.clip)
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
        rope = self.config.rope
        if self.config.qk_norm_last and rope is not None:
            q = q.reshape(x.shape[0], spec.num_q_heads, spec.head_dim)
            q, k = (ops[ROPE](each, batch.positions, spec=rope) for each in (q, k))
            rope = None
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, ops), self.k_norm(k, ops)
        if self.joint_q_norm is not None and self.joint_k_norm is not None:
            q, k = self.joint_q_norm(q), self.joint_k_norm(k[:, :, None])[:, :, 0]
        q = q.reshape(x.shape[0], spec.num_q_heads, spec.head_dim)
        if self.config.query_scale is not None:
            q = q * self.config.query_scale.at(batch.positions)[:, None, None].astype(q.dtype)
        inputs: NamedInputs = {LAYER: self.layer}
        if SLOPES in spec.inputs:
            inputs = {**inputs, SLOPES: jnp.asarray(slopes_of(spec.num_q_heads))}
        if self.sinks is not None:
            sinks = self.sinks.get_value().reshape(-1)
            inputs = {**inputs, SINKS: sinks.astype(jnp.float32)}
        mixed, cache, _ = ops[ATTENTION](
            *(q, k, v, cache, batch), spec=spec, rope=rope, inputs=inputs
        )
        mixed = mixed.reshape(x.shape[0], spec.num_kv_heads, spec.group, spec.head_dim)
        return ops[LINEAR](mixed, self.out.get_value(), value_of(self.out_bias)), cache


def _projection(name: str, hidden: int, width: int) -> nnx.Param:
    shape = (hidden, width) if name.endswith("_in") else (width, hidden)
    return parameter((None, None), shape, tensors.whole(f"{name}.weight", shape), 1)


def _wide(name: str, intermediate_size: int, hidden_size: int) -> nnx.Param:
    shape = (intermediate_size, hidden_size)
    return parameter(("mlp", None), shape, tensors.whole(f"{name}.weight", shape), 1)


def _wide_bias(name: str, intermediate_size: int) -> nnx.Param:
    return parameter(
        ("mlp",), (intermediate_size,), tensors.whole(f"{name}.bias", (intermediate_size,))
    )


class Mlp(nnx.Module):
    """The gated MLP down(activation(gate(x)) * up(x)).

    `name` is the prefix of its tensors, such as "model.layers.0.mlp".
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
    ) -> None:
        # gate and up are two weights, because in one weight a shard of axis "mlp" would not be
        # contiguous.
        self.gate = _wide(f"{name}.gate_proj", intermediate_size, hidden_size)
        self.up = _wide(f"{name}.up_proj", intermediate_size, hidden_size)
        down, tall = f"{name}.down_proj.weight", (hidden_size, intermediate_size)
        self.down = parameter((None, "mlp"), tall, tensors.whole(down, tall), 1)
        self.gate_bias = _wide_bias(f"{name}.gate_proj", intermediate_size) if bias else None
        self.up_bias = _wide_bias(f"{name}.up_proj", intermediate_size) if bias else None
        self.down_bias = vector(f"{name}.down_proj.bias", hidden_size) if bias else None
        self.activation = activation

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        gate = ops[LINEAR](x, self.gate.get_value(), value_of(self.gate_bias))
        up = ops[LINEAR](x, self.up.get_value(), value_of(self.up_bias))
        opened = ACTIVATIONS[self.activation](gate.astype(jnp.float32)).astype(x.dtype) * up
        return ops[LINEAR](opened, self.down.get_value(), value_of(self.down_bias))


class FusedMlp(nnx.Module):
    """The gated MLP whose gate and up are one tensor of the checkpoint, first all rows of gate.

    `name` is the prefix of its tensors, such as "model.layers.0.mlp".
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
    ) -> None:
        assert not bias, "no family has biases here"
        wide = (2, intermediate_size, hidden_size)
        source = tensors.two_parts(f"{name}.gate_up_proj.weight", wide)
        self.gate_up = parameter((None, "mlp", None), wide, source, 1)
        down, tall = f"{name}.down_proj.weight", (hidden_size, intermediate_size)
        self.down = parameter((None, "mlp"), tall, tensors.whole(down, tall), 1)
        self.activation = activation

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        both = ops[LINEAR](x, self.gate_up.get_value())
        gate = ACTIVATIONS[self.activation](both[:, 0].astype(jnp.float32)).astype(x.dtype)
        return ops[LINEAR](gate * both[:, 1], self.down.get_value())


class PlainMlp(nnx.Module):
    """The MLP without a gate, down(activation(up(x))).

    `up` and `down` are the prefixes of its tensors, such as "model.layers.0.ffn.up_proj". `read`
    returns the source of a weight [outputs, inputs] by the name and the shape of its tensor.
    """

    def __init__(
        self,
        up: str,
        down: str,
        sizes: tuple[int, int],
        *,
        activation: str,
        bias: bool = False,
        read: Callable[[str, tuple[int, int]], TensorSource] = tensors.whole,
    ) -> None:
        """`sizes`: hidden size, intermediate size."""
        hidden, inner = sizes
        wide, tall = (inner, hidden), (hidden, inner)
        self.up = parameter(("mlp", None), wide, read(f"{up}.weight", wide), 1)
        self.down = parameter((None, "mlp"), tall, read(f"{down}.weight", tall), 1)
        self.up_bias = _wide_bias(up, inner) if bias else None
        self.down_bias = vector(f"{down}.bias", hidden) if bias else None
        self.activation = activation

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        up = ops[LINEAR](x, self.up.get_value(), value_of(self.up_bias))
        opened = ACTIVATIONS[self.activation](up.astype(jnp.float32)).astype(x.dtype)
        return ops[LINEAR](opened, self.down.get_value(), value_of(self.down_bias))


def plain_mlp(
    name: str,
    hidden_size: int,
    intermediate_size: int,
    *,
    bias: bool = False,
    activation: str = "gelu",
) -> PlainMlp:
    """Return a PlainMlp for the arguments of `Mlp`; its tensors are up_proj and down_proj."""
    sizes = hidden_size, intermediate_size
    up, down = f"{name}.up_proj", f"{name}.down_proj"
    return PlainMlp(up, down, sizes, activation=activation, bias=bias)


@dataclasses.dataclass(frozen=True)
class Residual:
    """How the results of attention and MLP are added to the residual stream: times `scale`, and
    with `parallel` both for the same input, instead of one after the other.
    """

    parallel: bool = False
    scale: float | None = None

    def scaled(self, result: jax.Array) -> jax.Array:
        """Return the branch for a result [T, hidden] of attention or an MLP."""
        return result if self.scale is None else result * jnp.asarray(self.scale, result.dtype)


IN_TURN = Residual()


class DecoderLayer(nnx.Module):
    """Attention and an MLP, or one of them, each with a norm before it and added to the residual
    stream.

    Any module may replace attention that has its signature, and `cache_group` and `dtype` in its
    `config`. With a tuple of cache groups, it is given tuples of caches and batches; without
    attention they are empty. The residual stream is passed as two arrays, x and branch; the next
    norm adds them. Families with norms of the results of attention and MLP give them as
    `out_norms`. Without `mlp_norm`, a parallel MLP reads what attention reads.
    """

    def __init__(
        self,
        attention: Any | None,
        mlp: Any | None,
        attention_norm: NormOfSum | None,
        mlp_norm: NormOfSum | None,
        out_norms: tuple[RmsNorm, RmsNorm] | None = None,
        residual: Residual = IN_TURN,
    ) -> None:
        self.attention = attention
        self.mlp = mlp
        self.attention_norm = attention_norm
        self.mlp_norm = mlp_norm
        self.attention_out_norm = None if out_norms is None else out_norms[0]
        self.mlp_out_norm = None if out_norms is None else out_norms[1]
        self.residual = residual

    @property
    def cache_groups(self) -> str | tuple[str, ...]:
        """The cache group of attention, or several; none without attention."""
        if self.attention is None:
            return ()
        groups: str | tuple[str, ...] = self.attention.config.cache_group
        return groups

    def __call__(
        self, x: jax.Array, branch: jax.Array | None, cache: CacheArrays, batch: AttnBatch, ops: Ops
    ) -> tuple[jax.Array, jax.Array | None, CacheArrays]:
        """Return (x, branch, the layer's cache) for x and branch [T, hidden].

        The branch of the first layer is None.
        """
        if self.attention is not None and self.attention_norm is not None:
            normed, x = self.attention_norm.of_sum(x, branch, ops)
            mixed, cache = self.attention(normed, cache, batch, ops)
            if self.attention_out_norm is not None:
                mixed = self.attention_out_norm(mixed, ops)
            branch = self.residual.scaled(mixed)
            if self.residual.parallel and self.mlp is not None:
                if self.mlp_norm is not None:
                    normed, _ = self.mlp_norm.of_sum(x, None, ops)
                return x, branch + self.residual.scaled(self.mlp(normed, ops)), cache
        if self.mlp is None:
            return x, branch, cache
        assert self.mlp_norm is not None, "an MLP of its own, or after attention, has a norm"
        normed, x = self.mlp_norm.of_sum(x, branch, ops)
        added = self.mlp(normed, ops)
        if self.mlp_out_norm is not None:
            added = self.mlp_out_norm(added, ops)
        return x, self.residual.scaled(added), cache


@dataclasses.dataclass(frozen=True)
class InputRule:
    """What the embedding of a token becomes before the first layer. It is multiplied by `scale`; is
    projected from `embed_size` features to those of the layers, and hidden states are projected
    back after the last norm; has the learned embedding of its position added, if there are
    `num_positions`; then is normed, by a LayerNorm with a bias and `norm_eps`.

    `skipped_rows`: first rows of the table of positions that no position has.
    """

    scale: float | None = None
    embed_size: int | None = None
    num_positions: int | None = None
    skipped_rows: int = 0
    norm_eps: float | None = None


@dataclasses.dataclass(frozen=True)
class LogitRule:
    """What the product of hidden states and head becomes: plus the head's `bias`, if it has one;
    times `scale`; then with cap c a logit l becomes c * tanh(l / c).
    """

    scale: float | None = None
    cap: float | None = None
    bias: bool = False

    def applied(self, logits: jax.Array) -> jax.Array:
        """Return f32 logits for f32 products of the same shape."""
        if self.scale is not None:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)


PLAIN_INPUTS = InputRule()
PLAIN_LOGITS = LogitRule()


class Decoder(nnx.Module):
    """The weights of a decoder: the embedding `table` [vocab, hidden], layers, final norm and head.
    NnxModel runs them. InputRule says which embedding has another width.

    With `tied` the embedding is also the head. Hidden states have the dtype of the computation,
    whatever the dtype of the weights.
    """

    def __init__(
        self,
        layers: list[DecoderLayer],
        norm: NormOfSum,
        table: tuple[int, int],
        *,
        tied: bool,
        inputs: InputRule = PLAIN_INPUTS,
        logits: LogitRule = PLAIN_LOGITS,
    ) -> None:
        (vocab, hidden), width = table, inputs.embed_size
        table = (vocab, width or hidden)
        self.embed = parameter(("vocab", None), table, tensors.whole(tensors.EMBEDDING, table), 1)
        self.layers = nnx.List(layers)
        self.norm = norm
        first = next(layer.attention for layer in layers if layer.attention is not None)
        self.dtype = first.config.dtype
        self.inputs = inputs
        self.logits = logits
        self.project_in, self.project_out = (
            None if width is None else _projection(f"model.project_{way}", hidden, width)
            for way in ("in", "out")
        )
        rows = ((inputs.num_positions or 0) + inputs.skipped_rows, hidden)
        source = tensors.whole("model.embed_positions.weight", rows)
        self.positions = parameter((None, None), rows, source) if inputs.num_positions else None
        eps = inputs.norm_eps
        self.embed_norm = (
            None if eps is None else LayerNorm("model.embed_norm", hidden, eps, bias=True)
        )
        self.head_bias = (
            parameter(("vocab",), (vocab,), tensors.whole("lm_head.bias", (vocab,)))
            if logits.bias
            else None
        )
        self.lm_head = (
            None
            if tied
            else parameter(("vocab", None), table, tensors.whole(tensors.HEAD, table), 1)
        )


def value_of(param: nnx.Param | None) -> jax.Array | None:
    """Return the array of a weight, or None for a weight that the model does not have."""
    return None if param is None else param.get_value()
