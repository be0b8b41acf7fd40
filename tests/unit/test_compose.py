"""Composing an engine: parts that cannot serve here are refused by name and passed over by `auto`, with the reason."""

from __future__ import annotations

import dataclasses

import pytest

from enginebay.build.compose import make_plan
from enginebay.config import Reason, make_config
from enginebay.errors import PluginError, UnsupportedError
from enginebay.hooks import Declaration
from enginebay.ops.caps import Caps
from enginebay.registry import Entry, Registry, load_registry
from enginebay_xla.attention import CAPS, XlaAttention

ELSEWHERE = "needs platform npu, this is cpu"
UNSHARDED = "does not support features shard_map"
NO_SHARD_MAP = dataclasses.replace(CAPS, features=CAPS.features - {"shard_map"})


class BrokenPlatform:
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no driver\nat all")


@dataclasses.dataclass(frozen=True)
class UnshardedAttention(XlaAttention):
    """An implementation that does not declare shard_map, with the highest priority."""

    name: str = "unsharded"
    priority: int = 100
    caps: Caps = NO_SHARD_MAP


IMPL = UnshardedAttention()


def with_parts(*declarations: Declaration) -> Registry:
    """The built-in parts and these, of a plugin named "stranger"."""
    added = [Entry(d.kind, d.name, "stranger", "1", "stranger", declaration=d) for d in declarations]
    return Registry([*load_registry().entries, *added])


def choice(reasons: tuple[Reason, ...], setting: str) -> Reason:
    return next(reason for reason in reasons if reason.setting == setting)


@pytest.mark.parametrize("kind", ["engine", "scheduler", "sampler"])
def test_a_part_for_another_platform_is_never_used(kind: str) -> None:
    capabilities = {"priority": 1000}
    part = Declaration(kind, "foreign", "nowhere:x", platforms=("npu",), capabilities=capabilities)
    registry = with_parts(part)
    plan = make_plan(make_config({"compile_cache": "off", "platform": "cpu"}), registry)
    assert ("foreign", ELSEWHERE) in choice(plan.reasons, kind).refused
    named = make_config({"compile_cache": "off", "platform": "cpu", kind: "foreign"})
    with pytest.raises(UnsupportedError, match=f"{kind} = 'foreign': {ELSEWHERE}. Allowed: "):
        make_plan(named, registry)


def test_a_named_platform_that_cannot_be_made_is_the_plugins_fault() -> None:
    registry = with_parts(Declaration("platform", "broken", f"{__name__}:BrokenPlatform"))
    with pytest.raises(
        PluginError, match=r"platform 'broken' of plugin 'stranger' .*RuntimeError: no driver"
    ):
        make_plan(make_config({"compile_cache": "off", "platform": "broken"}), registry)


def test_attention_that_cannot_be_sharded_is_refused_on_a_mesh() -> None:
    kernel = Declaration("kernel", "unsharded", f"{__name__}:IMPL", op="attention")
    registry = with_parts(kernel)
    base = {"compile_cache": "off", "platform": "cpu", "max_model_len": 64}
    alone = make_plan(make_config(base), registry)
    assert choice(alone.reasons, "kernels.attention.decode").chosen == "unsharded"
    mesh = make_config(base, {"mesh": {"tensor": 2}})
    decode = choice(make_plan(mesh, registry).reasons, "kernels.attention.decode")
    assert decode.chosen in ("native", "xla"), "native where a compiler is"
    assert ("unsharded", UNSHARDED) in decode.refused
    with pytest.raises(UnsupportedError, match=UNSHARDED):
        make_plan(make_config(mesh.model_dump(), {"kernels": {"attention": "unsharded"}}), registry)
