"""compare ranks no engine with a kernel that cheats, and draws its prompts in secret."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from enginebay.config import EngineConfig
from enginebay_bench.compare.process import VariantError
from enginebay_bench.compare.records import Cell, read_record
from enginebay_bench.compare.session import compare, workload
from enginebay_bench.compare.table import cell_table, remarks
from enginebay_bench.compare.variants import ComparedVariant, engine_variant, foreign_kernels
from enginebay_testing.kernel_trial import KernelRequest
from enginebay_testing.trial import EARLIER
from enginebay_testing.verdicts import Outcome
from tests.unit.test_compare import CELL, FAKE, fake

PATH = "tests.zoo.cheats.results:last_call"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[KernelRequest]:
    """The trials that a comparison asks for; all of them find a cheat."""
    found: list[KernelRequest] = []

    def tried(request: KernelRequest) -> Outcome:
        found.append(request)
        return Outcome("CHEAT", EARLIER)

    monkeypatch.setattr("enginebay_testing.kernel_trial.tried_apart", tried)
    return found


def cheating(name: str) -> ComparedVariant:
    kernels = foreign_kernels({"rms_norm.decode": PATH, "rms_norm.prefill": PATH}, "cpu")
    return dataclasses.replace(fake(name), kernels=tuple(kernels))


def test_an_engine_with_a_kernel_that_cheats_is_named_and_never_ranked(
    asked: list[KernelRequest],
) -> None:
    variants = [fake("right"), cheating("bad"), cheating("worse")]
    found = compare(variants, [CELL], rounds=1, seed=5)
    assert [row.variant for row in found.ranking(CELL)] == ["right"]
    verdicts = {row.variant: row.parity for row in found.rows}
    for name in ("bad", "worse"):
        assert verdicts[name].verdict == "cheat"
        assert verdicts[name].text == f"rms_norm kernel {PATH} {EARLIER}"
    assert not found.is_right
    assert any("not ranked: cheat" in cell for row in cell_table(found, CELL)[1] for cell in row)
    assert "--seed 5 repeats the prompts." in remarks(found)
    assert [(one.op, one.kernel, one.seed) for one in asked] == [("rms_norm", PATH, 5)]


@pytest.mark.usefixtures("asked")
def test_a_reference_that_cheats_ends_the_comparison() -> None:
    with pytest.raises(VariantError, match=EARLIER):
        compare([cheating("bad"), fake("right")], [CELL], rounds=1)


def test_the_kernels_of_a_configuration_that_are_not_built_in_are_tried() -> None:
    config = EngineConfig.model_validate({"kernels": {"rms_norm": PATH, "linear": "xla"}})
    (one,) = engine_variant("mine", config).kernels
    assert (one.op, one.name, one.platform) == ("rms_norm", PATH, config.platform)
    assert not foreign_kernels({"attention.decode": "xla", "layout": "hnd"}, "cpu")


def test_prompts_are_secret_and_can_be_repeated(tmp_path: Path) -> None:
    for cell in (CELL, Cell(3, 16, 8)):
        made = [workload(cell, 1, 500, seed) for seed in (4, 4, 5)]
        assert made[0] == made[1]
        assert made[0].prompts != made[2].prompts
        assert made[0].new_tokens == made[2].new_tokens
        assert [len(p) for p in made[0].prompts] == [len(p) for p in made[2].prompts]
    seeds: set[Any] = set()
    for number in range(2):
        path = str(tmp_path / f"{number}.jsonl")
        variant = ComparedVariant("a", (sys.executable, str(FAKE)))
        compare([variant], [CELL], rounds=1, output=path)
        seeds.add(read_record(path).header["seed"])
    assert len(seeds) == 2
