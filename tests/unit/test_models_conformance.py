"""The built-in model families pass the models' conformance suite, and the suite catches what it
promises to catch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from enginebay.contracts.cache import CacheArrays
from enginebay.contracts.model import Model, ModelCache, ModelFamily, Weights
from enginebay.ops.bound import Ops
from enginebay.ops.spec import AttnBatch
from enginebay_models.blocks import Batches
from enginebay_models.decoder import NnxModel
from enginebay_models.llama import family as llama
from enginebay_testing.models import model_checks, tiny_config
from enginebay_testing.verdicts import Check
from tests.parity.ops import plain_ops

# One layer, where one is enough: tests/conformance runs two of each family.
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1},
    "mistral": {"sliding_window": 12, "num_hidden_layers": 1},
    "qwen2": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True, "num_hidden_layers": 1},
}
# What is sharded without these fields is tested by tests/conformance, over 4 devices too.
NUM_DEVICES = {"llama": 2, "mistral": 1, "qwen2": 2, "qwen3": 1}


def checks_of(name: str) -> list[Check]:
    family: ModelFamily = importlib.import_module(f"enginebay_models.{name}").family
    config = tiny_config(family) | OWN_FIELDS[name]
    return model_checks(family, plain_ops, config=config, num_devices=NUM_DEVICES[name])


CHECKS = [(f"{name}-{check}", run) for name in OWN_FIELDS for check, run in checks_of(name)]


@pytest.mark.long
@pytest.mark.parametrize("check", [pytest.param(run, id=name) for name, run in CHECKS])
def test_family_keeps_the_contract(check: Callable[[], None]) -> None:
    check()


class Wrong(ModelFamily):
    """Llama with one thing changed on its way through `hidden`."""

    name = "llama"
    architectures = ("LlamaForCausalLM",)

    def __init__(self, change: Callable[[jax.Array, AttnBatch], jax.Array]) -> None:
        self.change = change

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        model = llama.build(config, dtype=dtype, num_shards=num_shards)
        assert isinstance(model, NnxModel)
        return WrongModel(model, self.change)


class WrongModel(Model):
    def __init__(
        self, inner: NnxModel, change: Callable[[jax.Array, AttnBatch], jax.Array]
    ) -> None:
        self.info, self.inner, self.change = inner.info, inner, change
        self.weight_specs, self.tensor_sources, self.logits = (
            inner.weight_specs,
            inner.tensor_sources,
            inner.logits,
        )

    weight_specs = tensor_sources = logits = None

    def hidden(
        self, weights: Weights, ops: Ops, token_ids: jax.Array, cache: ModelCache, batches: Batches
    ) -> tuple[jax.Array, dict[str, tuple[CacheArrays, ...]]]:
        hidden, new = self.inner.hidden(weights, ops, token_ids, cache, batches)
        return self.change(hidden, batches["full"]), new


def leak_between_rows(hidden: jax.Array, batch: AttnBatch) -> jax.Array:
    real = (batch.seq_ids < batch.bucket.seqs)[:, None]
    return hidden + 0.1 * jnp.where(real, hidden, 0).mean(axis=0)


def look_at_padding(hidden: jax.Array, batch: AttnBatch) -> jax.Array:
    return hidden + 0.1 * hidden.mean(axis=0)


def depend_on_chunk(hidden: jax.Array, batch: AttnBatch) -> jax.Array:
    return hidden * (1 + 0.01 * batch.q_lens[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "failing"),
    [
        (leak_between_rows, "rows_are_independent"),
        (look_at_padding, "padding_changes_nothing"),
        (depend_on_chunk, "chunked_prefill_equals_whole"),
        (depend_on_chunk, "decode_equals_prefill_of_everything"),
    ],
)
def test_suite_catches_a_wrong_model(
    change: Callable[[jax.Array, AttnBatch], jax.Array], failing: str
) -> None:
    family = Wrong(change)
    config = tiny_config(family) | {"num_hidden_layers": 1}
    with pytest.raises(AssertionError, match="differ by"):
        dict(model_checks(family, plain_ops, config=config))[failing]()
