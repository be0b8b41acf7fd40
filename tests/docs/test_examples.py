"""The examples run: configuration files through the command line and Python, scripts as they stand."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from enginebay import LLM, SamplingParams
from enginebay.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
CONFIGS = sorted(EXAMPLES.glob("*.toml"))
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
PROMPT = "Once upon a time"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_file_chooses_the_parts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same file through `generate --config` and LLM.from_config: its choices are made, and tokens are equal."""
    assert main(["generate", PROMPT, "--config", str(path), "--max-tokens", "6", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    with LLM.from_config(path) as llm:
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


RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print("==", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


def test_scripts_run() -> None:
    """All of them in one process, since most of the time of each would go into starting."""
    command = [sys.executable, "-W", "error", "-c", RUN_ALL, *map(str, SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("== ")[1:]
    assert len(parts) == len(SCRIPTS) == 5
    for part in parts:
        assert len(part.split("\n", 1)[1].strip()) > 20, f"little was printed:\n{part}"
    assert "equal tokens" in done.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_its_cells_run_in_order(path: Path) -> None:
    """nbformat 4.5 as its schema wants it, without outputs, so that a change is a change of a cell."""
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
            exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
        else:
            assert (cell["cell_type"], set(cell)) == ("markdown", fields)
