"""The examples run: configuration files through the command line and Python, scripts and notebooks
in order.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from enginebay import LLM, SamplingParams
from enginebay.cli.program import main
from tests.brief import BRIEF
from tests.docs.blocks import on_brief

pytestmark = pytest.mark.xdist_group("docs")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
PROMPT = "Once upon a time"


CASES = [
    pytest.param(path, marks=pytest.mark.long) if path.stem == "two_devices" else path
    for path in CONFIGS
]
"""Files of configurations; the long one is compiled."""


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_configuration_file_chooses_the_parts(
    path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same file through `generate --config` and LLM.from_config: its choices are made, and
    tokens are equal.
    """
    request.getfixturevalue("pooled" if path.stem == "two_devices" else "faked")
    flags = ("--model", BRIEF, "--config", str(path), "--max-tokens", "6", "--json")
    assert main(["generate", PROMPT, *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    with LLM.from_config(path, model=BRIEF) as llm:
        output = llm.generate(PROMPT, SamplingParams(max_tokens=6))[0]
        chosen = {reason.setting: reason.chosen for reason in llm.plan.reasons}
    assert output.outputs[0].token_ids == printed["token_ids"]
    assert len(printed["token_ids"]) == 6
    wanted = tomllib.loads(path.read_text(encoding="utf-8"))
    for part in ("engine", "scheduler", "sampler"):
        name = wanted[part] if isinstance(wanted[part], str) else wanted[part]["name"]
        assert chosen[part] == name
    attention = wanted["kernels"]["attention"]
    for phase in ("decode", "prefill", "mixed"):
        name = attention if isinstance(attention, str) else attention[phase]
        assert chosen[f"kernels.attention.{phase}"] == name


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the fake engine, without a warning."""
    code = compile(on_brief(path.read_text(encoding="utf-8")), str(path), "exec")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(code, {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert len(printed.strip()) > 20, f"little was printed:\n{printed}"
    if path.stem == "two_schedulers":
        assert "equal tokens" in printed


@pytest.mark.long
def test_script_runs_as_it_stands() -> None:
    """One of them, on the demo model, in a process that ends with the first warning."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / "stream.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 20
    assert done.stdout.rstrip().endswith(".")


def test_every_script_is_run() -> None:
    assert len(SCRIPTS) == 5


@pytest.mark.long
@pytest.mark.usefixtures("pooled")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_its_cells_run_in_order(path: Path) -> None:
    """nbformat 4.5 as its schema wants it, without outputs, so that a change is a change of
    a cell.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    namespace: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        fields = {"cell_type", "id", "metadata", "source"}
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert set(cell) == fields | {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
            exec(compile(on_brief("".join(cell["source"])), cell["id"], "exec"), namespace)
        else:
            assert (cell["cell_type"], set(cell)) == ("markdown", fields)
