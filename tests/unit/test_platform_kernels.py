"""The platform suite demands the kernels that plans need, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from enginebay.compose.composition import make_plan
from enginebay.config import make_config
from enginebay.errors import UnsupportedError
from enginebay.plugins.hooks import Declaration
from enginebay_testing.verdicts import FAULTS as FAULTY_VERDICTS
from enginebay_testing.verdicts import Outcome, judge
from tests.zoo import platforms
from tests.zoo.platform_registries import NAME, declared, registry_of, without
from tests.zoo.platforms import FUSED, KERNELS, RIGHT, Npu, Part

OPS = sorted({one.op for one in declared()})
NO_CHOICES: Mapping[str, Any] = {}
SIZES = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}


def few(names: Iterable[str], *quick: str) -> list[Any]:
    """Parameters, of which the quick tests run those of `quick`."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.long) for n in names]


def outcomes(part: Part) -> dict[str, Outcome]:
    return {name: judge(check) for name, check in platforms.checks(part)}


def failing(part: Part) -> dict[str, str]:
    found = outcomes(part).items()
    return {name: one.detail for name, one in found if one.verdict in FAULTY_VERDICTS}


def is_planned(part: Part, choices: Mapping[str, Any] = NO_CHOICES) -> bool:
    """Whether the core makes a plan of the demo model on the platform of a part."""
    target = f"{part.kind.__module__}:{part.kind.__name__}"
    registry = registry_of(part.change, (*part.more, Declaration("platform", NAME, target)))
    config = make_config({"model": "demo", "platform": NAME, **SIZES, **choices})
    try:
        make_plan(config, registry)
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize("op", few(OPS, "linear", "add_rms_norm"))
def test_the_suite_demands_an_op_exactly_when_no_plan_is_made_without_it(op: str) -> None:
    part = Part(Npu, without(op))
    assert bool(failing(part)) != is_planned(part)
    assert is_planned(part) == (op in FUSED)


@pytest.mark.parametrize("name", few(KERNELS, "no attention of mixed steps"))
def test_no_plan_is_made_with_faulty_kernels(name: str) -> None:
    assert failing(KERNELS[name])
    assert not is_planned(KERNELS[name])


@pytest.mark.parametrize(
    "name", few(sorted(RIGHT.keys() - {"cpu"}), "an op of a plugin without a kernel")
)
def test_right_kernels_pass_and_make_a_plan(name: str) -> None:
    assert failing(RIGHT[name]) == {}
    assert is_planned(RIGHT[name])


QUANTISED: dict[str, dict[str, str]] = {
    "int8_weights_are_served": {"quantization": "int8"},
    "int4_weights_are_served": {"quantization": "int4"},
    "fp8_weights_are_served": {"quantization": "fp8"},
    "int8_activations_are_served": {"quantization": "int8", "activation_quantization": "int8"},
    "int8_caches_are_served": {"kv_cache_dtype": "int8"},
    "uint4_caches_are_served": {"kv_cache_dtype": "uint4"},
    "fp8_caches_are_served": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize(
    "check", few(QUANTISED, "int8_weights_are_served", "int8_caches_are_served")
)
def test_quantised_numbers_pass_exactly_where_they_are_planned(check: str) -> None:
    choices = QUANTISED[check]
    for name in ("npu", "plain weights and caches alone", "plain caches alone"):
        verdict = outcomes(RIGHT[name])[check].verdict
        assert verdict in ("PASS", "UNSUPPORTED")
        assert (verdict == "PASS") == is_planned(RIGHT[name], choices), name


def test_an_op_of_a_plugin_is_told_and_not_demanded() -> None:
    found = outcomes(RIGHT["an op of a plugin without a kernel"])["op_is_served[negate]"]
    assert found.verdict == "UNSUPPORTED"
    assert "x: for other platforms" in found.detail
    assert "only models that call this op of plugin 'external' need one" in found.detail


def test_a_missing_fused_kernel_is_told_with_its_parts() -> None:
    found = outcomes(RIGHT["no fused kernels"])
    for op, parts in (("add_rms_norm", "rms_norm"), ("rope_kv_write", "rope and kv_write")):
        assert found[f"op_is_served[{op}]"].verdict == "UNSUPPORTED"
        assert f"its parts, {parts}, compute it" in found[f"op_is_served[{op}]"].detail


SAYS = {
    "no linear": ("op_is_served[linear]", "register a kernel of linear with platforms=('npu',)"),
    "Caps for another platform": (
        "defaults_are_served",
        "npu: is registered for npu, but its Caps.platforms has cpu alone",
    ),
    "attention for another layout": (
        "defaults_are_served",
        "npu: does not support layout hnd (has nhd)",
    ),
    "attention for another device": (
        "defaults_are_served",
        "npu: does not support architecture npu_1",
    ),
    "no attention of prefills": ("defaults_are_served", "npu: does not support mode prefill"),
    "kv_write for another layout": (
        "op_is_served[kv_write]",
        "npu: does not support layout hnd (has nhd)",
    ),
}


@pytest.mark.parametrize("name", SAYS)
def test_the_suite_says_which_kernel_is_missing_and_why(name: str) -> None:
    check, words = SAYS[name]
    found = failing(KERNELS[name])
    assert found.keys() == {check}
    assert words in found[check]


def test_a_figure_that_is_not_positive_is_named() -> None:
    found = failing(platforms.FAULTS["Slow"])
    assert found == {"facts_are_sound": "hardware().bytes_per_s is 0.0, expected more than 0"}


def test_a_platform_without_devices_fails_in_that_alone() -> None:
    assert failing(platforms.FAULTS["Absent"]).keys() == {"devices_or_a_reason"}
