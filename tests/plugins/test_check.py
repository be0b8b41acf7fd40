"""`enginebay check` against planted faults: each is found, named and survived."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginebay_testing.report import CheckRecord
from tests.plugins.install import command, put, pytest_within, run, visible

pytestmark = pytest.mark.xdist_group("check")

PLANTED = Path(__file__).parent / "planted"
FAULTY = ("wrong", "not_a_number", "raises", "asserts", "exits", "crashes", "declines")

FAULTY_CASE = "rms_norm[float32]"
OTHER_CASES = ("--case", "rms_norm[bfloat16-rows_1-", "--case", "declaration_holds")
"""Cases that show as much as all of them, of which there are many."""

Records = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put(PLANTED, tmp_path_factory.mktemp("site"))


def by_case(records: list[dict[str, Any]], name: str) -> Records:
    return {r["case"]: r for r in records if r["name"] == name}


def checked(site: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and records of `enginebay check`."""
    with visible(site):
        done = command("check", *arguments, "--json")
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def planted(site: Path) -> tuple[int, list[dict[str, Any]]]:
    """What the command says of all norms, in one run: while one never ends the others go on."""
    flags = ("--jobs", "2", "--timeout", "20", "--json", "--case", FAULTY_CASE, *OTHER_CASES)
    done = run(site, "check", "hangs", *FAULTY, "kills_the_importer", "needs_more", *flags)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
def test_wrong_result_is_incorrect_with_its_error_and_bound(
    planted: tuple[int, list[dict[str, Any]]],
) -> None:
    found = by_case(planted[1], "wrong")["rms_norm[float32]"]
    assert found["verdict"] == "INCORRECT"
    assert found["error"] > 100 * found["bound"] > 0
    assert "allowed" in found["detail"]
    assert (found["part"], found["op"], found["package"]) == (
        "kernel:rms_norm:wrong",
        "rms_norm",
        "planted",
    )
    assert (found["version"], found["level"], found["target"]) == ("0.3.0", "run", "cpu")


@pytest.mark.long
def test_not_a_number_is_incorrect_and_json_stays_strict(
    planted: tuple[int, list[dict[str, Any]]],
) -> None:
    found = by_case(planted[1], "not_a_number")["rms_norm[float32]"]
    assert (found["verdict"], found["error"]) == ("INCORRECT", None)
    assert "nan" in found["detail"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "verdict", "detail"),
    [
        ("raises", "ERROR", "RuntimeError: the planted exception"),
        ("asserts", "ERROR", "AssertionError: an assertion of the kernel itself"),
        ("exits", "ERROR", "ended with exit code 0"),
        ("crashes", "ERROR", "was killed by SIGSEGV"),
        ("declines", "UNSUPPORTED", "it has no f32 form"),
    ],
)
def test_fault_is_named_and_the_other_cases_go_on(
    planted: tuple[int, list[dict[str, Any]]], name: str, verdict: str, detail: str
) -> None:
    found = by_case(planted[1], name)
    assert found["rms_norm[float32]"]["verdict"] == verdict
    assert detail in found["rms_norm[float32]"]["detail"]
    others = [r["verdict"] for case, r in found.items() if case != FAULTY_CASE]
    assert len(others) > 1
    assert set(others) == {"PASS"}


@pytest.mark.long
def test_module_that_kills_its_importer_is_one_error(
    planted: tuple[int, list[dict[str, Any]]],
) -> None:
    (found,) = by_case(planted[1], "kills_the_importer").values()
    assert found["verdict"] == "ERROR"
    assert "exit code 5" in found["detail"]


@pytest.mark.long
def test_part_that_is_not_installed_is_unsupported_with_its_reason(
    planted: tuple[int, list[dict[str, Any]]],
) -> None:
    (found,) = by_case(planted[1], "needs_more").values()
    assert (found["verdict"], "no_such_module" in found["detail"]) == ("UNSUPPORTED", True)


@pytest.mark.long
def test_case_that_never_ends_in_c_is_a_timeout(planted: tuple[int, list[dict[str, Any]]]) -> None:
    found = by_case(planted[1], "hangs")
    faulty = found.pop(FAULTY_CASE)
    assert (faulty["verdict"], "no answer within 20 s" in faulty["detail"]) == ("TIMEOUT", True)
    assert found["declaration_holds"]["verdict"] == "PASS"
    assert {r["verdict"] for r in found.values()} == {"PASS"}


@pytest.fixture
def shown(
    planted: tuple[int, list[dict[str, Any]]], site: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[int, str]]:
    """Exit code and table of a check of one norm, whose verdicts are those of the run of all."""

    def show(name: str) -> tuple[int, str]:
        records = [CheckRecord(**record) for record in planted[1] if record["name"] == name]

        def found(*_: Any, tell: Callable[[CheckRecord], None], **__: Any) -> list[CheckRecord]:
            for record in records:
                tell(record)
            return records

        monkeypatch.setattr("enginebay_testing.cli.check", found)
        with visible(site):
            done = command("check", f"kernel:rms_norm:{name}")
        return done.returncode, done.stdout

    return show


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "verdict", "code"),
    [
        ("wrong", "INCORRECT", 1),
        ("raises", "ERROR", 1),
        ("hangs", "TIMEOUT", 1),
        ("declines", "UNSUPPORTED", 0),
    ],
)
def test_faults_make_the_exit_code_1(
    planted: tuple[int, list[dict[str, Any]]],
    shown: Callable[[str], tuple[int, str]],
    name: str,
    verdict: str,
    code: int,
) -> None:
    """Each alone, beside cases that pass. In the run of all, a part of which nothing was checked
    makes it 1 too.
    """
    assert planted[0] == 1
    found, table = shown(name)
    assert f" 1 {verdict}" in table
    assert found == code


@pytest.mark.long
def test_table_shows_the_error_against_its_bound(
    planted: tuple[int, list[dict[str, Any]]], shown: Callable[[str], tuple[int, str]]
) -> None:
    code, table = shown("wrong")
    assert code == 1
    assert ", allowed " in table
    num_passed = len(by_case(planted[1], "wrong")) - 1
    assert f"kernel:rms_norm:wrong run cpu: 1 INCORRECT, {num_passed} PASS" in table


def test_unknown_name_is_wrong_input_with_the_nearest(site: Path) -> None:
    with visible(site):
        done = command("check", "toy_wrnog")
    assert done.returncode == 2
    assert "Did you mean 'toy_wrong'?" in done.stderr


@pytest.mark.long
def test_kernel_of_another_device_is_interpreted_and_compiled(site: Path) -> None:
    some = (
        "decode_paged",
        "decode_group_8_dim_64",
        "mixed_softcap",
        "decode_8b",
        "32x4096",
        FAULTY_CASE,
    )
    flags = ("--jobs", "2", *(word for text in some for word in ("--case", text)))
    code, records = checked(site, "kernel:attention:toy", "kernel:rms_norm:toy_norm", *flags)
    assert code == 0, [r for r in records if r["verdict"] in ("INCORRECT", "ERROR", "TIMEOUT")]
    verdicts = {(r["name"], r["level"], r["target"], r["verdict"]) for r in records}
    assert {v[1:3] for v in verdicts} == {
        ("interpret", "interpreter"),
        ("compile", "npu1"),
        ("compile", "npu2"),
    }
    assert {v for v in verdicts if v[2] == "npu2"} == {
        (name, "compile", "npu2", "UNSUPPORTED") for name in ("toy", "toy_norm")
    }
    interpreted = {
        r["case"]: r for r in records if r["level"] == "interpret" and r["name"] == "toy"
    }
    assert interpreted["decode_paged_float32-dim_32-page_32[NhdLayout]"]["verdict"] == "PASS"
    assert interpreted["decode_group_8_dim_64_float32[NhdLayout]"]["verdict"] == "PASS"
    refused = interpreted["mixed_softcap-dim_32-page_32[NhdLayout]"]
    assert refused["verdict"] == "UNSUPPORTED"
    assert refused["detail"] == "does not support mode mixed; does not support features softcap"
    compiled = next(r for r in records if (r["target"], r["case"]) == ("npu1", "decode_8b"))
    assert compiled["verdict"] == "PASS"
    assert compiled["figures"]["alias_bytes"] >= 32 * 4096 * 8 * 128 * 2 * 2
    assert compiled["traits"]["group"] == "4"


@pytest.fixture(scope="module")
def interpreted(site: Path) -> tuple[int, list[dict[str, Any]]]:
    """A wrong kernel, and two parts that cannot be interpreted."""
    parts = ("toy_wrong", "kernel:rms_norm:wrong", "scheduler:fcfs")
    return checked(site, *parts, "--interpret", "--case", "decode_paged_float32")


@pytest.mark.long
def test_wrong_kernel_is_found_by_interpretation_alone(
    interpreted: tuple[int, list[dict[str, Any]]],
) -> None:
    code, records = interpreted
    assert code == 1
    found = by_case(records, "toy_wrong")
    assert found["decode_paged_float32-dim_32-page_32[NhdLayout]"]["verdict"] == "INCORRECT"


def test_level_that_a_part_lacks_is_unsupported(
    interpreted: tuple[int, list[dict[str, Any]]],
) -> None:
    records = [r for r in interpreted[1] if r["name"] in ("wrong", "fcfs")]
    assert [r["verdict"] for r in records] == ["UNSUPPORTED"] * 2
    assert "interpreted" in records[0]["detail"]


def test_cache_that_is_copied_is_found_by_compiling_alone(site: Path) -> None:
    code, records = checked(site, "toy_copies", "--level", "compile")
    found = [r for r in records if r["target"] == "npu1" and r["case"] == "decode_8b"]
    assert code == 1
    assert found[0]["verdict"] == "INCORRECT"
    assert "the program copies the cache" in found[0]["detail"]


@pytest.mark.long
def test_levels_of_the_pytest_plugin_are_those_of_the_command(site: Path) -> None:
    options = ("-p", "enginebay_testing", "-p", "no:cacheprovider", "-q", "-rA")
    part = ("--enginebay-check", "toy_norm", "--enginebay-level")
    few = (
        "-k",
        "not rows_ and not features_ and not size_ and not eps_ and not dims_ and not weight_",
    )
    told = {
        level: pytest_within(site, *options, *few, *part, level)[1]
        for level in ("interpret", "compile")
    }
    assert "1 passed" in told["interpret"]
    assert "8 passed, 8 skipped" in told["compile"]
    assert "rms_norm_32x4096_bfloat16@npu1" in told["compile"]
    assert "npu2 needs a tool chain that nobody has" in told["compile"]
