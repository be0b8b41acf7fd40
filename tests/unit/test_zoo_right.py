"""Right kernels that are organised otherwise: they are listed, say what they serve, and are counted
as false alarms where a case refuses them.
"""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from enginebay.errors import UnsupportedError
from enginebay.ops.caps import Env
from enginebay_testing.op_kit import CaseBudget, kit_of
from enginebay_testing.quantized import random_weight
from tests.zoo.__main__ import parser
from tests.zoo.faults import right_kernel
from tests.zoo.rights import MARKS, chosen_of, kernel_table, op_table, run_rights
from tests.zoo.runs import OPS, REGISTRY, RightFinding, declared, layouts_of
from tests.zoo.table import put_into
from tests.zoo.zoo import RIGHT

OTHERWISE = [pair for pair in RIGHT if pair[1].startswith("right.")]


def test_right_kernels_are_listed_once_and_can_be_imported() -> None:
    assert len(set(RIGHT)) == len(RIGHT)
    assert all(callable(right_kernel(kernel)) for _, kernel in OTHERWISE)


def test_the_capabilities_of_a_right_kernel_make_its_cases() -> None:
    def names(kernel: str) -> list[str]:
        made = right_kernel(kernel)
        extent = CaseBudget(triples=False).of(declared("linear", made, "right"))
        layouts = layouts_of("linear", made, "right")
        cases = kit_of(REGISTRY, "linear").cases(made, Env("cpu"), layouts, extent)
        return [case.name for case in cases if case.name.startswith("quantized_linear")]

    assert names("right.linears:upcast")
    assert not names("right.linears:outer")


def test_a_right_kernel_refuses_weights_that_it_does_not_list() -> None:
    weight = random_weight("int4", (4, 32), 1, 1)
    with pytest.raises(UnsupportedError, match=r"'int4'\. Allowed: int8_group, uint4"):
        right_kernel("right.linears:seven_outputs")(weight.scales @ weight.values[:1], weight)


FINDINGS = [
    RightFinding("rope", "right.a:one", 5, 40, 2, (), 3.0),
    RightFinding("rope", "right.a:two", 5, 39, 0, ("rope[x]: INCORRECT off",), 4.4),
    RightFinding("linear", "right.b:one", 5, 1000, 0, (), 9.0),
]


def test_a_failing_case_of_a_right_kernel_is_a_false_alarm() -> None:
    assert op_table(FINDINGS).splitlines()[2:] == [
        "| linear | 1 | 1,000 | 5 | 0 |",
        "| rope | 2 | 80 | 5 | 1 |",
        "| all | 3 | 1,080 | 5 | 1 |",
    ]
    assert "| rope | right.a:two | 39 | 1 | 0 | 4 |" in kernel_table(FINDINGS)


def test_the_table_of_right_kernels_has_marks_of_its_own(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{MARKS[0]}\nold\n{MARKS[1]}\n<!-- zoo: begin -->\n", encoding="utf-8")
    put_into(page, "new", MARKS)
    assert page.read_text(encoding="utf-8").startswith(f"{MARKS[0]}\nnew\n{MARKS[1]}\n<!-- zoo")


def test_right_kernels_are_chosen_by_op_and_by_name() -> None:
    assert {op for op, _ in chosen_of("linear", [])} == {"linear"}
    assert chosen_of(None, ["right.linears:outer"]) == [("linear", "right.linears:outer")]
    with pytest.raises(SystemExit, match=r"no op 'liner'\. Allowed: add_rms_norm"):
        chosen_of("liner", [])
    with pytest.raises(SystemExit, match=r"no right kernel of the name right\.none"):
        chosen_of(None, ["right.none:none"])


@pytest.mark.long
def test_a_run_of_one_kernel_keeps_what_the_file_says_about_others(tmp_path: Path) -> None:
    out, others = tmp_path / "right.json", ["right.linears:outer", "right.linears:gone"]
    found = [
        f'{{"op": "linear", "kernel": "{kernel}", "seeds": 1, "passed": 7, "unsupported": 0, '
        '"failed": [], "seconds": 1.0}'
        for kernel in others
    ]
    out.write_text(f"[{', '.join(found)}]", encoding="utf-8")
    name = "enginebay_xla.collectives:all_to_all"
    args = parser().parse_args(["--right", "--seeds", "1", "--out", str(out), name])
    assert run_rights(args) == 0
    text = out.read_text(encoding="utf-8")
    assert name in text
    assert others[0] in text
    assert others[1] not in text


def test_every_op_has_eight_right_kernels_or_more() -> None:
    counts = collections.Counter(op for op, _ in RIGHT)
    assert {op: count for op, count in counts.items() if count < 8} == {}
    assert set(counts) == set(OPS)
