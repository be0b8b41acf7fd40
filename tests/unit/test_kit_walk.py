"""Each field that a kernel or a part declares has an axis, a check or a written reason."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from typing import Any

import pytest

from enginebay.contracts.cache import KVLayout
from enginebay.contracts.platform import Platform
from enginebay.contracts.processor import LogitsProcessor
from enginebay.ops.caps import Caps, Env
from enginebay.ops.spec import AttnSpec, Bucket
from enginebay.plugins.hooks import CAPABILITIES
from enginebay.plugins.registry import load_registry
from enginebay_lora.kit import LORA_AXES
from enginebay_testing import suites
from enginebay_testing.attention_axes import (
    DEVICE,
    FEATURES,
    attention_covering_cases,
    claimed_axes,
)
from enginebay_testing.attention_cases import AttentionCase
from enginebay_testing.attention_values import ATTENTION
from enginebay_testing.covering import OpAxes
from enginebay_xla.kit import axes, collectives
from enginebay_xla.kit.quantized import QUANTIZED_LINEAR

REGISTRY = load_registry()
ATTENTION_XLA = REGISTRY.find("kernel", "xla", "attention")
AXES: dict[str, OpAxes] = {
    **{
        each.op: each
        for module in (axes, collectives)
        for each in vars(module).values()
        if isinstance(each, OpAxes)
    },
    "lora": LORA_AXES,
    "attention": ATTENTION,
}

CAPS = {
    "layouts": "layout",
    "modes": "phase",
    "q_dtypes": "q_dtype",
    "kv_dtypes": "storage",
    "inputs": "because they are inputs of one kernel, whose values no case can make up",
    "head_dim": "head_dim",
    "latent_dim": "latent",
    "group": "group",
    "page_size": "page",
    "rows": "rows",
    "context": "context",
    "compact_decode": "page",
    "ragged_decode": "context",
    "platforms": "because a check runs on one platform, whose name it prints",
    "arch": "because the level compile has all architectures of a compiler",
    "features": "because each feature has an axis or a reason of its own",
}
FEATURE_REASONS = {
    "fused_write": "because it says who writes the cache, and every case compares the cache",
    "shard_map": "because the suites of engines and models run on several devices",
    "command_buffer": "because it changes how a GPU starts programs, and no result",
}
PARAMETERS: dict[str, dict[str, str]] = {
    "linear": {"x": "rows", "weight": "outputs", "bias": "bias", "out_dtype": "out_dtype"},
    "grouped_linear": {
        "x": "inputs",
        "weight": "groups",
        "group_sizes": "sizes",
        "out_dtype": "out_dtype",
    },
    "embedding": {"table": "vocab", "ids": "ids"},
    "rms_norm": {"x": "rows", "weight": "weight", "eps": "eps"},
    "add_rms_norm": {"x": "rows", "residual": "size", "weight": "weight", "eps": "eps"},
    "rope": {"x": "heads", "positions": "positions", "spec": "rule"},
    "kv_write": {
        "cache": "page",
        "slots": "slots",
        "k": "kv_heads",
        "v": "latent",
        "layout": "layout",
    },
    "rope_kv_write": {
        "q": "group",
        "k": "kv_heads",
        "v": "head_dim",
        "cache": "page",
        "positions": "positions",
        "slots": "slots",
        "spec": "rule",
        "layout": "layout",
    },
    "sample": {
        "z": "logits",
        "seeds": "because seeds are chosen in every case so that a token at a border wins",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
    },
    "short_conv": {
        "x": "channels",
        "weight": "taps",
        "bias": "bias",
        "state": "lengths",
        "batch": "rows",
    },
    "ssd_scan": {
        "x": "head_dim",
        "dt": "decay",
        "decay": "decay",
        "b": "groups",
        "c": "state_size",
        "skip": "skip",
        "state": "lengths",
        "batch": "rows",
    },
    "lora": {
        "y": "y_dtype",
        "x": "inputs",
        "a": "rank",
        "b": "outputs",
        "places": "used",
        "axis": "out_dims",
        "ends": "parts",
    },
    "all_reduce": {"x": "features", "axes": "mesh"},
    "all_gather": {"x": "features", "axes": "mesh", "dim": "dim"},
    "all_to_all": {"x": "features", "axes": "mesh"},
    "attention": {
        "q": "scores",
        "k": "scores",
        "v": "values",
        "cache": "storage",
        "batch": "rows",
        "spec": "group",
        "inputs": "sinks",
        "rope": "because a kernel never receives it: the call around the kernel rotates first",
    },
}
SUITES: dict[str, dict[str, str]] = {
    "checkpoint": {"models": "because they are names, and checkpoints have no suite"},
    "model": {"architectures": "because they name models, and the cases use one of each family"},
    "sampler": {
        "greedy_only": "result_is_int32_per_row",
        "exact_greedy": "temperature_0_is_first_best",
        "draws": "because it names the op that the suite gives to the sampler",
    },
    "processor": {
        "order": "because it orders several processors, and the suite has one at a time",
        "default": "because it says whether a plan has the processor without being told",
    },
    "scheduler": {"order": "order_is_kept[arrival-rows]"},
    "engine": {
        "logprobs": "logprobs_are_the_models",
        "full_vocab_logprobs": "logprobs_are_the_models",
        "hidden_states": "hidden_states_are_the_models",
        "prompt_embeds": "hidden_states_are_the_models",
        "mixed_steps": "chunk_sizes_do_not_matter",
        "verifies": "because drafts need a proposer, and tests of engines compare with and without",
        "attention_problems": "nothing_compiles_after_warmup",
        "ledger_example": "ledger_keeps_its_contract",
    },
    "command": {
        "without_jax": "because it says what a program imports, and commands have no suite"
    },
    "format": {"reads": "it_reads_what_is_declared"},
    "kernel": {},  # tests/unit/test_kit_coverage.py
}


ATTRIBUTES: dict[str, tuple[type, dict[str, str]]] = {
    "layout": (
        KVLayout,
        {
            "num_kv_heads": "layout[float32-3x4x2x8]",
            "head_dim": "layout[float32-3x4x2x8]",
            "dtype": "layout[bfloat16-3x4x2x8]",
            "v_prefix_dim": "layout[float32-3x4x1x8-v6]",
            "serves_v_prefix": "layout[float32-3x4x1x8-v6]",
            "storage": "layout[float32-3x4x4x40-int8]",
            "storages": "layout[float32-3x4x4x40-int8]",
            "offset_axis": "layout[float32-2x16x3x40]",
        },
    ),
    "platform": (
        Platform,
        {
            "name": "facts_are_sound",
            "default_layout": "defaults_are_served",
            "default_dtype": "facts_are_sound",
            "priority": "because it orders the platforms of a machine, and the suite has one",
            "rows_at_once": "because it changes how fast steps are, and no result",
            "one_prefill_width": "because it changes which steps are compiled, and no result",
            "mixed_steps": "because it is the default of a setting, and engines run with both",
            "runtime_bytes": "because it lowers the default size of a cache, and changes no result",
            "demand_memory": "cache_arrays_are_zeros",
        },
    ),
    "processor": (
        LogitsProcessor,
        {
            "keeps_argmax": "argmax_is_kept_as_declared",
            "reads_tokens": "tokens_are_read_as_declared",
            "evolves": "fields_evolve_as_declared",
        },
    ),
}
"""The attributes that classes of a kind declare, each with the check that reads it, or a reason."""


def is_reason(text: str) -> bool:
    """Return whether a text is a reason in words and not a name."""
    return text.startswith("because ") and len(text.split()) > 5


def hold(entries: Mapping[str, str], fields: set[str], what: str) -> None:
    """Check that a table has an entry for each field, and none for what is no field."""
    assert set(entries) == fields, f"{what}: entries and fields differ in {set(entries) ^ fields}"


def varies(op: str, axis: str) -> bool:
    """Return whether an op has an axis, with several values or those of the kernel."""
    values = AXES[op].values.get(axis)
    return values is not None and len(values) != 1


def test_every_capability_of_attention_has_an_axis_or_a_reason() -> None:
    hold(CAPS, {field.name for field in dataclasses.fields(Caps)}, "Caps")
    for name, axis in CAPS.items():
        assert is_reason(axis) or varies("attention", axis), f"{name}: there is no axis {axis}"


def test_every_feature_of_attention_has_an_axis_or_a_reason() -> None:
    named = re.search(r"features: any of ([\w, ]+)\.", " ".join((Caps.__doc__ or "").split()))
    assert named is not None, "the docstring of Caps lists the features"
    features = set(re.split(r", (?:and )?", named.group(1)))
    hold({**dict.fromkeys(FEATURES.values(), ""), **FEATURE_REASONS}, features, "features")
    assert all(varies("attention", axis) for axis in FEATURES)
    assert all(is_reason(reason) for reason in FEATURE_REASONS.values())


@functools.cache
def attention_cases() -> tuple[AttentionCase, ...]:
    """Return the default cases of the plain kernel, in all its layouts."""
    kernel = REGISTRY.load(ATTENTION_XLA)
    kinds = suites.kernel_layouts(REGISTRY, ATTENTION_XLA, kernel)
    layouts = {kind.__name__: kind for kind in kinds}
    assert claimed_axes(kernel.caps, layouts).values.keys() == ATTENTION.values.keys()
    made = attention_covering_cases(kernel, Env("cpu"), layouts, DEVICE, triples=False)
    return tuple(case for case, _ in made)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(AttnSpec)])
def test_default_cases_differ_in_every_field_of_a_spec(field: str) -> None:
    assert len({getattr(case.spec, field) for case in attention_cases()}) > 1


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Bucket)])
def test_default_cases_differ_in_every_field_of_a_bucket(field: str) -> None:
    assert len({getattr(case.bucket, field) for case in attention_cases()}) > 1


def test_every_parameter_of_an_op_has_an_axis_or_a_reason() -> None:
    ops: dict[str, Any] = {name: REGISTRY.load(REGISTRY.find("op", name)) for name in OPS}
    for name, op in ops.items():
        _, *parameters = inspect.signature(op.signature.__call__).parameters
        hold(PARAMETERS[name], set(parameters), name)
        for parameter, axis in PARAMETERS[name].items():
            assert is_reason(axis) or varies(name, axis), f"{name}: {parameter} has no axis {axis}"
        if op.reads_weights:
            assert {"weights", "numbers"} <= QUANTIZED_LINEAR.values.keys()


OPS = REGISTRY.names("op")


@pytest.mark.parametrize("kind", sorted(CAPABILITIES))
def test_every_capability_of_a_part_has_a_check_or_a_reason(kind: str) -> None:
    if kind == "kernel":
        return
    hold(SUITES[kind], set(CAPABILITIES[kind]), kind)
    checks = {
        name
        for entry in REGISTRY.entries
        if entry.kind == kind and entry.state == "ready" and kind not in ("model", "command")
        for name, _ in suites.part_checks(REGISTRY, entry)
    }
    for capability, check in SUITES[kind].items():
        assert is_reason(check) or check in checks, f"{capability}: there is no check {check}"


@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_every_attribute_of_a_contract_has_a_check_or_a_reason(kind: str) -> None:
    contract, entries = ATTRIBUTES[kind]
    declared = {
        name
        for name, value in vars(contract).items()
        if not name.startswith("_") and not callable(value) and not isinstance(value, property)
    }
    declared |= {name for name in inspect.get_annotations(contract) if name[0] != "_"}
    hold(entries, declared, kind)
    checks = {
        name
        for entry in REGISTRY.entries
        if entry.kind == kind and entry.state == "ready"
        for name, _ in suites.part_checks(REGISTRY, entry)
    }
    for attribute, check in entries.items():
        assert is_reason(check) or check in checks, f"{attribute}: there is no check {check}"
