"""Builds the core's Model from a family's description of its decoder. The flax module has no
arrays; weights are merged into it when a step is traced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from enginebay.contracts.cache import CacheArrays, CacheGroup
from enginebay.contracts.cache_state import StateGroup
from enginebay.contracts.model import (
    Embeddings,
    Model,
    ModelCache,
    ModelInfo,
    TensorSource,
    Weights,
)
from enginebay.errors import ConfigError, explain
from enginebay.ops.bound import LAYER_CALL, Ops
from enginebay.ops.linear import EMBEDDING, LINEAR
from enginebay.ops.rotary import RopeSpec
from enginebay.ops.spec import AttnSpec
from enginebay.weights import WeightSpec
from enginebay_models.alibi import SLOPES
from enginebay_models.blocks import (
    IN_TURN,
    PLAIN_INPUTS,
    PLAIN_LOGITS,
    SINKS,
    Attention,
    AttentionLayerConfig,
    Batches,
    Decoder,
    DecoderLayer,
    InputRule,
    LayerNorm,
    LogitRule,
    Mlp,
    NoNorm,
    QueryScale,
    Residual,
    RmsNorm,
    StreamNorm,
    value_of,
)
from enginebay_models.hf_config import DecoderConfig
from enginebay_models.tensors import APART, QkvRows

FULL, WINDOW = "full", "window"


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A module that replaces attention in some `layers`.

    `make` returns it for the prefix of a layer in the checkpoint, and `group` declares its states.
    With `join` the layers have attention too: it returns one module of attention and the mixer,
    whose `cache_group` is a tuple. The repr is part of ModelInfo.constants and must not differ
    between processes, so functions are left out of it; `config` names the constants of the module.
    """

    make: Callable[[str], Any] = dataclasses.field(repr=False)
    layers: tuple[int, ...]
    group: StateGroup
    join: Callable[[Attention, Any], Any] | None = dataclasses.field(default=None, repr=False)
    config: Any = None


@dataclasses.dataclass(frozen=True)
class Variant:
    """The differences between decoder families.

    `windows` has one entry per layer, None for full attention; all windows are equal.
    `unrotated_layers` have no rotary positions, and layers with a window may have their own. With
    `alibi` no layer has them, and attention has slopes by distance; with `sinks` it has sinks.
    AttentionLayerConfig, AttnSpec, RmsNorm, Decoder and DecoderLayer describe fields of their own.
    `layer_norms`: norms are LayerNorms, with weights if `norm_weight`, and biases if `norm_bias`.
    `qkv_clip` is AttentionLayerConfig.clip. `out_norms` are the norms of
    the results of attention and MLP, and `in_norms` those before; of a parallel layer, `mlp_norm`
    is one of the MLP alone. With `stream_norms` both follow what was added (StreamNorm).
    `final_norm`: there is a norm before the head. `mlp` makes the MLP of a layer; it has the
    signature of `Mlp`, and gets `mlp_config` if that is given. With `mlp_layers`, layers have one
    block each: these an MLP, the others attention or the mixer. `names` replaces parts of the names
    of tensors, in order; `unused` is ModelInfo.unused_tensors.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qkv_rows: QkvRows = APART
    query_scale: QueryScale | None = None
    qk_norm: bool = False
    qk_norm_joint: bool = False
    qk_norm_last: bool = False
    qkv_clip: float | None = None
    alibi: bool = False
    sinks: bool = False
    window_rope: RopeSpec | None = None
    unrotated_layers: frozenset[int] = frozenset()
    softmax_scale: float | None = None
    softcap: float | None = None
    in_norms: bool = True
    out_norms: bool = False
    mlp_norm: bool = True
    stream_norms: bool = False
    final_norm: bool = True
    layer_norms: bool = False
    norm_weight: bool = True
    norm_bias: bool = False
    norm_offset: float = 0.0
    residual: Residual = IN_TURN
    inputs: InputRule = PLAIN_INPUTS
    logits: LogitRule = PLAIN_LOGITS
    mlp: Callable[..., Any] = dataclasses.field(default=Mlp, repr=False)
    mlp_config: Any = None
    mixer: Mixer | None = None
    mlp_layers: frozenset[int] | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()


def build_decoder(
    family: str, config: DecoderConfig, variant: Variant, *, dtype: str, num_shards: int
) -> Model:
    """Return the model of a pre-norm decoder with grouped-query attention and a gated MLP.

    Raises ConfigError when the KV heads cannot be split over, or repeated for, `num_shards` shards.
    """
    repeats = kv_head_repeats(config, num_shards)
    replaced = variant.mixer is not None and variant.mixer.join is None
    mixed = variant.mixer.layers if variant.mixer is not None and replaced else ()
    without = {*mixed, *(variant.mlp_layers or ())}
    windows = [window for i, window in enumerate(variant.windows) if i not in without]
    specs = {
        _group_name(window): AttnSpec(
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads * repeats,
            head_dim=config.head_dim,
            scale=variant.softmax_scale,
            window=window,
            softcap=variant.softcap,
            inputs=(*((SLOPES,) if variant.alibi else ()), *((SINKS,) if variant.sinks else ())),
            q_dtype=dtype,
            kv_dtype=dtype,
        )
        for window in windows
    }
    kinds = {name: _attention(name, spec, config, variant, repeats) for name, spec in specs.items()}
    layers = [
        _layer(i, config, kinds.get(_group_name(window)), variant)
        for i, window in enumerate(variant.windows)
    ]
    module = Decoder(
        layers,
        _last_norm(config, variant),
        (config.vocab_size, config.hidden_size),
        tied=config.tied,
        inputs=variant.inputs,
        logits=variant.logits,
    )
    groups = tuple(
        _cache_group(name, spec, windows.count(spec.window)) for name, spec in specs.items()
    )
    info = ModelInfo(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=variant.inputs.embed_size or config.hidden_size,
        max_model_len=config.max_model_len,
        groups=groups,
        attention=specs,
        kv_head_repeat=repeats,
        auto_max_model_len=config.auto_max_model_len,
        constants=repr((config.rope, config.activation, config.norm_eps, variant)),
        states=() if variant.mixer is None else (variant.mixer.group,),
        unused_tensors=variant.unused,
    )
    return NnxModel(info, module, variant.names)


def _attention(
    name: str, spec: AttnSpec, config: DecoderConfig, variant: Variant, repeats: int
) -> AttentionLayerConfig:
    return AttentionLayerConfig(
        hidden_size=config.hidden_size,
        spec=spec,
        rope=_rope(spec, config, variant),
        cache_group=name,
        repeats=repeats,
        qkv_bias=variant.qkv_bias,
        out_bias=variant.out_bias,
        qk_norm_eps=config.norm_eps if variant.qk_norm else None,
        qk_norm_joint=variant.qk_norm_joint,
        qk_norm_last=variant.qk_norm_last,
        clip=variant.qkv_clip,
        norm_offset=variant.norm_offset,
        qkv_rows=variant.qkv_rows,
        query_scale=variant.query_scale,
    )


def _rope(spec: AttnSpec, config: DecoderConfig, variant: Variant) -> RopeSpec | None:
    if variant.alibi:
        return None
    return variant.window_rope or config.rope if spec.window else config.rope


def kv_head_repeats(config: DecoderConfig, num_shards: int) -> int:
    """Return how often each KV head is repeated, so that each of `num_shards` shards has whole
    heads.
    """
    heads, group = config.num_kv_heads, config.num_q_heads // config.num_kv_heads
    if heads % num_shards == 0:
        return 1
    repeats = num_shards // heads
    if num_shards % heads or group % repeats:
        given = f"{num_shards} shards for {config.num_q_heads} query heads and {heads} KV heads"
        allowed = f"a divisor of {heads}, or {heads} times a divisor of {group}"
        raise ConfigError(
            explain(given, allowed, "Change the mesh, or map kv_heads to another axis.")
        )
    return repeats


def _group_name(window: int | None) -> str:
    return FULL if window is None else WINDOW


def _cache_group(name: str, spec: AttnSpec, num_layers: int) -> CacheGroup:
    return CacheGroup(
        name, num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim, spec.window
    )


def _layer(
    index: int, config: DecoderConfig, attention: AttentionLayerConfig | None, variant: Variant
) -> DecoderLayer:
    """Return layer `index`: this attention or the variant's mixer, an MLP, or both."""
    name, size = f"model.layers.{index}", config.hidden_size

    def norm(of: str, layer: int = index) -> Any:
        return _norm(f"model.layers.{layer}.{of}_layernorm", config, variant)

    def before(of: str) -> Any:
        if not variant.stream_norms:
            return norm(of) if variant.in_norms else NoNorm()
        if of != "input":
            return StreamNorm(norm("input"))
        return NoNorm() if index == 0 else StreamNorm(norm("post_attention", index - 1))

    def mlp() -> Any:
        return variant.mlp(
            f"{name}.mlp",
            size,
            config.intermediate_size,
            bias=variant.mlp_bias,
            activation=config.activation,
        )

    if variant.mlp_layers is not None and index in variant.mlp_layers:
        return DecoderLayer(None, mlp(), None, before("post_attention"), None, variant.residual)
    mixed, first = _mixed(index, attention, variant), before("input")
    if variant.mlp_layers is not None:
        return DecoderLayer(mixed, None, first, None, None, variant.residual)
    return DecoderLayer(
        mixed,
        mlp(),
        first,
        before("pre_feedforward" if variant.out_norms else "post_attention")
        if variant.mlp_norm
        else None,
        (norm("post_attention"), norm("post_feedforward")) if variant.out_norms else None,
        variant.residual,
    )


def _mixed(index: int, attention: AttentionLayerConfig | None, variant: Variant) -> Any:
    """Return the attention of layer `index`, the variant's mixer in its place, or both joined."""
    name, mixer = f"model.layers.{index}", variant.mixer
    made = None if mixer is None or index not in mixer.layers else mixer.make(name)
    if made is not None and (mixer is None or mixer.join is None):
        return made
    assert attention is not None, "each kind of attention has a configuration"
    if index in variant.unrotated_layers:
        attention = dataclasses.replace(attention, rope=None)
    own = Attention(f"{name}.self_attn", attention, index)
    return own if made is None or mixer is None or mixer.join is None else mixer.join(own, made)


def _last_norm(config: DecoderConfig, variant: Variant) -> Any:
    """Return the norm before the head."""
    if not variant.final_norm:
        return NoNorm()
    last = f"model.layers.{config.num_layers - 1}.post_attention_layernorm"
    return _norm(last if variant.stream_norms else "model.norm", config, variant)


def _norm(name: str, config: DecoderConfig, variant: Variant) -> Any:
    """Return a norm of the residual stream or of a result."""
    size, eps, offset = config.hidden_size, config.norm_eps, variant.norm_offset
    if variant.layer_norms:
        weight, bias = variant.norm_weight, variant.norm_bias
        return LayerNorm(name, size, eps, weight=weight, bias=bias, offset=offset)
    return RmsNorm(name, size, eps, offset)


class NnxModel(Model):
    """A Model that runs a Decoder, which is a flax.nnx module.

    The parameters of the module have the metadata `spec` and `source`. NnxModel splits the module
    into its graph and its weights once. Each trace merges the graph with the flat weights, so a
    compiled step has no nnx objects.
    """

    def __init__(
        self, info: ModelInfo, module: Decoder, names: Mapping[str, str] | None = None
    ) -> None:
        """Split the module; `names` replaces parts of the names of checkpoint tensors."""
        self.info = info
        variables = nnx.to_flat_state(nnx.state(module))
        self._specs: dict[str, WeightSpec] = {}
        self._sources: dict[str, TensorSource] = {}
        for path, variable in variables:
            name, facts = ".".join(map(str, path)), variable.get_metadata()
            self._specs[name] = facts["spec"]
            source = facts["source"]
            for usual, own in (names or {}).items():
                renamed = tuple(one.replace(usual, own) for one in source.names)
                source = dataclasses.replace(source, names=renamed)
            self._sources[name] = source
            variable.set_metadata(source=None)  # layers differ in it, but not in what they compute
        self._graph, state = nnx.split(module)
        self._structure = jax.tree.structure(state)

    def weight_specs(self) -> dict[str, WeightSpec]:
        return dict(self._specs)

    def tensor_sources(self) -> dict[str, TensorSource]:
        return dict(self._sources)

    def hidden(
        self,
        weights: Weights,
        ops: Ops,
        token_ids: jax.Array,
        cache: ModelCache,
        batches: Batches,
        embeds: Embeddings | None = None,
    ) -> tuple[jax.Array, dict[str, tuple[CacheArrays, ...]]]:
        module = self._module(weights)
        x = self.embedded(module, ops, token_ids, batches, embeds)
        branch: jax.Array | None = None
        done: dict[str, list[CacheArrays]] = {group: [] for group in cache}
        run: Callable[..., Any] = functools.partial(DecoderLayer.__call__, ops=ops)
        if ops.shares_layers:  # layers that are alike are traced once, as a function of the module
            # JAX keeps a trace as long as its function, here a partial object of this trace.
            run.__name__ = LAYER_CALL
            run = jax.jit(run)
            for layer in module.layers:
                if layer.attention is not None:
                    layer.attention.layer = 0
        for layer in module.layers:
            named = layer.cache_groups
            groups = (named,) if isinstance(named, str) else named
            held = tuple(cache[group][len(done[group])] for group in groups)
            each = tuple(batches[group] for group in groups)
            if isinstance(named, str):
                x, branch, kept = run(layer, x, branch, held[0], each[0])
                held = (kept,)
            else:
                x, branch, held = run(layer, x, branch, held, each)
            for group, arrays in zip(groups, held, strict=True):
                done[group].append(arrays)
        hidden, _ = module.norm.of_sum(x, branch, ops)
        if module.project_out is not None:
            hidden = ops[LINEAR](hidden, module.project_out.get_value())
        return hidden, {group: tuple(layers) for group, layers in done.items()}

    def embedded(
        self,
        module: Decoder,
        ops: Ops,
        token_ids: jax.Array,
        batches: Batches,
        embeds: Embeddings | None,
    ) -> jax.Array:
        """Return the input [T, hidden] of the first layer: zeros for the padding of the step, which
        products skip.
        """
        x = ops[EMBEDDING](module.embed.get_value(), token_ids).astype(module.dtype)
        if module.inputs.scale is not None:  # not of `embeds`
            x = x * jnp.asarray(module.inputs.scale, x.dtype)
        if embeds is not None:
            x = jnp.where(embeds[0][:, None], embeds[1].astype(x.dtype), x)
        if module.project_in is not None:
            x = ops[LINEAR](x, module.project_in.get_value())
        if module.positions is not None:
            places = next(iter(batches.values())).positions + module.inputs.skipped_rows
            x = x + ops[EMBEDDING](module.positions.get_value(), places).astype(x.dtype)
        if module.embed_norm is not None:
            x = module.embed_norm(x)
        batch = next(iter(batches.values()))
        return jnp.where(batch.seq_ids[:, None] < batch.bucket.seqs, x, jnp.zeros((), x.dtype))

    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        module = self._module(weights)
        head = module.embed if module.lm_head is None else module.lm_head
        bias = value_of(module.head_bias)
        logits = ops[LINEAR](hidden, head.get_value(), bias, out_dtype=jnp.float32)
        return module.logits.applied(logits)

    def _module(self, weights: Weights) -> Any:
        state = jax.tree.unflatten(self._structure, [weights[name] for name in self._specs])
        return nnx.merge(self._graph, state)
