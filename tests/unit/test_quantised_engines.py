"""The engines' conformance suite with quantised caches and weights: forks, preemption, shared
prefixes, states that move, and groups with windows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginebay.plugins.registry import load_registry
from enginebay_testing.engines import engine_checks
from enginebay_testing.subject import EngineSubject
from enginebay_testing.tiny import write_tiny_checkpoint
from tests.parity import tiny

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("quantised_engines")]

PAGED: dict[str, Any] = {"name": "oengine", "page_size": 32, "num_pages": 16}
ROUNDED: dict[str, Any] = {
    "engine": "oengine",
    "quantization": "int4",
    "activation_quantization": "int8_group",
}
CHOICES: dict[str, dict[str, Any]] = {
    "oengine-int8": {"engine": "oengine", "kv_cache_dtype": "int8"},
    "oengine-uint4": {"engine": "oengine", "kv_cache_dtype": "uint4"},
    "oengine-fp8": {"engine": "oengine", "kv_cache_dtype": "fp8"},
    "vinference-int8": {"engine": "vinference", "kv_cache_dtype": "int8"},
    "vinference-uint4": {"engine": "vinference", "kv_cache_dtype": "uint4"},
    "oengine-windows-int8": {"engine": PAGED, "kv_cache_dtype": "int8"},
    "oengine-windows-uint4": {"engine": PAGED, "kv_cache_dtype": "uint4"},
    "vinference-windows-int8": {"engine": "vinference", "kv_cache_dtype": "int8"},
    "oengine-weights-int4": {"engine": "oengine", "quantization": "int4"},
    "oengine-rounded-groups": ROUNDED,
    "oengine-all": {
        "engine": "oengine",
        "quantization": "int8",
        "activation_quantization": "int8",
        "kv_cache_dtype": "int8",
    },
}

NEAR = ("logprobs_are_the_models", "hidden_states_are_the_models", "chunk_sizes_do_not_matter")
"""Checks that compare with other chunks of a prompt, within the tolerance of f32. The last bit of a
key may change its code, and then more changes than they allow. That happens to prompts of many
windows; the other checks compare tokens with near-ties.
"""


@pytest.fixture(scope="module", params=CHOICES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name: str = request.param
    folder: Path = tmp_path_factory.mktemp("model")
    if "windows" in name:
        folder = tiny.write_checkpoint(folder, "gemma3-mixed")
    else:
        write_tiny_checkpoint(folder, load_registry())
    return EngineSubject(name, model=str(folder), choices=CHOICES[name])


@pytest.mark.parametrize("name", [name for name, _ in engine_checks(EngineSubject("oengine"))])
def test_engine_keeps_the_contract(subject: EngineSubject, name: str) -> None:
    if name in NEAR and "windows" in subject.name:
        pytest.skip("a code of the cache may differ")
    check: Callable[[], None] = dict(engine_checks(subject))[name]
    check()


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "inputs are not rounded": ({"activation_quantization": "none"}, {}, "logprobs_are_the_models"),
    "rows have one scale": ({"activation_quantization": "int8"}, {}, "logprobs_are_the_models"),
    "the cache has four bits": ({"kv_cache_dtype": "uint4"}, {}, "penalised_tokens_are_the_models"),
    "other positions": ({}, {"rope_theta": 20000.0}, "greedy_tokens_are_the_models"),
    "another norm": ({}, {"rms_norm_eps": 1e-2}, "seeded_tokens_are_the_samplers"),
}
"""Engines that do not compute what the plan of the reference says: other settings, other fields of
the model, and the check that finds them. Tokens do not tell one rounding of inputs from another.
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_engine_with_rounded_inputs_is_found(fault: str, tmp_path: Path) -> None:
    settings, fields, name = FAULTS[fault]
    right = write_tiny_checkpoint(tmp_path / "right", load_registry())
    subject = EngineSubject("oengine", model=str(right), choices=ROUNDED)
    subject.reference()
    subject.model = str(write_tiny_checkpoint(tmp_path / "wrong", load_registry(), **fields))
    subject.choices = ROUNDED | settings
    with pytest.raises(AssertionError, match=r"token \d+.* (is not|expected) "):
        dict(engine_checks(subject))[name]()
