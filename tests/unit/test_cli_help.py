"""Help texts: every flag says what it does and what it is when it is not given; settings by
flag.
"""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from enginebay.cli.options import add_engine_arguments, config_from, with_default
from enginebay.cli.parsing import CommandParser, HelpWithDefaults
from enginebay.cli.program import load_command, main, summaries
from enginebay.config import EngineConfig

IS_HELP = (argparse._HelpAction, argparse._VersionAction)


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"enginebay {command}")
    load_command(command).add_arguments(command, parser)
    return parser


@pytest.mark.parametrize("command", summaries())
def test_every_flag_has_a_help_text_with_its_default(command: str) -> None:
    parser = parser_of(command)
    formatter = HelpWithDefaults(parser.prog)
    for action in parser._actions:
        if isinstance(action, IS_HELP):
            continue
        text = formatter._expand_help(action)
        assert text, action
        assert not action.option_strings or action.required or "default" in text, (
            action.option_strings
        )


def test_a_default_in_the_help_is_the_configurations_own() -> None:
    defaults = EngineConfig()
    assert with_default("x", "max_num_seqs") == f"x (default: {defaults.max_num_seqs})"
    assert with_default("x", "engine") == f"x (default: {defaults.engine.name})"
    assert with_default("x", "max_model_len") == "x (default: the model's, at most 4096)"
    help_text = " ".join(parser_of("generate").format_help().split())
    assert (
        "--decode-steps N max tokens that a row decodes in one compiled call "
        f"(default: {defaults.decode_steps})"
    ) in (help_text)


def test_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert capsys.readouterr().out.splitlines()[0] == "usage: enginebay generate [flags] [PROMPT]"


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (
            ["--set", "engine.page_size=32"],
            "engine",
            {"name": "auto", "options": {"page_size": 32}},
        ),
        (
            ["--engine", "oengine", "--set", "engine.page_size=32", "--set", "engine.grow=false"],
            "engine",
            {"name": "oengine", "options": {"page_size": 32, "grow": False}},
        ),
        (["--set", "seed=3"], "seed", 3),
        (["--set", "layout=nhd"], "layout", "nhd"),
        (["--set", 'processors=["dry"]'], "processors", ("dry",)),
        (["--max-num-seqs", "4", "--set", "max_num_seqs=8"], "max_num_seqs", 8),
        (["--set", "axis_rules.mlp=none", "--set", "mesh.none=2"], "mesh", {"none": 2}),
    ],
)
def test_any_setting_can_be_given_by_flag(flags: list[str], field: str, value: Any) -> None:
    parser = CommandParser(prog="enginebay generate")
    add_engine_arguments(parser)
    assert config_from(parser.parse_args(flags)).model_dump()[field] == value
