"""A wrong flag of `enginebay serve` is one clear line and exit code 2, before a model is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from enginebay.cli.program import main


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with certificates, keys and files that are neither."""
    for name in ("one", "two"):
        subprocess.run(
            f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.pem -days 2 "
            "-subj /CN=localhost",
            shell=True, check=True, capture_output=True, cwd=tmp_path, timeout=60,
        )  # fmt: skip
    subprocess.run(
        "openssl pkey -aes128 -passout pass:secret -in one.key -out locked.key",
        shell=True, check=True, capture_output=True, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x01" * 100)
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line with which the command refuses its flags."""
    assert main(["serve", "demo", *flags]) == 2
    written = capsys.readouterr()
    assert not written.out
    [line] = written.err.splitlines()
    assert line.startswith("enginebay: ")
    assert ". Allowed: " in line
    return line


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing", "No such file"),
        ("folder", "Is a directory"),
        ("empty", "which has no key"),
        ("bytes", "no UTF-8 text"),
        ("one.key", "API key 1 of"),
    ],
)
def test_a_bad_key_file_is_refused(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    line = refusal(capsys, "--api-key-file", str(files / name))
    assert str(files / name) in line
    assert why in line
    assert "PRIVATE KEY" not in line


def test_a_key_file_that_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    # Root may read every file; reading this one fails for every user.
    line = refusal(capsys, "--api-key-file", "/proc/self/mem")
    assert "/proc/self/mem: Input/output error" in line


@pytest.mark.parametrize(
    ("cert", "key", "why"),
    [
        ("one.pem", "two.key", "mismatch"),
        ("one.key", "one.pem", "a certificate chain and its private key"),
        ("missing", "one.key", "No such file"),
        ("one.pem", "missing", "No such file"),
        ("folder", "folder", "Is a directory"),
        ("empty", "empty", "a certificate chain and its private key"),
        ("bytes", "bytes", "a certificate chain and its private key"),
        ("one.pem", "locked.key", "which is encrypted"),
    ],
)
def test_bad_tls_files_are_refused(
    files: Path, capsys: pytest.CaptureFixture[str], cert: str, key: str, why: str
) -> None:
    line = refusal(capsys, "--tls-cert", str(files / cert), "--tls-key", str(files / key))
    assert why in line
    assert str(files / key) in line


@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key"])
def test_one_tls_file_alone_is_refused(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert "Pass both" in refusal(capsys, flag, "file.pem")


@pytest.mark.parametrize("name", ["folder", "bytes", "missing/store"])
def test_a_bad_store_is_refused_before_a_model_is_loaded(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("enginebay_server.serving.load_model", load)
    line = refusal(capsys, "--port", "0", "--response-store", str(files / name))
    assert f"--response-store {files / name}" in line


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("", "--host ''"),
        ("192.0.2.1", "--host 192.0.2.1: Cannot assign requested address"),
        ("nobody.invalid", "--host nobody.invalid"),
    ],
)
def test_an_address_of_another_machine_is_refused(
    capsys: pytest.CaptureFixture[str], host: str, why: str
) -> None:
    line = refusal(capsys, "--port", "0", "--host", host)
    assert why in line
    assert "Pass --host 127.0.0.1" in line


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--port", ["-1", "65536", "http", "1.5", ""]),
        ("--keep-alive", ["-3", "nan", "1e9", "9999999999"]),
        ("--max-body-bytes", ["0", "-1", "8MB"]),
        ("--max-prompts", ["0", "-1"]),
        ("--max-n", ["0", "-1"]),
        ("--max-logprobs", ["-1", "21"]),
        ("--max-concurrency", ["0", "-1"]),
        ("--max-queue", ["-1", str(10**30)]),
        ("--request-timeout", ["0", "-1", "nan", "inf", "1e30", "soon"]),
        ("--body-timeout", ["0", "-1", "nan", "inf"]),
        ("--drain-timeout", ["-1", "nan", "inf"]),
        ("--max-responses", ["0", "-1"]),
        ("--response-ttl", ["-1", "nan", "inf"]),
    ],
)
def test_a_number_out_of_range_is_refused(
    capsys: pytest.CaptureFixture[str], flag: str, values: list[str]
) -> None:
    for value in values:
        line = refusal(capsys, flag, value)
        assert flag.removeprefix("--").replace("-", "_") in line.replace("-", "_"), value


def test_every_number_of_the_command_has_a_range() -> None:
    """A new flag needs a limit, and values in the test above."""
    import dataclasses

    from enginebay_server.settings import LIMITS, ServerSettings

    numbers = {
        one.name for one in dataclasses.fields(ServerSettings) if one.type in ("int", "float")
    }
    assert set(LIMITS) == numbers


@pytest.mark.parametrize(
    "origin", ["", "site.example", "https://", "https://site.example/", "null"]
)
def test_a_wrong_origin_is_refused(capsys: pytest.CaptureFixture[str], origin: str) -> None:
    assert repr(origin) in refusal(capsys, "--cors-origin", origin)


FIRST_LINE = """
import sys
from enginebay.cli.program import main

class FirstLine:
    def write(self, text):
        heavy = [name for name in ("jax", "fastapi", "transformers") if name in sys.modules]
        print(text.strip(), heavy, flush=True)
        raise SystemExit(0)

    def flush(self):
        pass

sys.stderr = FirstLine()
main(["serve", "demo", "--port", "0"])
"""


def test_the_first_line_comes_before_heavy_imports() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines()[0] == "enginebay: loading demo ... []"
