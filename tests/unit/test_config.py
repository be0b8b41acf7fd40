"""Configuration: precedence of its sources, merging, refusals, export, and `auto` resolved
purely.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from enginebay import LLM
from enginebay.cli import main
from enginebay.cli.options import add_engine_arguments, config_from
from enginebay.compose.resolve import ResolveInputs, pick, resolve
from enginebay.config import EngineConfig, make_config
from enginebay.config_sections import AUTO, Choice, KernelChoice
from enginebay.errors import ConfigError, InputError, UnsupportedError
from enginebay.ops.select import Candidate
from enginebay.toml_file import read_toml

TOML = """
model = "somewhere"
max_num_seqs = 8

[engine]
name = "vinference"
page_size = 32

[kernels]
attention = "xla"
linear = "fast"

[mesh]
tensor = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.toml"
    path.write_text(TOML, encoding="utf-8")
    return path


def same(name: str) -> KernelChoice:
    """The same kernel in every phase."""
    return KernelChoice(decode=name, prefill=name, mixed=name)


def from_flags(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return config_from(parser.parse_args(flags))


def test_flags_win_over_the_file_and_the_rest_of_it_stays(file: Path) -> None:
    flags = ("--max-num-seqs", "4", "--dtype", "float32", "--kernel", "linear=xla")
    config = from_flags("--config", str(file), *flags)
    assert (config.max_num_seqs, config.dtype, config.model) == (4, "float32", "somewhere")
    assert config.kernels == dict.fromkeys(("attention", "linear"), same("xla"))
    assert config.engine == Choice(name="vinference", options={"page_size": 32})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--activation-quantization", "int8"),
        ("--weight-dtype", "bfloat16"),
        ("--kv-cache-dtype", "float32"),
        ("--tuned-folder", "here"),
    ],
)
def test_a_flag_named_as_a_field_sets_it(flag: str, value: str) -> None:
    assert getattr(from_flags(flag, value), flag[2:].replace("-", "_")) == value


def test_a_quantisation_is_named_by_a_flag() -> None:
    assert from_flags("--quantization", "int8").quantization == Choice(name="int8")


def test_python_wins_over_the_file(file: Path) -> None:
    config = make_config(read_toml(file), {"model": "demo", "mesh": {"tensor": 4, "data": 1}})
    assert config.model == "demo"
    assert config.mesh == {"tensor": 4, "data": 1}


def test_the_last_of_three_layers_wins() -> None:
    config = make_config({"seed": 1, "decode_steps": 2}, {"seed": 2}, {"seed": 3})
    assert (config.seed, config.decode_steps) == (3, 2)


def test_options_stay_with_their_part_and_never_reach_another(file: Path) -> None:
    under = read_toml(file)
    assert make_config(under, {"engine": "vinference"}).engine.options == {"page_size": 32}
    for other in (
        "oengine",
        {"name": "oengine"},
        Choice(name="oengine"),
        {"name": "oengine", "options": {}},
    ):
        assert make_config(under, {"engine": other}).engine == Choice(name="oengine")


@pytest.mark.parametrize(
    "over",
    [
        {"grow": False},
        {"options": {"grow": False}},
        {"name": "vinference", "grow": False},
        Choice(name="vinference", options={"grow": False}),
    ],
)
def test_options_merge_however_they_are_written(file: Path, over: Any) -> None:
    for under in (
        read_toml(file),
        {"engine": {"name": "vinference", "options": {"page_size": 32}}},
    ):
        merged = make_config(under, {"engine": over}).engine
        assert merged == Choice(name="vinference", options={"page_size": 32, "grow": False})


def test_options_join_a_part_that_was_named_plainly() -> None:
    merged = make_config({"engine": "vinference"}, {"engine": {"page_size": 16}}).engine
    assert merged == Choice(name="vinference", options={"page_size": 16})


def test_a_kernel_for_one_phase_leaves_the_other_phases(file: Path) -> None:
    config = from_flags("--config", str(file), "--kernel", "attention.decode=mine")
    assert config.kernels["attention"] == KernelChoice(decode="mine", prefill="xla", mixed="xla")
    assert config.kernels["linear"] == KernelChoice(decode="fast", prefill="fast", mixed="fast")


def test_a_kernel_for_all_phases_replaces_each(file: Path) -> None:
    config = from_flags("--config", str(file), "--attention", "other")
    assert set(config.kernels["attention"].model_dump().values()) == {"other"}


def test_attention_is_chosen_by_phase(file: Path) -> None:
    by_flags = [
        (("--attention", "decode=mine"), ("mine", "xla", "xla")),
        (("--attention", "decode=mine", "--attention", "mixed=other"), ("mine", "xla", "other")),
        (("--attention", "decode=mine", "--attention", "other"), ("mine", "other", "other")),
        (
            ("--attention", "decode=mine", "--kernel", "attention.mixed=other"),
            ("mine", "xla", "other"),
        ),
    ]
    for flags, (decode, prefill, mixed) in by_flags:
        config = from_flags("--config", str(file), *flags)
        assert config.kernels["attention"] == KernelChoice(
            decode=decode, prefill=prefill, mixed=mixed
        )


@pytest.mark.parametrize(
    "flags", [("--attention", "decod=mine"), ("--kernel", "attention.decod=mine")]
)
def test_an_unknown_phase_is_told_with_the_nearest(flags: tuple[str, str]) -> None:
    with pytest.raises(
        ConfigError, match=r"kernels.attention.decod = .*unknown field.*mean 'decode'"
    ):
        from_flags(*flags)


def test_an_axis_can_be_kept_whole_again() -> None:
    config = make_config({"axis_rules": {"heads": "tensor"}}, {"axis_rules": {"heads": None}})
    assert config.rules()["heads"] is None


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_seqs": 4}, "max_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"dtype": "int4"}, "dtype"),
        ({"mesh": {"tensor": 0}}, "mesh.tensor = 0"),
        ({"guided_limits": {"mask_s": -1}}, "guided_limits.mask_s = -1"),
        ({"guided_limits": {"mask": 1}}, "guided_limits.mask = 1"),
        ({"engine": {"name": 5}}, "engine.name = 5"),
        ({"axis_rules": {"heads": 3}}, "axis_rules.heads = 3"),
        ({"axis_rules": {"head": "tensor"}}, "vocab, expert. Did you mean 'heads'"),
        ({"engine": 3}, "engine"),
        ({"engine": {"name": "x", "options": {}, "page": 1}}, "engine.page"),
        ({"kernels": {"attention": {"decoding": "xla"}}}, "kernels.attention.decoding"),
        ({"kernels": 7}, "kernels"),
        ({"seed": -1}, "seed"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_that_names_it(
    values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_config(values)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "given"),
    [
        (
            {"mesh": {"tensr": 2}},
            "mesh.tensr = 2, an axis that no rule uses. Allowed: axes that rules name (tensor)",
        ),
        ({"mesh": {"tensor": 2, "data": 2}}, "mesh.data = 2"),
        (
            {"mesh": {"tensor": 2}, "axis_rules": {"mlp": "tensorr"}},
            "axis_rules.mlp = 'tensorr'. Allowed: an axis of mesh (tensor)",
        ),
        ({"axis_rules": {"mlp": "tensor"}}, "axis_rules.mlp = 'tensor'"),
    ],
)
def test_a_mesh_and_rules_that_do_not_meet_are_refused(values: dict[str, Any], given: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_config(values)
    assert str(refusal.value).startswith(given)
    assert "Correct the name" in str(refusal.value)


def test_a_mesh_axis_of_ones_own_needs_a_rule_only() -> None:
    config = make_config({"mesh": {"model": 2, "data": 1}, "axis_rules": {"mlp": "model"}})
    assert (config.rules()["mlp"], config.rules()["vocab"]) == ("model", None)


@pytest.mark.parametrize("part", ["a", '"a b"', "a .\t'b'"])
@pytest.mark.parametrize(("before", "after"), [("", " = 1"), ("[", "]"), ("x = {", "=1}")])
def test_a_key_of_many_parts_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, part: str
) -> None:
    monkeypatch.setattr("tomllib.loads", None)
    path = tmp_path / "deep.toml"
    path.write_text(f"seed = 1\n{before}{'.'.join([part] * 100_000)}{after}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"deep\.toml: it is nested too deeply"):
        read_toml(path)


def test_values_with_many_dots_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "dots.toml"
    model = ".".join(["a"] * 100_000)
    path.write_text(f'model = "{model}"\n', encoding="utf-8")
    assert read_toml(path) == {"model": model}


@pytest.mark.parametrize("text", ["model = ", "\x00", "a = 1\na = 2"])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken.toml"):
        read_toml(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="readable TOML file"):
            read_toml(path)


@pytest.mark.parametrize(
    "flags",
    [
        ("--kernel", "attention"),
        ("--kernel", "=xla"),
        ("--attention", "=xla"),
        ("--attention", "decode="),
        ("--attention", "decode=xla,prefill=xla"),
        ("--attention", "xla", "--attention", "native"),
        ("--attention", "decode=xla", "--attention", "decode=native"),
        ("--mesh", "tensor"),
        ("--mesh", "tensor=two"),
        ("--mesh", "tensor=²"),
        ("--mesh", "tensor=-1"),
    ],
)
def test_a_malformed_flag_is_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=flags[0]):
        from_flags(*flags)


def test_a_configuration_survives_json_and_cannot_be_changed(file: Path) -> None:
    config = make_config(read_toml(file))
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    assert make_config(json.loads(config.model_dump_json())) == config
    with pytest.raises(ValueError, match="frozen"):
        config.model = "other"  # type: ignore[misc]


def test_the_schema_describes_every_field() -> None:
    schema = EngineConfig.model_json_schema()
    assert set(schema["properties"]) == set(EngineConfig.model_fields)
    assert schema["additionalProperties"] is False
    json.dumps(schema)


FACTS = ResolveInputs(
    platforms=[Candidate("cpu", 0), Candidate("cuda", 10, unavailable="no such device")],
    engines=[Candidate("a", 1), Candidate("b", 1), Candidate("c", 0)],
    schedulers=[Candidate("fcfs", 5), Candidate("gone", 9, unavailable="its plugin is broken")],
    samplers=[Candidate("standard", 0)],
    default_dtype="bfloat16",
    model_max_len=8192,
    weight_bytes=500 << 20,
)


@pytest.mark.parametrize(
    ("chosen", "weight_bytes", "drafts"),
    [
        (None, 10 << 20, 15),
        (None, 64 << 20, 7),
        (None, 16 << 30, 7),
        (3, 10 << 20, 3),
        (3, 16 << 30, 3),
    ],
)
def test_small_models_get_more_drafts_unless_their_number_is_chosen(
    chosen: int | None, weight_bytes: int, drafts: int
) -> None:
    facts = dataclasses.replace(FACTS, weight_bytes=weight_bytes)
    config, reasons = resolve(
        EngineConfig(proposer=Choice(name="ngram"), draft_tokens=chosen), facts
    )
    assert (config.draft_tokens, config.max_drafts) == (drafts, drafts)
    why = next(reason.why for reason in reasons if reason.setting == "draft_tokens")
    assert ("by name" in why) == (chosen is not None)
    assert all(reason.setting != "draft_tokens" for reason in resolve(EngineConfig(), facts)[1])


KINDS = ("platform", "engine", "scheduler", "sampler", "proposer")
VALUES = ("dtype", "weight_dtype", "kv_cache_dtype", "max_model_len", "mixed_steps")


def test_resolving_settles_everything_and_keeps_the_reasons() -> None:
    config, reasons = resolve(EngineConfig(), FACTS)
    assert (config.platform, config.engine.name, config.scheduler.name) == ("cpu", "a", "fcfs")
    assert (config.sampler.name, config.dtype, config.max_model_len) == (
        "standard",
        "bfloat16",
        4096,
    )
    by_setting = {reason.setting: reason for reason in reasons}
    assert list(by_setting) == [*KINDS, *VALUES]
    kinds = {kind: getattr(config, kind).name for kind in KINDS if kind != "platform"}
    values = {name: str(getattr(config, name)) for name in ("platform", *VALUES)}
    assert kinds | values == {name: reason.chosen for name, reason in by_setting.items()}
    assert not {AUTO, "None", ""} & {*kinds.values(), *values.values()}
    assert all(reason.why for reason in reasons)
    drafted = resolve(EngineConfig(proposer=Choice(name="ngram")), FACTS)
    assert str(drafted[0].draft_tokens) == drafted[1][-1].chosen
    assert by_setting["platform"].refused == (("cuda", "no such device"),)
    assert dict(by_setting["engine"].refused) == {
        "b": "the same priority (1), later by name",
        "c": "lower priority (0)",
    }
    assert "8192" in by_setting["max_model_len"].why


def test_resolving_is_pure() -> None:
    config = EngineConfig(engine=Choice(name="c", options={"x": 1}))
    before = config.model_dump_json()
    assert resolve(config, FACTS) == resolve(config, FACTS)
    assert config.model_dump_json() == before


def test_resolving_again_changes_nothing() -> None:
    settled, _ = resolve(EngineConfig(), FACTS)
    again, reasons = resolve(settled, FACTS)
    assert again == settled
    assert {reason.why for reason in reasons} == {"chosen by name"}


def test_an_explicit_choice_is_taken_even_where_auto_would_refuse_it() -> None:
    assert pick("scheduler", "gone", FACTS.schedulers).chosen == "gone"
    assert resolve(EngineConfig(engine=Choice(name="c", options={"x": 1})), FACTS)[
        0
    ].engine.options == {"x": 1}


def test_auto_with_nothing_to_choose_from_says_why() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler = 'auto' finds nothing .gone: its plugin is broken"
    ):
        pick("scheduler", "auto", FACTS.schedulers[1:])


def test_a_context_longer_than_the_models_is_refused() -> None:
    assert resolve(EngineConfig(max_model_len=8192), FACTS)[0].max_model_len == 8192
    with pytest.raises(ConfigError, match=r"max_model_len = 8193. Allowed: at most 8192"):
        resolve(EngineConfig(max_model_len=8193), FACTS)


@pytest.mark.parametrize("phase", ["prefill", "mixed"])
def test_a_file_chooses_a_kernel_for_each_phase(
    phase: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A phase gets the kernel that is named for it: one that cannot serve it is refused."""
    file = tmp_path / "phases.toml"
    file.write_text(f'[kernels.attention]\ndecode = "xla"\n{phase} = "native"\n')
    assert main(["explain", "--platform", "cpu", "--config", str(file)]) == 2
    assert "native" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="native"):
        LLM.from_config(file, platform="cpu")
