"""The Apertus family: Llama with a plain MLP of xIELU, an activation with learned numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.contracts.model import Model, ModelFamily, TensorSource
from enginebay.ops.bound import Ops
from enginebay.ops.linear import LINEAR
from enginebay_models.blocks import PlainMlp, parameter, plain_mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.fields import flag, refuse_others
from enginebay_models.hf_config import read_decoder
from enginebay_models.tensors import Index

_THETA = 12000000.0
_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 65536, "rope_theta": _THETA}
_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": _THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The rotary rule of a config.json that has none."""
_XIELU = "xielu"
_NAMES = {
    ".input_layernorm.": ".attention_layernorm.",
    ".post_attention_layernorm.": ".feedforward_layernorm.",
}
"""(name of a tensor in other families, name in this checkpoint) pairs."""


class XieluMlp(PlainMlp):
    """The MLP down(xielu(up(x))), whose xIELU has four numbers of the checkpoint."""

    def __init__(self, name: str, sizes: tuple[int, int]) -> None:
        """`name` is the prefix of its tensors; `sizes`: hidden size, intermediate size."""
        super().__init__(f"{name}.up_proj", f"{name}.down_proj", sizes, activation=_XIELU)
        names = tuple(f"{name}.act_fn.{one}" for one in ("alpha_p", "alpha_n", "beta", "eps"))
        source = TensorSource(names, ((1,), (1,), (), ()), _joined)
        self.numbers = parameter((None,), (4,), source, dtype="float32")

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        up = ops[LINEAR](x, self.up.get_value()).astype(jnp.float32)
        opened = xielu(up, self.numbers.get_value()).astype(x.dtype)
        return ops[LINEAR](opened, self.down.get_value())


def _joined(readers: Sequence[np.ndarray], index: Index) -> np.ndarray:
    """Join tensors of one number each."""
    return np.concatenate([reader.reshape(1) for reader in readers])[index]


def xielu(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return beta x + p x^2 above 0, and beta x + n (exp(x) - 1 - x) elsewhere, for x f32 [...].

    The numbers are alpha_p, alpha_n, beta and eps, f32 [4]; p is softplus(alpha_p), and n is
    softplus(alpha_n) + beta. exp(x) is that of eps where x is greater.
    """
    alpha_p, alpha_n, beta, eps = numbers
    above = jax.nn.softplus(alpha_p) * jnp.square(x)
    below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x, eps)) - x)
    return jnp.where(x > 0, above, below) + beta * x


class ApertusFamily(ModelFamily):
    """Full attention; RMS norms of queries and keys; an MLP without a gate, with xIELU unless
    `hidden_act` names another activation. Biases: `attention_bias`.
    """

    name = "apertus"
    architectures = ("ApertusForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        refuse_others(config, {"mlp_bias": False, "post_norm": False, "qk_norm": True})
        shared = _DEFAULTS | dict(config)
        if shared.get("rope_parameters") is None and not shared.get("rope_scaling"):
            shared["rope_parameters"] = _ROPE
        is_xielu = config.get("hidden_act", _XIELU) == _XIELU
        if is_xielu:
            shared.pop("hidden_act", None)
        decoder = read_decoder(shared, max_model_len=max_model_len, eps=("rms_norm_eps", 1e-5))
        if is_xielu:
            decoder = dataclasses.replace(decoder, activation=_XIELU)
        bias = flag(config, "attention_bias", default=False)
        variant = Variant(
            windows=(None,) * decoder.num_layers,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
            mlp=_xielu_mlp if is_xielu else plain_mlp,
            names=_NAMES,
        )
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


def _xielu_mlp(name: str, hidden_size: int, intermediate_size: int, **_: Any) -> XieluMlp:
    """Return an MLP for the arguments of `Mlp`; no checkpoint has biases here."""
    return XieluMlp(name, (hidden_size, intermediate_size))


family = ApertusFamily()
