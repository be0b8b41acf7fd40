"""The DeepSeek-V2 family: attention over a latent cache, and MLPs of routed and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginebay.contracts.cache import CacheGroup
from enginebay.contracts.model import Model, ModelFamily, ModelInfo
from enginebay.errors import ConfigError, explain
from enginebay.ops.rotary import RopeSpec, yarn_growth
from enginebay.ops.spec import AttnSpec
from enginebay_models.blocks import Decoder, DecoderLayer, Mlp, RmsNorm
from enginebay_models.decoder import NnxModel
from enginebay_models.experts import Experts, ExpertsConfig, SharedExperts
from enginebay_models.fields import bad_field, flag, number, positive
from enginebay_models.hf_config import MAX_LAYERS, DecoderConfig, read_decoder
from enginebay_models.latent import LatentAttention, LatentConfig

LATENT = "latent"
"""Name of the cache group of the compressed vectors."""

_RANK, _Q_RANK, _PLAIN_DIM, _ROPE_DIM, _OUT_DIM = 512, 1536, 128, 64, 128
_EXPERTS, _SHARED, _WIDTH = 64, 2, 1407


class DeepseekV2Family(ModelFamily):
    """Latent attention (MLA), and MLPs of routed and shared experts.

    The router takes the best experts ("greedy"), or the best experts of the best groups
    ("group_limited_greedy"). The softmax scores of the chosen experts are not normalised to sum 1.
    Biases: `attention_bias`, `mlp_bias`.
    """

    name = "deepseek_v2"
    architectures = ("DeepseekV2ForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        num_layers = positive(config, "num_hidden_layers", most=MAX_LAYERS)
        experts = _read_experts(config, num_layers)
        return build_latent(
            self.name, config, experts, dtype=dtype, num_shards=num_shards, max_len=max_model_len
        )


def build_latent(
    family: str,
    config: Mapping[str, Any],
    experts: ExpertsConfig,
    *,
    dtype: str,
    num_shards: int,
    max_len: int | None,
    num_shared: int = _SHARED,
    is_interleaved: bool = True,
    unused: tuple[str, ...] = (),
) -> Model:
    """Return a model with latent attention. `num_shared`: the default number of shared experts;
    `is_interleaved`: the features of a rotary pair lie beside each other in checkpoints;
    `unused` is ModelInfo.unused_tensors.
    """
    # Rotary positions apply to the rotary features of a head only.
    rope_dim = positive(config, "qk_rope_head_dim", _ROPE_DIM)
    one_head = {**config, "head_dim": rope_dim, "num_key_value_heads": None}
    decoder = read_decoder(one_head, max_model_len=max_len)
    attention = _read_latent(config, decoder, dtype, is_interleaved=is_interleaved)
    if decoder.num_q_heads % num_shards:
        given = f"{num_shards} shards for {decoder.num_q_heads} query heads"
        allowed = f"a divisor of {decoder.num_q_heads}"
        raise ConfigError(
            explain(given, allowed, "Change the mesh, or map kv_heads to another axis.")
        )
    shared = positive(config, "n_shared_experts", num_shared)
    bias = flag(config, "mlp_bias", default=False)

    def mlp(index: int, name: str) -> Mlp | SharedExperts:
        def plain(name: str, width: int) -> Mlp:
            hidden = decoder.hidden_size
            return Mlp(name, hidden, width, bias=bias, activation=decoder.activation)

        if index in experts.plain_layers:
            return plain(name, decoder.intermediate_size)
        both = plain(f"{name}.shared_experts", shared * experts.width)
        return SharedExperts(Experts(name, decoder, experts), both)

    def layer(index: int) -> DecoderLayer:
        name = f"model.layers.{index}"
        before, between = (
            RmsNorm(f"{name}.{one}_layernorm", decoder.hidden_size, decoder.norm_eps)
            for one in ("input", "post_attention")
        )
        latent = LatentAttention(f"{name}.self_attn", attention, index)
        return DecoderLayer(latent, mlp(index, f"{name}.mlp"), before, between)

    module = Decoder(
        [layer(i) for i in range(decoder.num_layers)],
        RmsNorm("model.norm", decoder.hidden_size, decoder.norm_eps),
        (decoder.vocab_size, decoder.hidden_size),
        tied=decoder.tied,
    )
    return NnxModel(_info(family, decoder, attention, experts, unused), module)


def _info(
    family: str,
    decoder: DecoderConfig,
    attention: LatentConfig,
    experts: ExpertsConfig,
    unused: tuple[str, ...],
) -> ModelInfo:
    spec = attention.spec
    return ModelInfo(
        family,
        decoder.vocab_size,
        decoder.hidden_size,
        decoder.max_model_len,
        (CacheGroup(LATENT, decoder.num_layers, 1, spec.head_dim, spec.v_dim),),
        {LATENT: spec},
        auto_max_model_len=decoder.auto_max_model_len,
        constants=repr((attention, decoder.activation, decoder.norm_eps, experts)),
        unused_tensors=unused,
    )


def _read_latent(
    config: Mapping[str, Any], decoder: DecoderConfig, dtype: str, *, is_interleaved: bool
) -> LatentConfig:
    rank = positive(config, "kv_lora_rank", _RANK)
    plain_dim = positive(config, "qk_nope_head_dim", _PLAIN_DIM)
    has_q_rank = config.get("q_lora_rank", _Q_RANK) is not None
    spec = AttnSpec(
        decoder.num_q_heads,
        1,
        rank + decoder.head_dim,
        v_head_dim=rank,
        scale=_scale(plain_dim + decoder.head_dim, decoder.rope),
        q_dtype=dtype,
        kv_dtype=dtype,
        v_is_k_prefix=True,
    )
    return LatentConfig(
        hidden_size=decoder.hidden_size,
        spec=spec,
        rope=decoder.rope,
        plain_dim=plain_dim,
        out_dim=positive(config, "v_head_dim", _OUT_DIM),
        q_rank=positive(config, "q_lora_rank", _Q_RANK) if has_q_rank else None,
        has_bias=flag(config, "attention_bias", default=False),
        is_interleaved=is_interleaved,
        cache_group=LATENT,
    )


def _scale(head_dim: int, rope: RopeSpec) -> float:
    """Return the factor on scores; it contains the square of yarn's factor for mscale_all_dim."""
    growth = 1.0
    if rope.scaling == "yarn" and rope.mscale_all_dim:
        growth = yarn_growth(rope.factor, rope.mscale_all_dim)
    return float(head_dim**-0.5 * growth**2)


def _read_experts(config: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Read the fields of the experts; CheckpointError names a wrong one."""
    for name, only in (("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        if config.get(name, only) != only:
            raise bad_field(name, config[name], f"{only}, or absent")
    if flag(config, "norm_topk_prob", default=False):
        raise bad_field("norm_topk_prob", value=True, allowed="false or absent")
    count = positive(config, "n_routed_experts", _EXPERTS)
    first = config.get("first_k_dense_replace", 0)
    if type(first) is not int or first < 0:
        raise bad_field("first_k_dense_replace", first, "a whole number of layers")
    methods = ("greedy", "group_limited_greedy")
    method = config.get("topk_method", methods[0])
    if method not in methods:
        raise bad_field("topk_method", method, " or ".join(methods))
    groups = chosen_groups = 1
    if method != methods[0]:
        groups = positive(config, "n_group", most=count)
        chosen_groups = positive(config, "topk_group", most=groups)
        if count % groups:
            raise bad_field("n_group", groups, f"a divisor of n_routed_experts = {count}")
    return ExpertsConfig(
        count,
        positive(config, "num_experts_per_tok", most=count // groups * chosen_groups),
        positive(config, "moe_intermediate_size", _WIDTH),
        is_normed=False,
        plain_layers=frozenset(range(min(first, num_layers))),
        num_groups=groups,
        num_chosen_groups=chosen_groups,
        scale=number(config, "routed_scaling_factor", 1.0),
    )


family = DeepseekV2Family()
