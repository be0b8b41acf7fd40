"""The program: what each command prints, how it is interrupted, and its exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from enginebay import LLM, SamplingParams, __version__
from enginebay.cli.generate import add_sampling_arguments, sampling_from
from enginebay.cli.program import main, summaries
from enginebay.outputs import StreamChunk
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Entry, Registry
from tests.brief import BRIEF
from tests.unit.serving import DEADLOCK_S

pytestmark = pytest.mark.xdist_group("llm")
on_the_fake_engine = pytest.mark.usefixtures("faked")
MESSAGES = [{"role": "user", "content": "What color is the sky?"}]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Runs a command line that must succeed, and reads the JSON it prints."""

    def call(*arguments: str) -> Any:
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


@pytest.fixture
def expected(fake_llm: LLM) -> Callable[[str], list[int]]:
    """Greedy tokens of a prompt, eight of them, by the fake engine, without the program."""
    return lambda prompt: (
        fake_llm.generate(prompt, SamplingParams(max_tokens=8))[0].outputs[0].token_ids
    )


@on_the_fake_engine
def test_generate_prints_prompt_and_completion(run: Run, config: str, fake_llm: LLM) -> None:
    code, out, err = run("generate", "Once upon a time", "--max-tokens", "8", "--config", config)
    assert (code, err) == (0, "")
    completion = fake_llm.generate("Once upon a time", SamplingParams(max_tokens=8))[0].get_text()
    assert out == f"Once upon a time{completion}\n"


@pytest.mark.long
def test_generate_as_json_has_the_documented_fields(run_json: Any, config: str, llm: LLM) -> None:
    flags = ("--max-tokens", "8", "--json", "--config", config)
    record = run_json("generate", "The fox", *flags)
    assert set(record) == {"text", "token_ids", "prompt_token_ids", "finish_reason", "metrics"}
    output = llm.generate("The fox", SamplingParams(max_tokens=8))[0].outputs[0]
    assert (record["token_ids"], record["text"]) == (output.token_ids, output.text)
    assert record["finish_reason"] == "length"
    assert record["metrics"]["num_generated_tokens"] == 8


@on_the_fake_engine
def test_token_ids_are_a_prompt_too(run_json: Any, config: str, expected: Any) -> None:
    flags = ("--max-tokens", "8", "--json", "--config", config)
    record = run_json("generate", "The fox", *flags)
    again = run_json(
        "generate", "--prompt-ids", ",".join(map(str, record["prompt_token_ids"])), *flags
    )
    assert again["token_ids"] == record["token_ids"] == expected("The fox")
    assert again["prompt_token_ids"] == record["prompt_token_ids"]


@on_the_fake_engine
def test_generate_prints_every_completion(run: Run, config: str) -> None:
    flags = (
        "-n",
        "2",
        "--temperature",
        "1.5",
        "--seed",
        "4",
        "--max-tokens",
        "6",
        "--config",
        config,
    )
    code, out, _ = run("generate", "Once", *flags)
    assert code == 0
    assert [line[:3] for line in out.splitlines() if line.startswith("[")] == ["[0]", "[1]"]
    code, out, _ = run("generate", "Once", "--json", *flags)
    first, second = map(json.loads, out.splitlines())
    assert first["token_ids"] != second["token_ids"]


@on_the_fake_engine
def test_flags_reach_the_request(run_json: Any, config: str) -> None:
    text = run_json("generate", "The fox", "--max-tokens", "8", "--json", "--config", config)[
        "text"
    ]
    stops = ("--stop", text[3:6], "--stop", "%")
    stopped = run_json("generate", "The fox", *stops, "--json", "--config", config)
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[3:6])], "stop")
    sampling = (
        "--temperature",
        "0.9",
        "--top-k",
        "5",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--seed",
        "3",
    )
    flags = ("--scheduler", "static", "--attention", "auto", "--ignore-eos", "--max-tokens", "5")
    record = run_json("generate", "The fox", *sampling, *flags, "--json", "--config", config)
    assert len(record["token_ids"]) == 5


def test_flags_reach_the_parameters() -> None:
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    sampling = "--temperature 0.9 --top-k 5 --top-p 0.8 --min-p 0.01 --seed 3 --ignore-eos -n 2"
    penalties = "--presence-penalty -0.5 --frequency-penalty 2 --repetition-penalty 1.25"
    params = sampling_from(parser.parse_args(f"{sampling} {penalties} --stop a --stop b".split()))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (
        -0.5,
        2.0,
        1.25,
    )
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.9, 5, 0.8, 0.01)
    assert (params.seed, params.ignore_eos, params.n, list(params.stop)) == (3, True, 2, ["a", "b"])
    assert sampling_from(parser.parse_args([])) == SamplingParams()
    given = "--processor xtc.threshold=0.2 --processor xtc.probability=1.0 --processor dry"
    params = sampling_from(parser.parse_args([*given.split(), "--typical-p", "0.5"]))
    assert params.processors == {"xtc": {"threshold": 0.2, "probability": 1.0}, "dry": {}}
    assert params.typical_p == 0.5


@on_the_fake_engine
def test_the_prompt_may_come_from_standard_input(
    run_json: Any, config: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("The fox"))
    record = run_json("generate", "-", "--max-tokens", "8", "--json", "--config", config)
    assert record["token_ids"] == expected("The fox")


@on_the_fake_engine
def test_chat_answers_each_message_with_the_ones_before_in_mind(
    run: Run, config: str, fake_llm: LLM
) -> None:
    flags = ("--max-tokens", "24", "--config", config)
    code, out, err = run("chat", "What color is the sky?", *flags)
    assert code == 0
    assert out == fake_llm.chat(MESSAGES, SamplingParams(max_tokens=24)).get_text() + "\n"
    assert err == "> What color is the sky?\n"
    code, out, _ = run("chat", "Hello!", "What color is the sky?", "--json", *flags)
    first, second = map(json.loads, out.splitlines())
    told = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": first["text"]}]
    expected = fake_llm.chat([*told, *MESSAGES], SamplingParams(max_tokens=24))
    assert second["prompt_token_ids"] == expected.prompt_token_ids
    assert second["token_ids"] == expected.outputs[0].token_ids
    assert second["finish_reason"] == "length"


@on_the_fake_engine
def test_chat_reads_turns_from_standard_input(
    run: Run, config: str, fake_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What color is the sky?\n\n   \n"))
    code, out, err = run("chat", "--max-tokens", "24", "--config", config)
    assert (code, err) == (0, "")
    assert out == fake_llm.chat(MESSAGES, SamplingParams(max_tokens=24)).get_text() + "\n"


def test_plugins_lists_every_part(run: Run, run_json: Any) -> None:
    records = run_json("plugins", "--json")
    fields = {"kind", "name", "op", "package", "version", "distribution", "state", "reason"}
    assert all(set(record) == fields for record in records)
    listed = {(record["kind"], record["name"]) for record in records}
    assert {
        ("engine", "vinference"),
        ("scheduler", "fcfs"),
        ("sampler", "standard"),
        ("platform", "cpu"),
    } <= listed
    code, out, _ = run("plugins")
    assert code == 0
    assert all(any(record["name"] in line for line in out.splitlines()) for record in records)


def test_explain_gives_every_choice_with_its_reason(run: Run, run_json: Any, config: str) -> None:
    record = run_json("explain", "--json", "--config", config, "--scheduler", "static")
    choices = {choice["setting"]: choice for choice in record["choices"]}
    assert record["steps"]["first"][0].startswith("decode ")
    assert not set(record["steps"]["first"]) & set(record["steps"]["later"])
    assert {
        "platform",
        "engine",
        "scheduler",
        "sampler",
        "dtype",
        "max_model_len",
        "layout",
    } <= set(choices)
    assert {"kernels.attention.decode", "kernels.attention.prefill", "kernels.linear"} <= set(
        choices
    )
    assert (choices["scheduler"]["chosen"], choices["scheduler"]["why"]) == (
        "static",
        "chosen by name",
    )
    assert choices["max_model_len"]["chosen"] == "160"
    assert all(
        set(choice) == {"setting", "chosen", "why", "refused"} for choice in record["choices"]
    )
    code, out, _ = run("explain", "--config", config)
    assert code == 0
    assert "kernels.attention.decode" in out


def test_config_shows_a_configuration_and_the_schema(run_json: Any, config: str) -> None:
    shown = run_json("config", "--config", config, "--max-num-seqs", "3", "--mesh", "tensor=2")
    assert (shown["max_num_seqs"], shown["decode_steps"], shown["mesh"]) == (3, 4, {"tensor": 2})
    assert shown["engine"] == {"name": "auto", "options": {}}
    assert "max_num_seqs" in run_json("config", "--schema")["properties"]


@pytest.fixture
def program_folder(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_env_shows_and_clears_compiled_programs(run_json: Any, program_folder: Path) -> None:
    (program_folder / "steps").mkdir()
    for name in ("jit_a-1-cache", "jit_a-1-atime", "steps/b.program", "another file"):
        (program_folder / name).write_bytes(b"12345")
    shown = {"folder": str(program_folder), "files": 3, "bytes": 15}
    assert run_json("env", "--json")["compiled_programs"] == shown
    cleared = run_json("env", "--json", "--clear-programs")["compiled_programs"]
    assert (cleared["files"], cleared["bytes"]) == (0, 0)
    assert [path.name for path in program_folder.rglob("*") if path.is_file()] == ["another file"]


def test_env_names_versions_and_devices(run: Run, run_json: Any) -> None:
    record = run_json("env", "--json")
    assert record["enginebay"] == __version__
    assert record["packages"]["jax"][0].isdigit()
    assert record["devices"]
    code, out, _ = run("env")
    assert code == 0
    assert f"enginebay: {__version__}" in out


def test_our_own_faults_end_with_code_1(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enginebay.errors import InternalError

    def broken(*_: Any, **__: Any) -> Any:
        raise InternalError("a broken invariant\nover two lines")

    monkeypatch.setattr("enginebay.serving.LLM", broken)
    code, _, err = run("generate", "--config", config)
    assert (code, err) == (1, "enginebay: a broken invariant over two lines\n")


@on_the_fake_engine
def test_interrupted_json_holds_what_there_is(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Iterator[StreamChunk]:
        yield StreamChunk("r", 1, "some ", (7, 8))
        yield StreamChunk("r", 0, "whole", (9,), "stop")
        yield StreamChunk("r", 1, "text", (10,))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    code, out, err = run("generate", "Once", "-n", "2", "--json", "--config", config)
    assert (code, err) == (130, "\n")
    first, second = map(json.loads, out.splitlines())
    assert (first["text"], first["finish_reason"]) == ("whole", "stop")
    assert (second["text"], second["token_ids"], second["finish_reason"]) == (
        "some text",
        [7, 8, 10],
        "abort",
    )


@on_the_fake_engine
def test_interrupted_chat_as_json_holds_what_there_is(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Iterator[StreamChunk]:
        yield StreamChunk("r", 0, "some ", (7, 8))
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    code, out, err = run("chat", "Hello!", "Again!", "--json", "--config", config)
    assert (code, err) == (130, "> Hello!\n\n")
    record = json.loads(out)
    assert (record["text"], record["token_ids"], record["finish_reason"]) == (
        "some ",
        [7, 8],
        "abort",
    )
    assert record["prompt_token_ids"]


@pytest.mark.parametrize("command", ["plugins", "env"])
def test_commands_that_need_no_configuration_check_one(
    run: Run, config: str, tmp_path: Path, command: str
) -> None:
    assert run(command, "--config", config)[0] == 0
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("max_seqs = 3")
    code, out, err = run(command, "--config", str(wrong))
    assert (code, out) == (2, "")
    assert "max_seqs" in err


def test_help_names_the_commands_of_plugins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = Declaration("command", "dance", "a:b", "dance 100% of the time")
    registry = Registry([Entry("command", "dance", "p", "1", "p", declaration=declared)])
    monkeypatch.setattr(sys.modules["enginebay.cli.program"], "load_registry", lambda *_: registry)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "dance 100% of the time" in capsys.readouterr().out


def test_help_and_version_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in [["--help"], ["--version"]] + [[command, "--help"] for command in summaries()]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"enginebay {__version__}" in out
    assert all(command in out for command in summaries())


@pytest.mark.long
def test_a_terminal_without_these_letters_gets_escapes_and_no_traceback() -> None:
    prompt = "Café 日本"
    flags = ("--model", BRIEF, "--max-tokens", "4", "--dtype", "float32", "--max-num-seqs", "1")
    done = subprocess.run(
        [sys.executable, "-m", "enginebay", "generate", prompt, *flags],
        capture_output=True,
        timeout=DEADLOCK_S,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout.decode("ascii").startswith("Caf\\xe9 \\u65e5\\u672c")
    assert b"Traceback" not in done.stderr


def test_the_program_and_the_module_are_entry_points() -> None:
    program = Path(sys.executable).with_name("enginebay")
    commands = [[sys.executable, "-m", "enginebay"]]
    if program.exists():
        commands.append([str(program)])
    for command in commands:
        done = subprocess.run(
            [*command, "genrate"],
            capture_output=True,
            text=True,
            timeout=DEADLOCK_S,
            check=False,
            env=os.environ,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert "Did you mean 'generate'" in done.stderr
        assert done.stderr.count("\n") == 1
