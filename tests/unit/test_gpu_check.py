"""`make gpu-check` without a GPU: the same script and stages, on small shapes."""

import importlib
import json
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def script(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the script's modules by name, as it imports them itself, and lets go of them
    afterwards.
    """
    monkeypatch.syspath_prepend(str(repo_root / "tools" / "gpu_check"))
    yield importlib.import_module
    for name in ("run", "bundle", "installing", "shapes"):
        sys.modules.pop(name, None)


def run(repo_root: Path, tmp_path: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    report = tmp_path / "figures.json"
    script = repo_root / "tools" / "gpu_check" / "run.py"
    command = [
        sys.executable,
        str(script),
        "--installed",
        "--tiny",
        "--json",
        str(report),
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=repo_root)
    return (
        done.returncode,
        done.stdout + done.stderr,
        json.loads(report.read_text()) if report.exists() else {},
    )


@pytest.mark.long
def test_stream_and_kernel_are_measured(repo_root: Path, tmp_path: Path) -> None:
    code, text, report = run(repo_root, tmp_path, "--stages", "stream,kernel")
    assert code == 0, text
    figures = {figure["figure"]: figure for figure in report["figures"]}
    assert any(
        "read-only stream" in name and figure["value"] > 0 for name, figure in figures.items()
    )
    assert figures["xla decode attention, 2 rows of 128"]["fraction"] > 0
    assert "| kernel | xla decode attention, 2 rows of 128 |" in text


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.1-8b"])
def test_engines_are_measured_on_models_of_both_families(
    repo_root: Path, tmp_path: Path, model: str
) -> None:
    work = ("--stages", "eval,engines,torch", "--models", model, "--batches", "1,2")
    code, text, report = run(repo_root, tmp_path, *work)
    assert code == 0, text
    rates = [
        f for f in report["figures"] if f["unit"] == "tokens/s" and f["stage"].startswith("engines")
    ]
    assert len(rates) == 4, report  # two engines, two batches
    assert all(
        f["value"] is None or f["value"] > 0 for f in rates
    )  # None: such small work drowned in noise
    divergence = next(
        f for f in report["figures"] if f["figure"] == f"{model} float32, KL divergence of decode"
    )
    assert 0 <= divergence["value"] < 1e-6


@pytest.mark.slow
def test_the_platforms_own_kernels_are_checked_and_the_hosts_time_is_told(
    repo_root: Path, tmp_path: Path
) -> None:
    code, text, report = run(repo_root, tmp_path, "--stages", "check,host", "--engines", "oengine")
    assert code == 0, text
    units = {f["figure"]: f["unit"] for f in report["figures"]}
    assert "PASS" in units["check --level run kernel:attention:native"]
    assert units["oengine, 2 rows: CPU time of a step"] == "us"


def test_without_a_gpu_it_says_so_and_measures_nothing(repo_root: Path) -> None:
    command = [sys.executable, "tools/gpu_check/run.py", "--installed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=repo_root)
    assert done.returncode == 2
    assert "no GPU: JAX finds no cuda device" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


LISTING = """000: kCommandBuffer [source       | next=021 (1)]
    001: kCopy         [source        | sink        ] kCopy
021: kWhile         [prev=000 (1) | next=199 (1)]
    000: kCommandBuffer [source       | next=160 (1)]
        034: kCustomCall   [prev=033 (1) | next=035 (1)] kCustomCall
    160: kConditional   [prev=000 (1) | next=000 (1)]
        000: kCommandBuffer [source       | next=158 (1)]
199: kCustomKernel  [prev=021 (1) | sink        ] fusion
"""


def test_graphs_of_a_step_are_counted_in_xlas_listing(script: Any) -> None:
    count = script("run").count_graphs
    assert count(LISTING) == (1, 1)  # the loop's body: a graph, and what it branches over
    assert count(LISTING.replace("kWhile", "kSequential")) == (1, 2)
    within = "000: kCommandBuffer\n" + "\n".join(f"    {line}" for line in LISTING.splitlines())
    assert count(within) == (1, 0)  # the loop too
    assert count(within.replace("000: kCommandBuffer\n", "000: kSequential\n")) != (1, 0)


def test_what_the_machine_has_is_not_bundled(script: Any) -> None:
    bundle = script("bundle")
    there = bundle.present(
        "# of the machine\njax==0.11.2\nTyping_Extensions==4.1\ntorch==2.11.0+cu130\n-e .\n"
    )
    assert there == {"jax": "0.11.2", "typing-extensions": "4.1", "torch": "2.11.0+cu130"}
    needed = [
        ("jax", "0.11.2"),
        ("pydantic", "2.14"),
        ("typing.extensions", "4.1"),
        ("enginebay", "0.1"),
    ]
    assert bundle.lacking(needed, there) == ["pydantic==2.14"]


def checkout_with(root: Path, package: str) -> Path:
    """The folder of the only package of a checkout."""
    declared = f'[tool.hatch.build.targets.wheel]\npackages = ["{package}"]\n'
    (root / "pyproject.toml").write_text(declared)
    (root / package).mkdir(parents=True)
    return root / package


def test_a_bundle_of_another_tree_is_noticed(script: Any, tmp_path: Path) -> None:
    wheel, package = tmp_path / "one.whl", checkout_with(tmp_path, "core/ours")
    (package / "a.py").write_text("A = 1\n")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(package / "a.py", "ours/a.py")
        archive.writestr("ours-1.dist-info/RECORD", "")
    changed = script("installing").changed
    assert changed(wheel, tmp_path) is None
    (package / "b.py").write_text("")
    assert changed(wheel, tmp_path) == "ours/b.py"
    (package / "a.py").write_text("A = 2\n")
    assert changed(wheel, tmp_path) == "ours/a.py"


def wheel_of(folder: Path, name: str, needs: str = "") -> Path:
    """A wheel of one module, which pip installs."""
    wheel, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "A = 1\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_a_bundle_is_installed_where_it_is_of_the_same_tree(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pip", reason="a bundle is installed by pip, which the test extra has")
    bundle, into = tmp_path / "bundle", tmp_path / "into"
    bundle.mkdir()
    wheel_of(bundle, "enginebay", needs="somethingneeded")
    for name in ("jax_triton", "somethingneeded", "unneeded", "absl_py"):
        wheel_of(bundle, name)
    package = checkout_with(tmp_path, "core/enginebay")
    (package / "__init__.py").write_text("A = 2\n")
    installing = script("installing")
    monkeypatch.setattr(installing, "ROOT", tmp_path)
    with pytest.raises(
        SystemExit, match=r"does not match this checkout: enginebay/__init__\.py differs"
    ):
        installing.install(bundle, into, "1.0")
    assert not into.exists()
    (package / "__init__.py").write_text("A = 1\n")
    assert installing.install(bundle, into, "1.0") == into
    there = {path.parent.name for path in into.glob("*/__init__.py")}
    assert there - {"absl_py"} == {"enginebay", "jax_triton", "somethingneeded"}


def test_without_a_bundle_it_says_how_to_make_one(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="make gpu-bundle"):
        script("installing").install(tmp_path, tmp_path / "into", "0.3.1")


STAGES = """#!/bin/sh
echo '{"figure": "a figure of '$2'", "value": 1.0, "unit": "x"}'
case "$2" in engine) exec sleep 600;; esac
"""
ENGINES = ("--stages", "stream,engines", "--models", "qwen3-0.6b", "--engines", "oengine")


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    """In the place of Python, which runs the stages: each tells a figure at once, and an engine's
    never ends.
    """
    path = tmp_path / "stages"
    path.write_text(STAGES)
    path.chmod(0o700)
    return path


@pytest.fixture
def measured(
    script: Any, stages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, list[str]]]]:
    """Runs the script over those stages: its exit code, and what its report calls failed."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "executable", str(stages))

    def call(*arguments: str) -> tuple[int, list[str]]:
        report = tmp_path / "report.json"
        code = script("run").main(["--installed", "--tiny", "--json", str(report), *arguments])
        return code, json.loads(report.read_text())["failed"]

    yield call
    signal.signal(signal.SIGTERM, before)


def test_a_stage_that_does_not_end_is_told_of_and_fails(
    measured: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, failed = measured(*ENGINES, "--timeout", "2")
    assert (code, failed) == (1, ["engines qwen3-0.6b oengine: not finished after 2 s"])
    told = capsys.readouterr().out
    assert "FAILED  engines qwen3-0.6b oengine" in told
    assert "a figure of stream" in told
    assert "a figure of engine" in told, "what it said before it was stopped"


def test_stages_past_the_budget_are_left_out_and_it_fails(
    measured: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    code, failed = measured("--stages", "stream,kernel", "--budget", "0")
    assert code == 1
    assert failed == [
        "stream: left out, because no time is left",
        "kernel: left out, because no time is left",
    ]
    assert "| device |" in capsys.readouterr().out


STOPPED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import run

signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
figures = []
stage = 'import json, time; print(json.dumps(dict(figure="a", value=1)), flush=True); '
stage += "time.sleep(600)"
try:
    run._run("stage", [sys.executable, "-c", stage], os.environ, 900.0, figures)
finally:
    print(figures)
"""


def test_a_signal_stops_a_stage_that_says_nothing_and_keeps_what_it_said(repo_root: Path) -> None:
    command = [sys.executable, "-c", STOPPED, str(repo_root / "tools" / "gpu_check")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith('{"figure"'))
        process.terminate()
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "{'stage': 'stage', 'figure': 'a', 'value': 1}" in told


WHOLE = """
import sys
folder, sys.executable, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
import run

sys.exit(run.main(arguments))
"""


def test_what_was_measured_is_told_when_a_signal_comes(repo_root: Path, stages: Path) -> None:
    folder = str(repo_root / "tools" / "gpu_check")
    command = [sys.executable, "-c", WHOLE, folder, str(stages), "--installed", "--tiny", *ENGINES]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "a figure of engine" in line)
        process.terminate()
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a figure of stream" in told


def test_a_checkpoint_that_was_not_written_to_its_end_is_written_anew(
    script: Any, tmp_path: Path
) -> None:
    shapes = script("shapes")
    folder, config = tmp_path / "model", shapes.config("qwen3-0.6b", tiny=True)
    part = tmp_path / "model.part"
    part.mkdir()
    (part / "model-7.safetensors").write_bytes(b"half")
    assert shapes.write(folder, config, "float32") == folder
    assert not part.exists()
    assert [path.name for path in folder.glob("*.safetensors")] == ["model-0.safetensors"]
    (folder / "marker").touch()
    shapes.write(folder, config, "float32")  # it is there: nothing is written
    assert (folder / "marker").exists()


def test_a_stage_that_is_none_is_refused(repo_root: Path, tmp_path: Path) -> None:
    code, text, _ = run(repo_root, tmp_path, "--stages", "strem")
    assert code == 2
    assert "strem" in text
