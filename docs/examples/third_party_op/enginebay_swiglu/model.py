"""A model family that calls the op: the decoder of Llama, with one call for the two products of its
MLP and their activation. Its checkpoints are Llama checkpoints with another architecture name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from enginebay.contracts.model import Model, ModelFamily
from enginebay.ops.bound import Ops
from enginebay.ops.linear import LINEAR
from enginebay_models.blocks import Mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.hf_config import read_decoder
from enginebay_swiglu.op import SWIGLU


class SwigluMlp(Mlp):
    """The gated MLP without biases."""

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        """Return [T, hidden] for x [T, hidden]."""
        opened = ops[SWIGLU](x, self.gate.get_value(), self.up.get_value())
        return ops[LINEAR](opened, self.down.get_value())


class SwigluLlamaFamily(ModelFamily):
    """Llama without biases."""

    name = "swiglu_llama"
    architectures = ("SwigluLlamaForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        """Build the model; see enginebay.contracts.model.ModelFamily."""
        decoder = read_decoder(config, max_model_len=max_model_len)
        variant = Variant(windows=(None,) * decoder.num_layers, mlp=SwigluMlp)
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


family = SwigluLlamaFamily()
