"""Kernels are asked about the engine's own steps: its pages, rows, contexts and cache groups; ties
go to built-in parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from enginebay.compose.composition import find_family, make_engine, make_plan
from enginebay.compose.fused import FusedPart, choose_fused
from enginebay.compose.kernels import choose_kernels
from enginebay.compose.platforms import find_platform
from enginebay.config import EngineConfig, Reason, make_config
from enginebay.contracts.cache import KVLayout
from enginebay.contracts.engine import AttentionProblem
from enginebay.contracts.executor import EngineParts
from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Caps
from enginebay.ops.select import Candidate, choose
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Registry, load_registry
from enginebay_paged.options import PagedOptions
from enginebay_runtime.buckets import bucket_sizes
from enginebay_xla.attention import CAPS, XlaAttention
from enginebay_xla.platforms import CpuPlatform
from tests.fakes import fake_paged, install
from tests.unit.test_compose import choice, with_parts

SMALL = {"compile_cache": "off", "platform": "cpu", "max_model_len": 64, "max_num_seqs": 4}


def kernel(**limits: Any) -> XlaAttention:
    """Attention named "external" that has the highest priority and these capabilities, and decodes
    on pages.
    """
    limits = {"compact_decode": False} | limits
    return dataclasses.replace(
        XlaAttention(), name="external", priority=100, caps=dataclasses.replace(CAPS, **limits)
    )


PAGES_OF_32 = kernel(page_size=lambda size: size == 32)
PAGES_OF_64 = kernel(page_size=lambda size: size == 64)
FEW_ROWS = kernel(rows=lambda rows: rows <= 8)
SHORT_CONTEXTS = kernel(context=lambda tokens: tokens <= 128)
NARROW = kernel(head_dim=lambda size: size <= 64)
COMPACT = kernel(page_size=lambda size: size == 64, compact_decode=True)


def planned(impl: str, *layers: Mapping[str, Any]) -> Reason:
    """Why attention of decode steps is what it is, with the kernel `impl` of this module
    installed.
    """
    registry = with_parts(Declaration("kernel", "external", f"{__name__}:{impl}", op="attention"))
    plan = make_plan(make_config(SMALL, *layers), registry)
    return choice(plan.reasons, "kernels.attention.decode")


NAMED = {"kernels": {"attention": "external"}}


def paged(page_size: int) -> dict[str, Any]:
    return {"engine": {"name": "oengine", "options": {"page_size": page_size}}}


@pytest.mark.parametrize(("impl", "size"), [("PAGES_OF_32", 32), ("PAGES_OF_64", 64)])
def test_a_kernel_for_pages_of_one_size_serves_an_engine_with_pages_of_this_size(
    impl: str, size: int
) -> None:
    assert planned(impl, paged(size)).chosen == "external"
    assert planned(impl, paged(size), NAMED).chosen == "external"


@pytest.mark.parametrize(("impl", "size"), [("PAGES_OF_32", 64), ("PAGES_OF_64", 32)])
def test_a_kernel_for_pages_of_another_size_is_refused_with_the_engines_size(
    impl: str, size: int
) -> None:
    reason = planned(impl, paged(size))
    assert reason.chosen != "external"
    assert ("external", f"does not support page size {size}") in reason.refused
    with pytest.raises(UnsupportedError, match=f"external: does not support page size {size}"):
        planned(impl, paged(size), NAMED)


def test_rows_that_are_one_page_have_pages_as_long_as_the_rows() -> None:
    slots = {"engine": "vinference", "max_model_len": 512}
    reason = planned("PAGES_OF_64", slots)
    assert ("external", "does not support page size 256") in reason.refused
    options = {"engine": {"name": "vinference", "options": {"grow": False}}, "max_model_len": 512}
    assert ("external", "does not support page size 512") in planned("PAGES_OF_64", options).refused


def test_a_kernel_that_decodes_on_copies_is_asked_about_the_copies() -> None:
    reason = planned("COMPACT", paged(64), {"max_model_len": 128})
    assert ("external", "does not support page size 128") in reason.refused


@pytest.mark.parametrize(
    ("impl", "few", "many", "why"),
    [
        ("FEW_ROWS", {"max_num_seqs": 8}, {"max_num_seqs": 16}, "does not support 16 rows"),
        (
            "SHORT_CONTEXTS",
            {"max_model_len": 128},
            {"max_model_len": 256},
            "does not support a context of 256 tokens",
        ),
    ],
)
def test_limits_of_rows_and_contexts_are_held_against_the_engines(
    impl: str, few: dict[str, int], many: dict[str, int], why: str
) -> None:
    assert planned(impl, paged(64), few).chosen == "external"
    assert ("external", why) in planned(impl, paged(64), many).refused


@pytest.mark.parametrize(
    ("impl", "why"),
    [
        ("NARROW", "does not support head_dim 128"),
        ("PAGES_OF_64", "does not support page size 32"),
    ],
)
def test_every_cache_group_is_held_against_a_kernel_with_the_groups_own_layout(
    impl: str, why: str
) -> None:
    plan = make_plan(make_config(SMALL, paged(64)))
    info, (group,) = plan.model.info, plan.model.info.groups
    wide = dataclasses.replace(group, name="full_vocab", head_dim=128, v_head_dim=128)
    spec = dataclasses.replace(info.attention[group.name], head_dim=128)
    two = dataclasses.replace(
        info, groups=(group, wide), attention={**info.attention, "full_vocab": spec}
    )
    seen = []

    def steps(layout: str, kind: type[KVLayout], rows: int, decode: Caps) -> list[AttentionProblem]:
        problems: list[AttentionProblem] = []
        for bucket, layouts in plan.kernels.steps(decode):
            other = dataclasses.replace(layouts[group.name], head_dim=128, page_size=32)
            problems.append((bucket, {**layouts, "full_vocab": other}))
        seen.append(layout)
        return problems

    registry = with_parts(Declaration("kernel", "external", f"{__name__}:{impl}", op="attention"))
    args = (registry, plan.config, plan.platform.env())
    chosen = choose_kernels(*args, two, plan.placement, "hnd", steps)
    reason = choice(chosen.reasons, "kernels.attention.mixed")
    assert ("external", why) in reason.refused
    alone = choose_kernels(*args, info, plan.placement, "hnd", steps)
    assert choice(alone.reasons, "kernels.attention.mixed").chosen == "external"
    assert set(seen) == {"hnd"}


def small_pages(parts: EngineParts, options: PagedOptions) -> Any:
    """An engine that does not declare its steps, and runs them on pages of 32 tokens."""
    engine = fake_paged(parts, options)
    layouts = {
        g.name: parts.layout_type(2, 32, g.num_kv_heads, g.head_dim, parts.dtype)
        for g in parts.model.info.groups
    }
    bucket = bucket_sizes(parts)
    problem = make_bucket(bucket.kv_lens[-1])
    engine.attention_problems = lambda: [(problem, layouts)]  # type: ignore[method-assign]
    return engine


def make_bucket(length: int) -> Any:
    from enginebay.ops.spec import Bucket

    return Bucket(4, 4, length // 32, 1, length, "decode")


def test_an_engine_that_does_not_declare_its_steps_is_asked_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch)
    engine = Declaration(
        "engine",
        "undeclared",
        f"{__name__}:small_pages",
        options="enginebay_paged.options:PagedOptions",
    )
    attention = Declaration("kernel", "external", f"{__name__}:PAGES_OF_64", op="attention")
    plan = make_plan(
        make_config(SMALL, NAMED, {"engine": "undeclared"}), with_parts(engine, attention)
    )
    with pytest.raises(
        UnsupportedError,
        match=r"decode = 'external' with engine 'undeclared': it does not support page size 32",
    ):
        make_engine(plan)


@pytest.mark.parametrize("kind", ["engine", "scheduler", "sampler"])
def test_of_parts_with_equal_priority_auto_takes_the_built_in_one(kind: str) -> None:
    own = choice(make_plan(make_config(SMALL)).reasons, kind)
    priority = int(own.why.partition("(")[2].rstrip(")"))
    part = Declaration(kind, "aaa", "nowhere:x", capabilities={"priority": priority})
    reason = choice(make_plan(make_config(SMALL), with_parts(part)).reasons, kind)
    assert reason.chosen == own.chosen
    assert ("aaa", f"the same priority ({priority}), and the other is built in") in reason.refused
    # Between two third-party plugins the name decides.
    higher = [
        dataclasses.replace(part, name=name, capabilities={"priority": priority + 1})
        for name in ("b", "a")
    ]
    if kind == "scheduler":
        reason = choice(make_plan(make_config(SMALL), with_parts(*higher)).reasons, kind)
        assert reason.chosen == "a"


def test_a_kernel_of_default_priority_does_not_win_by_its_name() -> None:
    part = Declaration("kernel", "aaa", "enginebay_xla.norm:rms_norm", op="rms_norm")
    reason = choice(make_plan(make_config(SMALL), with_parts(part)).reasons, "kernels.rms_norm")
    assert reason.chosen == "xla"
    assert ("aaa", "the same priority (0), and the other is built in") in reason.refused
    built_in = Candidate("zzz", 0, impl="ours", built_in=True)
    found, _ = choose(
        "kernels.x", "auto", [Candidate("aaa", 0, impl="theirs"), built_in], lambda _: None
    )
    assert found is built_in


def test_a_plugins_fused_op_of_equal_priority_leaves_the_built_in_parts() -> None:
    parts = [FusedPart("rms_norm", Candidate("xla", 0, impl="xla", built_in=True), is_named=False)]
    fused = Candidate("aaa", 0, impl="fused")
    assert choose_fused("kernels.add_rms_norm", "auto", [fused], parts)[0] is None
    built_in = dataclasses.replace(fused, built_in=True)
    assert choose_fused("kernels.add_rms_norm", "auto", [built_in], parts)[0] is built_in
    better = dataclasses.replace(fused, priority=1)
    assert choose_fused("kernels.add_rms_norm", "auto", [better], parts)[0] is better


class EqualPlatform(CpuPlatform):
    """A platform with the priority of the built-in one."""

    name = "aaa"


def test_a_plugins_platform_and_family_of_equal_priority_are_not_taken() -> None:
    from enginebay_testing.suites import best_platform

    platform = Declaration("platform", "aaa", f"{__name__}:EqualPlatform")
    family = Declaration(
        "model",
        "zzz",
        "enginebay_models.qwen2:FAMILY",
        capabilities={"architectures": ("LlamaForCausalLM",)},
    )
    registry = with_parts(platform, family)
    own = find_platform(load_registry(), EngineConfig())
    assert find_platform(registry, EngineConfig()).name == own.name
    assert best_platform(registry).name == own.name
    assert find_family(registry, "LlamaForCausalLM").name == "llama"


def test_a_registered_part_knows_whether_it_is_built_in() -> None:
    registry: Registry = with_parts(Declaration("scheduler", "s", "nowhere:x"))
    assert {e.built_in for e in registry.entries} == {True, False}
    assert not registry.find("scheduler", "s").built_in
