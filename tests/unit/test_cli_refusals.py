"""Wrong input on the command line: exit code 2, one line on stderr that says what is wrong, and no
traceback.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.brief import BRIEF

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def nan_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small model with a NaN in its last norm."""
    folder = tmp_path_factory.mktemp("models") / "nan"
    shutil.copytree(BRIEF, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    tensor = json.loads(data[8 : 8 + size])["model.norm.weight"]
    assert tensor["dtype"] == "BF16"
    start = 8 + size + tensor["data_offsets"][0]
    data[start : start + 2] = b"\xc0\x7f"
    path.write_bytes(data)
    return str(folder)


def assert_one_line(found: tuple[int, str, str], *parts: str) -> None:
    """Wrong input: code 2, nothing on stdout, one line on stderr that holds the parts."""
    code, out, err = found
    assert (code, out) == (2, "")
    assert err.startswith("enginebay: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("generate", ""), ("an empty prompt",)),
        (("generate", "word " * 400), ("a prompt of ", "at most 159")),
        (("generate", "lone \udc80"), ("lone surrogate",)),
        (("generate", "--prompt-ids", ""), ("--prompt-ids",)),
        (("generate", "--prompt-ids", "1,x"), ("--prompt-ids 1,x",)),
        (("generate", "--prompt-ids", "1,99999"), ("token id 99999",)),
        (("generate", "text", "--prompt-ids", "1"), ("a prompt and --prompt-ids",)),
        (("generate", "--max-tokens", "0"), ("max_tokens = 0", "of at least 1")),
        (("generate", "--max-tokens", "some"), ("--max-tokens",)),
        (("generate", "--temperature", "nan"), ("temperature = nan",)),
        (("generate", "--presence-penalty", "-3"), ("presence_penalty = -3",)),
        (("chat", "hello", "--repetition-penalty", "0"), ("repetition_penalty = 0",)),
        (("generate", "--top-p", "0"), ("top_p = 0.0",)),
        (("generate", "-n", "0"), ("n = 0",)),
        (("generate", "--json", "--logprobs", "21"), ("logprobs = 21", "from -1 to 20")),
        (("generate", "--logprobs", "2"), ("--logprobs 2 without --json",)),
        (("generate", "--prompt-logprobs", "2"), ("--prompt-logprobs 2 without --json",)),
        (
            ("generate", "--json", "--prompt-logprobs", "-1"),
            ("prompt_logprobs = -1", "from 0 to 20"),
        ),
        (("generate", "-n", "3", "--best-of", "2"), ("best_of = 2", "at least n")),
        (("chat", "Hello", "--best-of", "2"), ("--best-of 2 in a conversation",)),
        (("generate", "--stop-words-ids", "1;2"), ("--stop-words-ids 1;2", "commas")),
        (("generate", "--stop-words-ids", "5,99999"), ("token id in stop_words_ids 99999",)),
        (("chat", "Hello", "--logprobs", "2"), ("--logprobs 2 without --json",)),
        (
            ("generate", "--engine", "vinferense"),
            ("unknown engine 'vinferense'", "Did you mean 'vinference'"),
        ),
        (("generate", "--scheduler", "fcsf"), ("unknown scheduler 'fcsf'", "Did you mean 'fcfs'")),
        (("generate", "--sampler", "gredy"), ("unknown sampler 'gredy'", "Did you mean 'greedy'")),
        (("generate", "--attention", "xlaa"), ("'xlaa'",)),
        (
            ("generate", "--attention", "decod=xla"),
            ("kernels.attention.decod", "Did you mean 'decode'"),
        ),
        (
            ("generate", "--kernel", "atention=xla"),
            ("unknown op 'atention'", "Did you mean 'attention'"),
        ),
        (("generate", "--kernel", "linear.decode=xla"), ("kernels.linear differs by phase",)),
        (("generate", "--kernel", "linear"), ("--kernel linear", "OP[.PHASE]=NAME")),
        (("generate", "--layout", "hndd"), ("unknown layout 'hndd'",)),
        (("generate", "--platform", "cpuu"), ("unknown platform 'cpuu'", "Did you mean 'cpu'")),
        (("generate", "--dtype", "int3"), ("dtype = 'int3'",)),
        (("generate", "--mesh", "tensor=999"), ("needs 999 devices",)),
        (("generate", "--max-model-len", "99999"), ("max_model_len = 99999", "at most 1024")),
        (("generate", "--max-num-seqs", "0"), ("max_num_seqs = 0",)),
        (("generate", "--sampler", "greedy", "--temperature", "1"), ("greedy only",)),
        (("generate", "--bogus"), ("--bogus", "--help")),
        (("chat", "Hello", "-n", "2"), ("-n 2 in a conversation",)),
        (("explain", "--engine", "nothing"), ("unknown engine 'nothing'",)),
        (("bench", "latency", "--rounds", "0"), ("--rounds 0",)),
        (("bench", "latency", "--prompt-len", "-1"), ("--prompt-len -1",)),
        (("bench", "throughput", "--num-requests", "0"), ("--num-requests 0",)),
        (("bench", "latency", "--num-requests", "2"), ("run bench throughput",)),
        (("bench", "speed"), ("'speed'",)),
    ],
)
def test_wrong_input_ends_with_code_2_and_one_line(
    run: Run, config: str, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_one_line(run(*arguments, "--config", config), *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("genrate", "text"), ("unknown command 'genrate'", "Did you mean 'generate'")),
        (("plugins", "extra"), ("the word 'extra'", "only flags")),
        (
            ("generate", "Once", "upon", "a", "time"),
            ("a second word 'upon'", "generate 'Once upon a time'"),
        ),
        (
            ("generate", "--tensor-parallel-size", "2"),
            ("--tensor-parallel-size", "Here it is --mesh tensor=N"),
        ),
        (("generate", "--gpu-memory-utilization=0.9"), ("--set engine.memory_utilization=X",)),
        (("bench", "latency", "--enforce-eager"), ("Leave it out: every step is compiled",)),
        (("generate", "--max-num", "3"), ("--max-num-seqs or --max-num-batched-tokens", "in full")),
        (
            ("generate", "--max-model", "160"),
            ("incomplete flag --max-model", "--max-model-len"),
        ),
        (
            ("generate", "--temprature", "1"),
            ("unknown flag --temprature", "Did you mean --temperature?"),
        ),
        (("generate", "--temperature", "hot"), ("--temperature 'hot'. Allowed: a number.",)),
        (("chat", "--port", "3"), ("unknown flag --port", "Leave it out.")),
        (("bench",), ("`enginebay bench` without saying what. Allowed: latency, throughput",)),
        (
            ("explain", "--set", "page_size=3"),
            ("page_size = 3, an unknown field", "Here it is engine.page_size"),
        ),
        (("generate", "--stop"), ("--stop without a value", "--stop=VALUE")),
        (
            ("--max-tokens", "3", "generate"),
            ("--max-tokens before the command", "after the command"),
        ),
        (
            ("bench", "latencey"),
            ("'latencey'. Allowed: latency, throughput, kernels, serve", "Did you mean 'latency'?"),
        ),
        (("bench", "serve", "--engine", "oengine"), ("--engine with bench serve",)),
        (("bench", "serve", "--op", "linear"), ("--op with bench serve",)),
        (("bench", "latency", "--rates", "3"), ("--rates with bench latency", "run bench serve")),
        (("bench", "serve", "--rates", "0"), ("--rates 0", "numbers above 0", "--rates 1,2,4")),
        (("bench", "serve", "--concurrency", "1.5"), ("--concurrency 1.5", "whole numbers")),
        (
            ("bench", "serve", "--rates", "1", "--concurrency", "1"),
            ("--rates with --concurrency", "one of the two"),
        ),
        (("bench", "serve", "--find-rate"), ("--find-rate without --slo", "ttft=200ms,tpot=50ms")),
        (("bench", "serve", "--slo", "ttft=5"), ("--slo ttft=5", "unit us, ms or s")),
        (("bench", "serve", "--duration", "5"), ("--duration without rates", "--rates 4")),
        (("bench", "serve", "--length-spread", "2"), ("--length-spread 2", "0 to 1")),
        (("explain", "--dtype", "fp16"), ("dtype = 'fp16'", "Did you mean 'float16'?")),
        (("explain", "--platform", "gpu"), ("unknown platform 'gpu'", "Did you mean 'cuda'?")),
        (("explain", "--set", "engine.page_size"), ("--set engine.page_size", "KEY=VALUE")),
        (
            ("explain", "--set", "engine.pagesize=8"),
            ("pagesize = 8, an unknown field", "'page_size'"),
        ),
        (("explain", "--set", "max_num_seqs=none"), ("max_num_seqs = 'none'", "from 1 to 4096")),
        (("env", "--log-level", "loud"), ("--log-level", "loud")),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(
    run: Run, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_one_line(run(*arguments), *parts)


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        (
            "engin = 'vinference'",
            ("engin = 'vinference', an unknown field", "Did you mean 'engine'"),
        ),
        (
            "[engine]\nname = 'vinference'\npagesize = 8",
            ("engine 'vinference': pagesize = 8", "page_size, grow"),
        ),
        ("[scheduler]\nname = 'fcfs'\nx = 1", ("scheduler 'fcfs': x = 1",)),
        ("[sampler]\nname = 'greedy'\nx = 1", ("options x for sampler 'greedy'",)),
        ("[kernels]\nattention = { decode = 'nope' }", ("'nope'",)),
        ("= 3", ("wrong.toml",)),
    ],
)
def test_a_wrong_configuration_file_ends_with_code_2(
    run: Run, tmp_path: Path, toml: str, parts: tuple[str, ...]
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(toml)
    assert_one_line(run("generate", "Once", "--config", str(path)), *parts)
    assert_one_line(run("generate", "Once", "--config", str(tmp_path / "none.toml")), "none.toml")


def test_a_folder_that_is_no_model_ends_with_code_2(run: Run, config: str, tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("nothing")
    assert_one_line(run("generate", "--model", str(tmp_path), "--config", config), "no config.json")
    file = str(tmp_path / "readme.txt")
    assert_one_line(run("generate", "--model", file, "--config", config), "is a file")
    missing = str(tmp_path / "missing")
    assert_one_line(
        run("generate", "--model", missing, "--config", config), "there is no such folder"
    )


def test_nan_in_the_weights_is_told_when_asked_for(run: Run, config: str, nan_model: str) -> None:
    flags = ("generate", "--model", nan_model, "--max-tokens", "1", "--config", config)
    assert_one_line(run(*flags, "--verify-weights"), "model.norm.weight", "NaN")
    code, out, err = run(*flags)
    assert (code, out) == (1, "")
    assert "have NaN or infinity" in err
    assert "--verify-weights" in err


def test_standard_input_that_is_no_text_ends_with_code_2(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (("generate", "-"), ("chat",)):
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8")
        )
        assert_one_line(run(*command, "--config", config), "standard input")


def test_bench_serve_without_httpx_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "enginebay_bench.serve.client", raising=False)
    monkeypatch.setitem(sys.modules, "httpx", None)
    found = run("bench", "serve")
    assert_one_line(found, "bench serve without httpx", "pip install 'enginebay[bench]'")
