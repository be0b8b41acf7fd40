"""An op that takes the batch of a step gets it wherever a model runs, without the model's help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from enginebay import LLM, SamplingParams
from enginebay.compose.partition import partitioned
from enginebay.compose.quick_cases import CheckSetting, QuickCase
from enginebay.config import DEFAULT_AXIS_RULES
from enginebay.contracts.cache import CacheArrays, CacheGroup
from enginebay.contracts.model import (
    Model,
    ModelCache,
    ModelFamily,
    ModelInfo,
    TensorSource,
    Weights,
)
from enginebay.contracts.placement import make_placement
from enginebay.errors import InputError, UnsupportedError
from enginebay.ops.bound import Ops
from enginebay.ops.op import Op
from enginebay.ops.partition_rules import Partition
from enginebay.ops.spec import AttnBatch, AttnSpec, Bucket, StepBatch
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry
from enginebay.weights import WeightSpec
from enginebay_models.blocks import Mlp
from enginebay_models.decoder import Variant, build_decoder
from enginebay_models.hf_config import read_decoder
from enginebay_runtime.local import runner_of
from enginebay_testing.model_harness import Chunk, ModelHarness, place_over
from enginebay_testing.reference import ReferenceModel
from enginebay_testing.tiny import write_tiny_checkpoint
from enginebay_xla import collectives
from tests.pool import few_sizes

HERE = "tests.unit.test_step_batch"


class PlaceOp(Protocol):
    """x [T, features] -> x times a number that depends on each token's position."""

    def __call__(self, x: jax.Array, *, batch: StepBatch = ...) -> jax.Array: ...


PLACE: Op[PlaceOp] = Op(
    "place", PlaceOp, f"{HERE}:place", f"{HERE}:cases", {"float32": 1e-6}, partition=f"{HERE}:rule"
)


def place(x: jax.Array, *, batch: StepBatch) -> jax.Array:
    return x * jnp.cos(batch.positions.astype(jnp.float32))[:, None]


def without_batch(x: jax.Array) -> jax.Array:
    return x


def cases(setting: CheckSetting) -> Iterator[QuickCase]:
    tokens = np.arange(4, dtype=np.int32)
    inputs = np.ones((4, 2), np.float32), StepBatch(tokens, tokens)
    yield QuickCase("4 tokens", lambda impl, x, batch: {"out": impl(x, batch=batch)}, inputs)


def rule(implementation: Any, x: Any, *, batch: StepBatch) -> Partition:
    def run(shards: Any, x: Any, rows: Any, positions: Any) -> Any:
        return implementation(x, batch=StepBatch(rows, positions))

    inputs = ("tokens features", "tokens", "tokens")
    return Partition(inputs, inputs[:1], run, keywords=("batch",))


class PlacedMlp(Mlp):
    """An MLP whose input depends on the position."""

    def __call__(self, x: jax.Array, ops: Ops) -> jax.Array:
        return super().__call__(ops[PLACE](x), ops)


class PlacedLlama(ModelFamily):
    """Llama with such MLPs."""

    name = "placed_llama"
    architectures = ("PlacedLlamaForCausalLM",)

    def build(
        self,
        config: Mapping[str, Any],
        *,
        dtype: str,
        num_shards: int = 1,
        max_model_len: int | None = None,
    ) -> Model:
        decoder = read_decoder(config, max_model_len=max_model_len)
        variant = Variant(windows=(None,) * decoder.num_layers, mlp=PlacedMlp)
        return build_decoder(self.name, decoder, variant, dtype=dtype, num_shards=num_shards)


FAMILY = PlacedLlama()


class Places(Model):
    """Its logits are each token's row and position."""

    info = ModelInfo(
        "places", 2, 2, 16, (CacheGroup("full", 1, 1, 16, 16),), {"full": AttnSpec(1, 1, 16)}
    )

    def weight_specs(self) -> dict[str, WeightSpec]:
        return {}

    def tensor_sources(self) -> dict[str, TensorSource]:
        return {}

    def hidden(
        self,
        weights: Weights,
        ops: Ops,
        token_ids: jax.Array,
        cache: ModelCache,
        batches: Mapping[str, AttnBatch],
        embeds: Any = None,
    ) -> tuple[jax.Array, dict[str, tuple[CacheArrays, ...]]]:
        return ops[PLACE](token_ids), dict(cache)

    def logits(self, weights: Weights, ops: Ops, hidden: jax.Array) -> jax.Array:
        return hidden


def rows_and_positions(x: jax.Array, *, batch: StepBatch) -> jax.Array:
    return jnp.stack([batch.rows, batch.positions], axis=1).astype(jnp.float32)


def test_a_call_is_given_the_rows_and_positions_of_its_tokens() -> None:
    """A token after a prefix, then the first tokens of another row, then padding."""
    seen = Ops({"place": rows_and_positions})
    harness = ModelHarness(
        Places(), {}, lambda *_: lambda *_: seen, place_over(1), num_rows=2, capacity=16
    )
    chunks = [Chunk(1, 6, [3]), Chunk(0, 0, [1, 4, 1])]
    first, second = harness.run(chunks, Bucket(6, 2, 1, 3, 16, "mixed"))
    assert first.tolist() == [[0, 6]]
    assert second.tolist() == [[1, 0], [1, 1], [1, 2]]


def test_without_a_step_the_call_is_refused() -> None:
    """So it is in Model.logits, whose hidden states may be those of any tokens."""
    with pytest.raises(UnsupportedError, match="op 'place', which takes the step's batch"):
        Ops({"place": place})[PLACE](np.ones((1, 2), np.float32))


def test_a_rule_splits_the_batch_as_its_two_arrays() -> None:
    rules = {**DEFAULT_AXIS_RULES, "features": "tensor"}
    placement = make_placement(jax.devices(), {"tensor": 2}, rules)
    assert placement.mesh is not None
    seen: list[Any] = []

    def watched(x: jax.Array, *, batch: StepBatch) -> jax.Array:
        seen.append((x.shape, batch.rows.shape, batch.positions.shape))
        return place(x, batch=batch)

    reduce = {"all_reduce": collectives.all_reduce}
    split = partitioned(PLACE, watched, reduce, placement)
    x, batch = np.ones((3, 4), np.float32), StepBatch(*np.arange(6).reshape(2, 3))
    whole = NamedSharding(placement.mesh, PartitionSpec(None, "tensor"))
    got = jax.jit(split)(jax.device_put(x, whole), batch=batch)
    expected = np.repeat(np.cos([3.0, 4.0, 5.0])[:, None], 4, axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert seen[-1] == ((3, 2), (3,), (3,))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """With the op, its kernel and the models that call it."""
    named = {"architectures": list(PlacedLlama.architectures)}
    parts = [
        Declaration("op", "place", f"{HERE}:PLACE"),
        Declaration("kernel", "plain", f"{HERE}:place", op="place"),
        Declaration("model", "placed_llama", f"{HERE}:FAMILY", capabilities=named),
    ]
    added = [Entry(d.kind, d.name, "mine", "1", "mine", declaration=d) for d in parts]
    registry = Registry([*load_registry().entries, *added])
    monkeypatch.setattr("enginebay.compose.composition.load_registry", lambda *_: registry)
    return registry


@pytest.mark.long
def test_a_model_in_an_engine_is_given_it_in_every_kind_of_step(
    registry: Registry, tmp_path: Any
) -> None:
    """Chunks of a prompt, a prompt beside another, decoding and drafts give the tokens of a whole
    pass; an implementation without the argument is refused.
    """
    model = str(write_tiny_checkpoint(tmp_path, registry, PlacedLlama.architectures[0]))
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    sizes |= {"dtype": "float32", "decode_steps": 2, "processors": (), "proposer": "ngram"}
    with few_sizes(), LLM(model, engine="oengine", generation_config="none", **sizes) as llm:
        reference = ReferenceModel(llm.plan, runner_of(llm.engine).weights)
        prompts = [[5, 6, 7] * 7, [9, 8, 30]]
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        for out in llm.generate(prompts, params):
            tokens = out.outputs[0].token_ids
            assert reference.first_wrong_token(out.prompt_token_ids, tokens, 0.02) is None
        with pytest.raises(InputError, match="calls are place"):
            llm.override(place=without_batch).__enter__()
