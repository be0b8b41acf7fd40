"""Both kernels keep the op's contract and compile without running. The commands that measure and
tune built-in ops measure and tune both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from enginebay_swiglu import plain
from enginebay_swiglu.blocks import Block
from enginebay_swiglu.kit import KIT

from enginebay.cli import main
from enginebay.ops.caps import Env
from enginebay.plugins.registry import load_registry
from enginebay_testing.cases import part_cases
from enginebay_testing.op_kit import CaseBudget
from enginebay_testing.verdicts import judge

KERNELS = ("plain", "blocks")
Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command; return its exit code and the JSON that it prints."""
    monkeypatch.setattr("enginebay_bench.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("enginebay_bench.roofline.MATRIX", 64)

    def command(*arguments: str) -> tuple[int, Any]:
        code = main([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return command


def cases(level: Any) -> list[pytest.ParameterSet]:
    registry = load_registry()
    entries = [registry.find("kernel", name, "swiglu") for name in KERNELS]
    return [
        pytest.param(case.run, id=f"{entry.name}-{case.name}")
        for entry in entries
        for case in part_cases(registry, entry, level)
        if case.representative
    ]


@pytest.mark.parametrize("check", cases("run"))
def test_a_kernel_keeps_the_contract(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("check", cases("compile"))
def test_a_kernel_compiles_at_the_sizes_of_a_real_model(check: Callable[[], Any]) -> None:
    assert check()["temp_bytes"] >= 0


def no_activation(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return plain.swiglu(x, gate, up) / jax.nn.sigmoid(x @ gate.T)


def test_the_kit_finds_a_wrong_kernel() -> None:
    first = next(iter(KIT.cases(no_activation, Env("cpu"), (), CaseBudget(triples=False))))
    assert judge(first.run).verdict == "INCORRECT"


def test_check_runs_the_kernel_by_its_name(run: Run) -> None:
    code, records = run("check", "kernel:swiglu:plain", "--case", "bfloat16-rows_17")
    assert code == 0
    assert {(r["op"], r["verdict"]) for r in records} == {("swiglu", "PASS")}


def test_bench_measures_both_kernels_beside_their_parity(run: Run) -> None:
    shape = ("--shapes", "smollm2-135m/decode/b1", "--rounds", "1", "--dtype", "float32,bfloat16")
    code, record = run("bench", "kernels", "--op", "swiglu", *shape)
    assert code == 0
    assert {figure["implementation"] for figure in record["figures"]} == set(KERNELS)
    for figure in record["figures"]:
        assert figure["parity"]["share"] <= 1
        assert figure["cost"]["flops"] == 4 * 576 * 1536


def test_tune_writes_a_table_that_steps_find(run: Run, tmp_path: Path) -> None:
    shape = ("--shapes", "smollm2-135m/decode/b1", "--rounds", "1", "--tuned-folder", str(tmp_path))
    code, record = run("tune", "--op", "swiglu", *shape)
    assert code == 0
    tuned, plainly = sorted(record["results"], key=lambda one: one["impl"])
    assert plainly["reason"] == "the implementation has no configurations here"
    assert tuned["num_tried"] == 5, "the default of 256 columns, and four others"
    (path,) = record["tables"]
    (entry,) = json.loads(Path(path).read_text(encoding="utf-8"))["entries"]
    assert entry["spec"] == {"in": 576, "out": 1536, "dtype": "float32"}
    assert Block(**entry["config"]).columns in (32, 64, 128, 256, 512)
