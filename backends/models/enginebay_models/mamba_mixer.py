"""The Mamba-2 layer ("Transformers are SSMs", Dao and Gu 2024): a convolution over a few tokens, a
state-space scan, and a gated norm. Inputs of the convolution and states of the scan are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.cache_state import StateArray, StateGroup
from enginebay.ops.bound import Ops
from enginebay.ops.linear import LINEAR
from enginebay.ops.short_conv import SHORT_CONV
from enginebay.ops.spec import AttnBatch
from enginebay.ops.ssd_scan import SSD_SCAN
from enginebay_models import tensors
from enginebay_models.activations import ACTIVATIONS
from enginebay_models.blocks import Attention, parameter, value_of, vector
from enginebay_models.fields import MAX_SIZE, bad_field, flag, positive

MAMBA = "mamba"
"""Name of the cache group of the layers' states."""
_LARGEST_STEP = 1e30
"""Of a limit that is not infinite."""
INPUTS, SCAN = "inputs", "scan"
"""Arrays of a state: the last inputs of the convolution, and the state of the scan."""


@dataclasses.dataclass(frozen=True)
class GatedNorm:
    """A root-mean-square norm of each of `groups` equal parts of the scan's outputs. They are
    multiplied by the activated gate before it, or with `is_first` after it.
    """

    eps: float
    groups: int = 1
    is_first: bool = False


@dataclasses.dataclass(frozen=True)
class Factors:
    """Constants that multiply the layer's input, the parts of its projection (gate, x, B, C and
    dt), and its output.
    """

    before: float = 1.0
    parts: tuple[float, ...] = (1.0,) * 5
    after: float = 1.0


@dataclasses.dataclass(frozen=True)
class Biases:
    """Which of the convolution and the projections before and behind it have biases."""

    conv: bool
    inputs: bool
    out: bool


@dataclasses.dataclass(frozen=True)
class MambaConfig:
    """The sizes of a layer and its options; without a `norm` outputs are gated alone. Steps (dt)
    are clipped to `step_limits`, after the softplus.
    """

    hidden_size: int
    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    dtype: str
    norm: GatedNorm | None
    biases: Biases
    activation: str = "silu"
    step_limits: tuple[float, float] = (0.0, float("inf"))
    factors: Factors = Factors()
    cache_group: str = MAMBA

    @property
    def inner(self) -> int:
        """Features of the scan: those of all heads."""
        return self.heads * self.head_dim

    @property
    def projected(self) -> int:
        """Features of B, or of C, of a token."""
        return self.groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.projected

    def states(self, num_layers: int) -> StateGroup:
        """Return the states of so many layers."""
        inputs = StateArray(INPUTS, (self.taps - 1, self.channels), self.dtype, (None, None))
        shape = (self.heads, self.head_dim, self.state_size)
        scan = StateArray(SCAN, shape, "float32", (None,) * 3)
        return StateGroup(self.cache_group, num_layers, (inputs, scan))


@dataclasses.dataclass(frozen=True)
class FieldNames:
    """What a family calls the sizes of the layer."""

    heads: str
    groups: str
    state_size: str
    taps: str


def read_sizes(
    config: Mapping[str, Any], names: FieldNames, *, heads: int, state_size: int, groups: int = 1
) -> tuple[int, int, int, int]:
    """Read (heads, groups, state size, taps). The numbers are the family's defaults;
    CheckpointError names a wrong field.
    """
    found = positive(config, names.heads, heads)
    parts = positive(config, names.groups, groups)
    if found % parts:
        raise bad_field(names.groups, parts, f"a divisor of {names.heads} = {found}")
    taps = positive(config, names.taps, 4, most=64)
    if taps < 2:
        raise bad_field(names.taps, taps, "2 to 64")
    return found, parts, positive(config, names.state_size, state_size), taps


def read_head_dim(config: Mapping[str, Any], inner: int, heads: int, allowed: str) -> int:
    """Read mamba_d_head, which must fit `inner` features of all heads; `allowed` says how they come
    about.
    """
    found = config.get("mamba_d_head", "auto")
    if inner % heads:
        raise bad_field("mamba_n_heads", heads, f"a divisor of {allowed} = {inner}")
    if found not in ("auto", inner // heads) or isinstance(found, bool):
        fitting = f"{inner // heads}, that is {allowed} / mamba_n_heads, or auto"
        raise bad_field("mamba_d_head", found, fitting, is_null="mamba_d_head" in config)
    return inner // heads


def read_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Read time_step_limit: two numbers, the least and the largest step, which may be infinite."""
    found = config.get("time_step_limit", (0.0, float("inf")))
    if isinstance(found, list):  # transformers 5 writes infinity as an object
        found = [float("inf") if one == {"__float__": "Infinity"} else one for one in found]
    if (
        not isinstance(found, list | tuple)
        or len(found) != 2
        or any(isinstance(one, bool) or not isinstance(one, int | float) for one in found)
        or not 0 <= found[0] <= found[1]
        or any(one > _LARGEST_STEP and one != float("inf") for one in found)
    ):
        allowed = "two numbers from 0, the smaller first"
        raise bad_field("time_step_limit", found, allowed, is_null="time_step_limit" in config)
    return float(found[0]), float(found[1])


def read_inner(config: Mapping[str, Any], hidden: int) -> int:
    """Read mamba_expand, and return the features of all heads, so many times the hidden size."""
    return hidden * positive(config, "mamba_expand", 2, most=MAX_SIZE // max(hidden, 1))


def read_biases(config: Mapping[str, Any]) -> Biases:
    """Read mamba_conv_bias, and mamba_proj_bias for both projections."""
    both = flag(config, "mamba_proj_bias", default=False)
    return Biases(flag(config, "mamba_conv_bias", default=True), both, both)


class Mamba(nnx.Module):
    """Computes out(norm(scan(conv(x), dt, B, C) * silu(gate))), where gate, x, B, C and dt are
    parts of one projection, and x, B and C are convolved and activated.

    `name` is the prefix of its tensors, such as "model.layers.0.mamba".
    """

    def __init__(self, name: str, config: MambaConfig) -> None:
        self.config = config
        hidden, inner, channels = config.hidden_size, config.inner, config.channels
        wide, tall = (inner + channels + config.heads, hidden), (hidden, inner)
        first, last = f"{name}.in_proj", f"{name}.out_proj"
        self.inputs = parameter((None, None), wide, tensors.whole(f"{first}.weight", wide), 1)
        self.out = parameter((None, None), tall, tensors.whole(f"{last}.weight", tall), 1)
        self.inputs_bias = vector(f"{first}.bias", wide[0]) if config.biases.inputs else None
        self.out_bias = vector(f"{last}.bias", hidden) if config.biases.out else None
        taps = (channels, config.taps)
        self.taps = parameter((None, None), taps, tensors.taps(f"{name}.conv1d.weight", taps))
        self.taps_bias = vector(f"{name}.conv1d.bias", channels) if config.biases.conv else None
        self.dt_bias, self.log_decay, self.skip = (
            parameter(
                (None,),
                (config.heads,),
                tensors.whole(f"{name}.{one}", (config.heads,)),
                dtype="float32",
            )
            for one in ("dt_bias", "A_log", "D")
        )
        self.scale = None if config.norm is None else vector(f"{name}.norm.weight", inner)

    def __call__(
        self, x: jax.Array, cache: CacheArrays, batch: AttnBatch, ops: Ops
    ) -> tuple[jax.Array, CacheArrays]:
        """Return (out [T, hidden], the layer's state after the tokens) for x [T, hidden]."""
        config = self.config
        tokens, factors = x.shape[0], config.factors
        if factors.before != 1:
            x = x * jnp.asarray(factors.before, x.dtype)
        found = ops[LINEAR](x, self.inputs.get_value(), value_of(self.inputs_bias))
        gate, mixed, dt = self._parts(found)
        taps, taps_bias = self.taps.get_value(), value_of(self.taps_bias)
        mixed, inputs = ops[SHORT_CONV](mixed, taps, taps_bias, {INPUTS: cache[INPUTS]}, batch)
        mixed = ACTIVATIONS[config.activation](mixed.astype(jnp.float32)).astype(x.dtype)
        into, b, c = jnp.split(mixed, (config.inner, config.inner + config.projected), axis=-1)
        into = into.reshape(tokens, config.heads, config.head_dim)
        b, c = (one.reshape(tokens, config.groups, config.state_size) for one in (b, c))
        dt = jax.nn.softplus(dt.astype(jnp.float32) + self.dt_bias.get_value())
        dt = jnp.clip(dt, *config.step_limits)
        decay, skip = -jnp.exp(self.log_decay.get_value()), self.skip.get_value()
        scanned, scan = ops[SSD_SCAN](into, dt, decay, b, c, skip, {SCAN: cache[SCAN]}, batch)
        gated = self._gated(scanned.reshape(tokens, config.inner), gate)
        out = ops[LINEAR](gated, self.out.get_value(), value_of(self.out_bias))
        if factors.after != 1:
            out = out * jnp.asarray(factors.after, out.dtype)
        return out, {**inputs, **scan}

    def _parts(self, found: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the gate, the inputs of the convolution, and dt, of what was projected."""
        config = self.config
        inner, projected = config.inner, config.projected
        if any(one != 1 for one in config.factors.parts):
            sizes = (inner, inner, projected, projected, config.heads)
            found = found * jnp.asarray(np.repeat(config.factors.parts, sizes), found.dtype)
        gate, mixed, dt = jnp.split(found, (inner, inner + config.channels), axis=-1)
        return gate, mixed, dt

    def _gated(self, scanned: jax.Array, gate: jax.Array) -> jax.Array:
        """Return the outputs of the scan [T, inner], gated and normed in f32, in their dtype."""
        norm, wide = self.config.norm, scanned.astype(jnp.float32)
        gate = jax.nn.silu(gate.astype(jnp.float32))
        if norm is None or not norm.is_first:
            wide = wide * gate
        if norm is not None and self.scale is not None:
            parts = wide.reshape(wide.shape[0], norm.groups, -1)
            mean = jnp.square(parts).mean(axis=-1, keepdims=True)
            parts = parts * jax.lax.rsqrt(mean + norm.eps)
            wide = parts.reshape(wide.shape) * self.scale.get_value().astype(jnp.float32)
            if norm.is_first:
                wide = wide * gate
        return wide.astype(scanned.dtype)


@dataclasses.dataclass(frozen=True)
class BesideConfig:
    """The cache groups of attention and of the layer beside it, and the dtype of computation."""

    cache_group: tuple[str, str]
    dtype: str


class AttentionBeside(nnx.Module):
    """The sum of attention and a Mamba-2 layer, which read the same. What attention reads, and its
    result, are multiplied by constants.
    """

    def __init__(self, attention: Attention, mamba: Mamba, factors: tuple[float, float]) -> None:
        self.attention = attention
        self.mamba = mamba
        self.factors = factors
        groups = (attention.config.cache_group, mamba.config.cache_group)
        self.config = BesideConfig(groups, attention.config.dtype)

    @property
    def layer(self) -> int:
        """The number of the layer, which kernels of attention may ask for."""
        return self.attention.layer

    @layer.setter
    def layer(self, number: int) -> None:
        self.attention.layer = number

    def __call__(
        self,
        x: jax.Array,
        cache: tuple[CacheArrays, CacheArrays],
        batch: tuple[AttnBatch, AttnBatch],
        ops: Ops,
    ) -> tuple[jax.Array, tuple[CacheArrays, CacheArrays]]:
        """Return (out [T, hidden], cache and state with the new tokens) for x [T, hidden]."""
        before, after = (jnp.asarray(one, x.dtype) for one in self.factors)
        scanned, state = self.mamba(x, cache[1], batch[1], ops)
        mixed, kept = self.attention(x * before, cache[0], batch[0], ops)
        return mixed * after + scanned, (kept, state)
