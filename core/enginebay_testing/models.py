"""Conformance suite for model families: consistent declarations, independent rows, and equal
results for every way of running a sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from enginebay.config import DEFAULT_AXIS_RULES
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.engine import AttentionProblem
from enginebay.contracts.model import Model, ModelFamily, ModelInfo
from enginebay.errors import ConfigError
from enginebay.ops.caps import Caps
from enginebay.ops.spec import Bucket
from enginebay_testing.model_harness import Chunk, MakeOps, ModelHarness, place_over, random_weights
from enginebay_testing.verdicts import Check

NUM_ROWS = 4
CAPACITY = 64
MIXED = Bucket(64, NUM_ROWS, 1, 64, CAPACITY, "mixed")
DECODE = Bucket(NUM_ROWS, NUM_ROWS, 1, 1, CAPACITY, "decode")
TOLERANCE = 1e-5
"""Allowed difference of f32 logits, relative to the largest: the order of sums depends on shapes
and shardings.
"""


def tiny_config(family: ModelFamily) -> dict[str, Any]:
    """Return a small config.json with the usual field names of Hugging Face; a family may need more
    fields, see model_checks.
    """
    return {
        "architectures": [family.architectures[0]],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 12,
        "full_attn_idxs": [1],
        "rotary_dim": 4,
        "attention_types": [[["global", "local"], 1]],
        "num_dense_layers": 1,
        "layers_block_type": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_ssm": 64,
    }


def read_model_config(path: str) -> dict[str, Any]:
    """Read the config.json of a small model; ConfigError if the file is unreadable or not an
    object.
    """
    what = f"configuration of a model {path}"
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what}: {error}", "a JSON file", "Pass its path with --config."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{what} is not an object", "the fields of a config.json", "Fix the file."
        )
    return values


def model_checks(
    family: ModelFamily,
    make_ops: MakeOps,
    *,
    config: Mapping[str, Any] | None = None,
    num_devices: int = 1,
) -> list[Check]:
    """Return every check of a family.

    `make_ops` binds the ops to compute with. `config` is a tiny config.json of the family (default:
    tiny_config(family)), with a vocabulary of at least 96 tokens and a context of at least 64.
    Shardings over 2 and 4 devices are checked if there are `num_devices`.
    """
    lab = _FamilyUnderTest(family, dict(config or tiny_config(family)), make_ops)
    checks: list[tuple[str, Callable[[_FamilyUnderTest], None]]] = [
        ("declarations_agree", _declarations_agree),
        ("parts_of_a_weight_are_the_whole_ones", _parts_of_a_weight_are_the_whole_ones),
        ("shapes_and_dtypes", _shapes_and_dtypes),
        ("padding_changes_nothing", _padding_changes_nothing),
        ("rows_are_independent", _rows_are_independent),
        ("chunked_prefill_equals_whole", _chunked_prefill_equals_whole),
        ("decode_equals_prefill_of_everything", _decode_equals_prefill_of_everything),
    ]
    checks += [
        (f"{count}_devices_equal_one", functools.partial(_devices_equal_one, num_devices=count))
        for count in (2, 4)
        if count <= num_devices
    ]
    return [(name, functools.partial(check, lab)) for name, check in checks]


def harness_steps(
    info: ModelInfo,
    layout: str,
    layout_type: type[KVLayout],
    free_padding_rows: int,
    decode: Caps,
) -> list[AttentionProblem]:
    """Return the attention problems of the checks; each row has one page."""
    layouts = {
        group: spec.make_layout(layout_type, NUM_ROWS, CAPACITY)
        for group, spec in info.attention.items()
    }
    return [
        (bucket, layouts) for bucket in (DECODE, MIXED, dataclasses.replace(MIXED, mode="prefill"))
    ]


class _FamilyUnderTest:
    """The family under test, and the one-device harness that most checks share."""

    def __init__(self, family: ModelFamily, config: dict[str, Any], make_ops: MakeOps) -> None:
        self.family = family
        self.config = config
        self._make_ops = make_ops
        self._harness: ModelHarness | None = None

    def model(self, num_shards: int = 1, dtype: str = "float32") -> Model:
        """Return the family's model of the tiny configuration."""
        return self.family.build(self.config, dtype=dtype, num_shards=num_shards)

    def new_harness(self, num_devices: int = 1, dtype: str = "float32") -> ModelHarness:
        """Return a harness over some devices; the random weights are always the same."""
        placement = place_over(num_devices)
        model = self.model(placement.num_shards("kv_heads"), dtype)
        weights = random_weights(model, placement, dtype=dtype)
        return ModelHarness(
            model, weights, self._make_ops, placement, num_rows=NUM_ROWS, capacity=CAPACITY
        )

    def harness(self) -> ModelHarness:
        """Return the shared harness with an empty cache."""
        self._harness = self._harness or self.new_harness()
        self._harness.cache = self._harness.empty_cache()
        return self._harness

    def text(self, length: int, seed: int) -> list[int]:
        """Return random token ids."""
        ids = np.random.default_rng(seed).integers(0, self.model().info.vocab_size, length)
        return [int(i) for i in ids]


def _declarations_agree(lab: _FamilyUnderTest) -> None:
    model = lab.model()
    specs, sources, info = model.weight_specs(), model.tensor_sources(), model.info
    assert specs, "the model has no weights"
    assert specs.keys() == sources.keys(), (
        f"weights and sources differ in {specs.keys() ^ sources.keys()}"
    )
    for path, spec in specs.items():
        assert len(spec.shape) == len(spec.axes), (
            f"{path}: shape {spec.shape} does not match axes {spec.axes}"
        )
        unknown = {axis for axis in spec.axes if axis} - set(DEFAULT_AXIS_RULES)
        assert not unknown, f"{path}: logical axes {unknown} are unknown"
        assert len(sources[path].names) == len(sources[path].shapes), (
            f"{path}: the number of shapes is not the number of tensors"
        )
        stored = sum(int(np.prod(shape)) for shape in sources[path].shapes)
        assert stored == np.prod(spec.shape), (
            f"{path}: shape {spec.shape}, but {stored} stored values"
        )
    names = [name for source in sources.values() for name in source.names]
    assert len(names) == len(set(names)), "two weights read the same checkpoint tensor"
    assert [g.name for g in info.groups] == list(info.attention), (
        "cache groups and attention specs have different names"
    )
    for group in info.groups:
        kind = info.attention[group.name]
        facts = (kind.num_kv_heads, kind.head_dim, kind.v_head_dim or kind.head_dim, kind.window)
        assert facts == (group.num_kv_heads, group.head_dim, group.v_head_dim, group.window), (
            f"group {group.name}"
        )
    assert info.family == lab.family.name, "info.family differs from the family's name"


def _parts_of_a_weight_are_the_whole_ones(lab: _FamilyUnderTest) -> None:
    for num_shards in (1, 4):
        model = lab.model(num_shards)
        for path, spec in model.weight_specs().items():
            source = model.tensor_sources()[path]
            starts = np.cumsum([0, *(np.prod(shape, dtype=int) for shape in source.shapes)])
            tensors = [
                np.arange(s, s + np.prod(shape)).reshape(shape)
                for s, shape in zip(starts, source.shapes, strict=False)
            ]
            everything = tuple(slice(None) for _ in spec.shape)
            whole = source.build(tensors, everything)
            assert whole.shape == spec.shape, f"{path}: built {whole.shape}, declared {spec.shape}"
            # Loaders may shard any axis with a name, and read any weight in pieces along its first
            # axis.
            for dim in {0, *(i for i, axis in enumerate(spec.axes) if axis)}:
                for piece in (slice(0, 1), slice(spec.shape[dim] // 2, spec.shape[dim])):
                    index = (*everything[:dim], piece, *everything[dim + 1 :])
                    part = source.build(tensors, index)
                    assert np.array_equal(part, whole[index]), (
                        f"{path}: part {index} differs from this slice of the whole weight"
                    )


def _shapes_and_dtypes(lab: _FamilyUnderTest) -> None:
    for dtype in ("float32", "bfloat16"):
        harness = lab.new_harness(dtype=dtype)
        info = harness.model.info
        hidden, logits, cache = harness.shapes(MIXED)
        wanted = ((MIXED.tokens, info.hidden_size), dtype)
        assert (hidden.shape, hidden.dtype.name) == wanted, (
            f"{dtype}: hidden states are {hidden.dtype} {hidden.shape}"
        )
        wanted = ((MIXED.tokens, info.vocab_size), "float32")
        assert (logits.shape, logits.dtype.name) == wanted, (
            f"{dtype}: logits are {logits.dtype} {logits.shape}"
        )
        before, after = (
            jax.tree.map(lambda a: (a.shape, a.dtype), dict(c)) for c in (harness.cache, cache)
        )
        assert before == after, f"{dtype}: the step changed the structure of the cache"


def _padding_changes_nothing(lab: _FamilyUnderTest) -> None:
    harness, text = lab.harness(), lab.text(40, 2)
    exact = Bucket(40, 1, 1, 40, CAPACITY, "mixed")
    unpadded = harness.run([Chunk(1, 0, text)], exact)[0]
    for pad_id in (0, 1):
        padded = harness.run([Chunk(1, 0, text)], MIXED, pad_id=pad_id)[0]
        _close(padded, unpadded, f"padded with token {pad_id}")


def _rows_are_independent(lab: _FamilyUnderTest) -> None:
    harness = lab.harness()
    chunks = [
        Chunk(page, 0, lab.text(length, length)) for page, length in ((2, 21), (0, 1), (3, 30))
    ]
    together = harness.run(chunks, MIXED)
    for chunk, batched in zip(chunks, together, strict=True):
        alone = lab.harness().run([chunk], MIXED)[0]
        _close(batched, alone, f"a row of {len(chunk.token_ids)} in a batch and alone")


def _chunked_prefill_equals_whole(lab: _FamilyUnderTest) -> None:
    text = lab.text(40, 3)
    whole = lab.harness().run([Chunk(1, 0, text)], MIXED)[0]
    for size in (7, 16, 39):
        harness = lab.harness()
        parts = [
            harness.run([Chunk(1, at, text[at : at + size])], MIXED)[0] for at in range(0, 40, size)
        ]
        _close(np.concatenate(parts), whole, f"chunks of {size}")


def _decode_equals_prefill_of_everything(lab: _FamilyUnderTest) -> None:
    texts = [lab.text(30, 4), lab.text(9, 5)]
    whole = lab.harness().run([Chunk(page, 0, text) for page, text in enumerate(texts)], MIXED)
    harness = lab.harness()
    harness.run([Chunk(page, 0, text[:-6]) for page, text in enumerate(texts)], MIXED)
    for step in range(-6, 0):
        chunks = [Chunk(page, len(text) + step, [text[step]]) for page, text in enumerate(texts)]
        for page, logits in enumerate(harness.run(chunks, DECODE)):
            _close(logits[0], whole[page][step], f"row {page}, {-step} tokens before its end")


def _devices_equal_one(lab: _FamilyUnderTest, num_devices: int) -> None:
    text = lab.text(20, 6)
    harnesses = [lab.harness(), lab.new_harness(num_devices)]
    prefills = [h.run([Chunk(2, 0, text), Chunk(1, 0, text[:7])], MIXED) for h in harnesses]
    for row in (0, 1):
        _close(prefills[1][row], prefills[0][row], f"prefill of row {row} on {num_devices} devices")
    one, many = (h.run([Chunk(2, 20, [3]), Chunk(1, 7, [5])], DECODE) for h in harnesses)
    for row in (0, 1):
        _close(many[row], one[row], f"decoding row {row} on {num_devices} devices")
    arrays = jax.tree.leaves((dict(harnesses[1].weights), dict(harnesses[1].cache)))
    assert any(not a.is_fully_replicated for a in arrays if isinstance(a, jnp.ndarray)), (
        "no weight is sharded"
    )


def _close(got: np.ndarray, wanted: np.ndarray, case: str) -> None:
    scale = max(1.0, float(np.abs(wanted).max()))
    error = float(np.abs(got - wanted).max()) / scale
    assert error <= TOLERANCE, (
        f"{case}: logits differ by {error:.2e} of the largest, allowed {TOLERANCE}"
    )
