"""The fault zoo is well made, and the check finds faults in it."""

from __future__ import annotations

import collections
import functools
from pathlib import Path
from typing import get_args

import pytest

from tests.zoo.faults import Fault, Kind, source_text
from tests.zoo.runs import OPS, Finding, find
from tests.zoo.table import put_into, summary
from tests.zoo.zoo import FAULTS, RIGHT, SAMPLE

HALF_A = [fault for fault in FAULTS if fault.half == "A"]


@functools.cache
def text_of(source: str) -> str:
    return source_text(next(fault for fault in FAULTS if fault.source == source))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_line_that_stands_once_in_its_source(fault: Fault) -> None:
    assert text_of(fault.source).count(fault.old) == 1
    assert fault.old != fault.new
    assert "\n" not in fault.old + fault.new


def test_half_a_has_every_op_and_every_kind_of_fault_and_few_that_are_interpreted() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len(HALF_A) >= 80
    assert {fault.op for fault in HALF_A} == set(OPS)
    assert {fault.kind for fault in HALF_A} == set(get_args(Kind))
    assert sum(not fault.is_plain for fault in FAULTS) <= 20


def test_ci_runs_seventeen_faults_of_all_ops() -> None:
    ops = collections.Counter(fault.op for fault in FAULTS if fault.name in SAMPLE)
    assert sum(ops.values()) == len(SAMPLE) == 17
    assert set(ops) == set(OPS)
    assert {op for op, _ in RIGHT} == set(OPS)


def named(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def test_a_fault_is_found_by_the_default_check() -> None:
    found = find(named("kv_write_swaps_keys_and_values"), triples=False)
    assert found.default
    assert found.all
    assert found.detail.startswith("INCORRECT")


def test_ids_that_16_bits_do_not_hold_are_found() -> None:
    found = find(named("b_embedding_ids_of_sixteen_bits"), triples=False)
    assert found.default
    assert "vocab_70000" in found.case


def test_a_planted_copy_leaves_the_right_kernel_as_it_is() -> None:
    from enginebay_xla.kv_write import kv_write
    from tests.zoo.faults import planted

    faulty = planted(named("kv_write_swaps_keys_and_values"))
    assert faulty.__module__ != kv_write.__module__
    assert Path(faulty.__code__.co_filename).parent.name.startswith("zoo_")


def test_the_table_counts_what_each_check_found() -> None:
    names = [fault.name for fault in HALF_A][:20]
    findings = [Finding(name, default=i > 0, all=True) for i, name in enumerate(names)]
    text, good = summary(findings)
    assert "| all | 19, 20 of 20 | 0 |" in text
    assert f"Found by `--all` alone: {names[0]}. Missed: none." in text
    assert good
    text, good = summary([Finding(name, default=False, all=i > 0) for i, name in enumerate(names)])
    assert "| all | 0, 19 of 20 | 0 |" in text
    assert not good
    late = [Finding(name, default=i > 1, all=True) for i, name in enumerate(names)]
    assert not summary(late)[1], "the default check finds less than 95 percent"


def test_the_table_replaces_the_one_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- zoo: begin -->\nold\n<!-- zoo: end -->\nafter\n", encoding="utf-8"
    )
    put_into(page, "new")
    assert (
        page.read_text(encoding="utf-8")
        == "before\n<!-- zoo: begin -->\nnew\n<!-- zoo: end -->\nafter\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_the_default_check_finds_what_ci_runs(name: str) -> None:
    assert find(named(name), triples=False).default
