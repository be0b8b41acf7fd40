"""--profile and --dump-step: what a command leaves in their folders, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.brief import TINY
from tests.unit.serving import SIZES


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration file of the smallest model."""
    path = tmp_path / "tiny.toml"
    choices = {"model": TINY, "processors": [], "compile_cache": "off"} | SIZES
    path.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in choices.items()))
    return str(path)


@pytest.mark.long
def test_a_command_leaves_a_trace_and_a_description_of_every_program(
    run: Callable[..., tuple[int, str, str]], config: str, tmp_path: Path
) -> None:
    trace, dump = tmp_path / "trace", tmp_path / "dump"
    flags = ["--config", config, "--profile", str(trace), "--dump-step", str(dump)]
    code, _, err = run("generate", "w5 w7", "--max-tokens", "4", *flags)
    assert (code, err) == (0, "")
    assert list(trace.rglob("*.xplane.pb"))
    records = {path.stem: json.loads(path.read_text()) for path in dump.glob("*.json")}
    kinds = {record["program"].split()[0] for record in records.values()}
    assert kinds == {"forward", "sample", "decode"}
    for name, record in records.items():
        assert "stablehlo" in (dump / f"{name}.stablehlo.txt").read_text()
        assert (dump / f"{name}.hlo.txt").read_text().startswith("HloModule")
        # cache and rows are updated in place
        assert (
            0
            < record["memory"]["alias_size_in_bytes"]
            <= record["memory"]["argument_size_in_bytes"]
        )


@pytest.mark.parametrize("flag", ["--profile", "--dump-step"])
def test_a_folder_that_cannot_be_written_is_refused(
    flag: str, run: Callable[..., tuple[int, str, str]], config: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("generate", "w5 w7", "--config", config, flag, str(tmp_path / "file"))
    assert (code, out) == (2, "")
    assert "cannot be written" in err


@pytest.mark.parametrize("command", [("chat", "w5 w7"), ("eval", "--text", "text")], ids=" ".join)
@pytest.mark.parametrize("flag", ["--profile", "--dump-step"])
def test_every_command_that_runs_one_engine_has_both_flags(
    flag: str,
    command: tuple[str, ...],
    run: Callable[..., tuple[int, str, str]],
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be written is refused: the flag is not ignored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("w5 w7 w9 " * 8)
    code, out, err = run(*command, "--config", config, flag, "text")
    assert (code, out) == (2, "")
    assert "cannot be written" in err
