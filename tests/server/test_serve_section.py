"""The section [serve] of a configuration file says what flags of `serve` say."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from enginebay.cli.program import main
from enginebay.toml_file import read_settings
from enginebay_server import serving
from tests.server.process import ServerProcess

FILE = """
max_num_seqs = 3
dtype = "float32"

[serve]
host = "127.0.0.2"
port = 8123
max_concurrency = 7
request_timeout = 5
warmup = "lazy"
lora_routes = true
cors_origin = ["https://a.example"]

[[serve.models]]
name = "small"
model = "demo"
max_model_len = 64
max_num_seqs = 2

[[serve.models]]
model = "demo"
"""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` would have served: the arguments of each call."""
    found: list[Any] = []

    def noted(*arguments: Any) -> int:
        found.append(arguments)
        return 0

    monkeypatch.setattr(serving, "serve", noted)
    return found


def file_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "serve.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_models_limits_and_address_come_from_the_file(tmp_path: Path, served: list[Any]) -> None:
    assert main(["serve", "--config", file_of(tmp_path, FILE)]) == 0
    ((configs, address, settings, _),) = served
    assert list(configs) == ["small", "demo"]
    small, demo = configs.values()
    assert (small.max_model_len, small.max_num_seqs, small.dtype) == (64, 2, "float32")
    assert (demo.max_model_len, demo.max_num_seqs, demo.dtype) == (None, 3, "float32")
    assert (address.host, address.port) == ("127.0.0.2", 8123)
    assert (settings.max_concurrency, settings.request_timeout_s) == (7, 5.0)
    assert (settings.warmup, settings.lora_routes) == ("lazy", True)
    assert settings.cors_origins == ("https://a.example",)


def test_a_flag_overrides_the_file(tmp_path: Path, served: list[Any]) -> None:
    flags = ["--host", "127.0.0.1", "--port", "8000", "--max-num-seqs", "4"]
    assert main(["serve", "--config", file_of(tmp_path, FILE), *flags]) == 0
    ((configs, address, settings, _),) = served
    assert (address.host, address.port) == ("127.0.0.1", 8000), "also with the flag's own default"
    assert [config.max_num_seqs for config in configs.values()] == [4, 4]
    assert settings.max_concurrency == 7
    assert main(["serve", "demo", "--config", file_of(tmp_path, FILE)]) == 0
    assert list(served[1][0]) == ["demo"]
    flags = ["--cors-origin", "https://b.example", "--cors-origin", "https://c.example"]
    assert main(["serve", "--model", "demo", "--config", file_of(tmp_path, FILE), *flags]) == 0
    assert list(served[2][0]) == ["demo"]
    assert served[2][2].cors_origins == ("https://b.example", "https://c.example")


def test_a_file_that_can_be_read_once_is_enough(tmp_path: Path, served: list[Any]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(FILE,), daemon=True)
    writer.start()
    assert main(["serve", "--config", str(pipe)]) == 0
    assert [config.max_num_seqs for config in served[0][0].values()] == [2, 3]


def test_engines_do_not_share_the_file_of_a_capture(
    tmp_path: Path, served: list[Any], capsys: Any
) -> None:
    capture = ["--capture", str(tmp_path / "x.trace")]
    assert main(["serve", "--config", file_of(tmp_path, FILE), *capture]) == 2
    assert "for several engines. Allowed: a file for each engine" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("prot = 8000", "Did you mean 'port'"),
        ("max_num_seqs = 3", "Settings of engines stand outside of [serve]"),
        ('port = "8000"', "serve.port = '8000'. Allowed: a whole number"),
        ("port = true", "Allowed: a whole number"),
        ("request_timeout = 'x'", "Allowed: a number"),
        ("lora_routes = 1", "Allowed: true or false"),
        ("cors_origin = 'a'", "Allowed: a list of texts"),
        ("warmup = 'never'", "Allowed: one of background, full, lazy"),
        ("host = 1", "Allowed: a text"),
        ('models = [{model = "demo", name = true}]', "a text if it has a `name`"),
        ('models = ["demo", "demo"]', "set `name` in each table of serve.models"),
        ("models = [1]", "a model, or a table with the text `model`"),
        ('models = [{name = "x"}]', "a model, or a table with the text `model`"),
        ('models = [{model = "demo", max_num_sequences = 1}]', "max_num_seq"),
        ("max_concurrency = 0", "max_concurrency = 0. Allowed: 1 or more"),
    ],
)
def test_a_wrong_line_is_refused(
    line: str, says: str, tmp_path: Path, served: list[Any], capsys: Any
) -> None:
    assert main(["serve", "--config", file_of(tmp_path, f"[serve]\n{line}\n")]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not served


def test_other_commands_take_the_same_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, FILE)
    assert read_settings(path) == {"max_num_seqs": 3, "dtype": "float32"}
    assert main(["config", "--config", path]) == 0


def test_a_server_serves_what_its_file_says(tmp_path: Path) -> None:
    text = '[serve]\nwarmup = "lazy"\n[[serve.models]]\nname = "tiny"\nmodel = "demo"\n'
    with ServerProcess("--config", file_of(tmp_path, text), models=()) as server:
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert model["id"] == "tiny"
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "tiny", "prompt": "Once", "max_tokens": 2},
            timeout=60,
        )
        assert answer.json()["usage"]["completion_tokens"] == 2
