"""What check, bench and tune are told to do: which cases, at which target, on which platform; and
what they return.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginebay.errors import UnknownNameError, UnsupportedError
from enginebay.ops.caps import Env
from enginebay.plugins.hooks import Declaration
from enginebay.plugins.registry import Registry, load_registry
from enginebay_bench.cost import Cost
from enginebay_bench.kernels import Figure
from enginebay_bench.problem import Parity
from enginebay_bench.timing import Timing
from enginebay_bench.tune import Tuned
from enginebay_models.llama import family
from enginebay_testing.cases import part_cases, select_parts
from enginebay_testing.models import tiny_config
from enginebay_testing.report import CheckRecord, Filter, has_text
from enginebay_testing.suites import Choices, label, part_checks, platform_of
from enginebay_testing.workers import CaseName
from enginebay_xla.platforms import CpuPlatform
from tests.unit.test_compose import with_parts

Run = Callable[..., tuple[int, str, str]]


class Npu(CpuPlatform):
    """A platform with devices that `auto` does not take."""

    name = "npu"
    priority = -1

    def env(self) -> Env:
        return Env("npu")


class Absent(Npu):
    """A platform without devices."""

    name = "absent"

    def why_not(self) -> str:
        return "no device of this kind"


def registry() -> Registry:
    return with_parts(
        Declaration("platform", "npu", f"{__name__}:Npu"),
        Declaration("platform", "absent", f"{__name__}:Absent"),
        Declaration(
            "kernel", "mine", "enginebay_xla.norm:rms_norm", op="rms_norm", platforms=("npu",)
        ),
        Declaration(
            "kernel", "lost", "enginebay_xla.norm:rms_norm", op="rms_norm", platforms=("absent",)
        ),
    )


def test_a_kernel_of_another_platform_than_the_default_is_checked_there() -> None:
    parts = registry()
    cases = part_cases(parts, parts.find("kernel", "mine", "rms_norm"))
    assert {(case.level, case.target) for case in cases} == {("run", "npu")}
    assert "rms_norm[float32]" in {case.name for case in cases}


def test_a_named_platform_is_where_cases_run() -> None:
    parts = registry()
    mine, plain = (parts.find("kernel", name, "rms_norm") for name in ("mine", "xla"))
    assert platform_of(parts, plain, "npu").name == "npu"
    assert {case.target for case in part_cases(parts, plain, choices=Choices("npu"))} == {"npu"}
    assert [case.name for case in part_cases(parts, mine, choices=Choices("cpu"))][
        -1
    ] == "runs_here"
    why = r"platform = .absent. cannot be used here \(absent: no device of this kind"
    with pytest.raises(UnsupportedError, match=why):
        platform_of(parts, plain, "absent")


def test_a_kernel_without_any_device_has_one_case_that_says_so() -> None:
    parts = registry()
    cases = part_cases(parts, parts.find("kernel", "lost", "rms_norm"))
    assert [case.name for case in cases] == ["declaration_holds", "runs_here"]


def named(name: str, target: str = "cpu", *, representative: bool = True) -> CaseName:
    return CaseName("run", target, name, representative, {})


def test_a_text_stands_for_the_cases_that_have_it_in_their_names() -> None:
    assert has_text("decode_window-dim_64[HndLayout]", "window")
    assert has_text("decode_window-dim_64[HndLayout]", "decode*[Hnd")
    assert not has_text("decode_window", "prefill")
    chosen = Filter(cases=["window"])
    assert chosen(named("decode_window", representative=False))
    assert not chosen(named("decode_plain"))
    assert chosen(named("runs_here")), "the reason why nothing is checked is always shown"
    assert not Filter()(named("decode_window", representative=False))
    assert Filter(everything=True)(named("decode_window", representative=False))
    assert [Filter(target="sm_90")(named("x", target)) for target in ("sm_90", "sm_100")] == [
        True,
        False,
    ]


def test_a_text_or_a_target_that_no_case_has_is_refused_with_the_nearest() -> None:
    chosen = Filter(cases=["decode_widnow"])
    for name in ("decode_window", "prefill", "mixed"):
        chosen(named(name))
    with pytest.raises(
        UnknownNameError,
        match=r"decode_widnow, which no case .* contains. Allowed: such as decode_window",
    ):
        chosen.refuse_unmatched()
    other = Filter(target="sm_9")
    other(named("x", "sm_90"))
    with pytest.raises(UnknownNameError, match=r"target of a case 'sm_9'.*Did you mean 'sm_90'"):
        other.refuse_unmatched()
    Filter(cases=["anything"]).refuse_unmatched()  # no part has cases: their reasons are shown


RECORD = CheckRecord(
    *(
        "kernel:rms_norm:xla",
        "rms_norm",
        "xla",
        "xla",
        "1",
        "run",
        "cpu",
        "rms_norm[float32]",
        "PASS",
        "",
    ),
    error=None,
    bound=None,
    seconds=0.1,
    figures={},
    traits={},
)


def checking(monkeypatch: pytest.MonkeyPatch, *records: CheckRecord) -> dict[str, Any]:
    """Makes `enginebay check` find these records; returns what it is asked."""
    asked: dict[str, Any] = {}

    def check(entries: Any, level: str | None, **given: Any) -> list[CheckRecord]:
        asked.update(given, level=level)
        for record in records:
            given["tell"](record)
            asked.setdefault("between", []).append(record.case)
        return list(records)

    monkeypatch.setattr("enginebay_testing.cli.check", check)
    return asked


def test_the_flags_of_check_reach_its_workers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = checking(monkeypatch, RECORD)
    flags = (
        "--case",
        "float32",
        "--case",
        "bf16",
        "--target",
        "cpu",
        "--platform",
        "cpu",
        "--interpret",
    )
    assert run("check", "kernel:rms_norm:xla", *flags)[0] == 0
    assert (asked["wanted"].cases, asked["wanted"].target) == (["float32", "bf16"], "cpu")
    assert (asked["choices"].platform, asked["level"]) == ("cpu", "interpret")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--platform", "cqu"), "Did you mean 'cpu'?"),
        (("--interpret", "--level", "run"), "--interpret with --level run"),
    ],
)
def test_wrong_flags_of_check_are_refused_before_anything_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], text: str
) -> None:
    asked = checking(monkeypatch, RECORD)
    code, _, err = run("check", "kernel:rms_norm:xla", *flags)
    assert (code, text in err, asked) == (2, True, {})


def test_results_are_printed_when_each_case_has_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def check(entries: Any, level: str | None, **given: Any) -> list[CheckRecord]:
        capsys.readouterr()
        given["tell"](RECORD)
        seen.append(capsys.readouterr().out)
        return [RECORD]

    monkeypatch.setattr("enginebay_testing.cli.check", check)
    assert run("check", "kernel:rms_norm:xla")[0] == 0
    assert seen[0].splitlines()[0].split() == [
        "verdict",
        "part",
        "level",
        "target",
        "case",
        "s",
        "detail",
    ]
    assert "rms_norm[float32]" in seen[0]


def test_a_part_that_is_named_and_not_checked_at_all_is_no_success(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = dataclasses.replace(
        RECORD, case="runs_here", verdict="UNSUPPORTED", detail="needs platform x"
    )
    holds = dataclasses.replace(RECORD, case="declaration_holds")
    checking(monkeypatch, holds, skipped)
    code, _, err = run("check", "kernel:rms_norm:xla")
    assert (code, "no case of kernel:rms_norm:xla could run: needs platform x" in err) == (
        1,
        True,
    )
    assert run("check", "kernel:rms_norm")[0] == 0, "of a whole op some parts need other devices"
    checking(monkeypatch, holds, skipped, RECORD)
    assert run("check", "kernel:rms_norm:xla")[0] == 0


def figure(share: float) -> Figure:
    """What `bench kernels` measures of an implementation with an error of `share` of the allowed
    one.
    """
    return Figure(
        *("rms_norm", "smollm2-135m/prefill", "float32", "xla"),
        timing=Timing.of([1e-3], 3),
        cost=Cost(1e6, 1e6, 1e6),
        bytes_per_s=2e9,
        flops_per_s=1e9,
        parity=Parity(0.5, share, "f64"),
    )


@pytest.fixture
def quick_roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginebay_bench.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("enginebay_bench.roofline.MATRIX", 32)


BENCH = ("bench", "kernels", "--op", "rms_norm", "--rounds", "1")


@pytest.mark.long
@pytest.mark.usefixtures("quick_roofline")
@pytest.mark.parametrize(("share", "expected"), [(0.5, 0), (1.5, 1), (float("nan"), 1)])
def test_a_wrong_result_makes_the_exit_code_of_a_benchmark_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, share: float, expected: int
) -> None:
    printed: list[str] = []

    def measure(bench: Any, op: Any, shape: Any, setting: Any, candidates: Any) -> list[Figure]:
        printed.append(shape.name)
        return [dataclasses.replace(figure(share), shape=shape.name)]

    monkeypatch.setattr("enginebay_bench.kernels.measure_shape", measure)
    code, out, _ = run(
        *BENCH, "--shapes", "smollm2-135m", "--case", "prefill", "--case", "decode/*32"
    )
    assert (code, "WRONG" in out) == (expected, expected == 1)
    assert {name.split("/")[1] for name in printed} == {"prefill", "decode"}
    assert all(name in out for name in printed)
    assert not any("mixed" in name or "b8" in name for name in printed)
    assert run(*BENCH, "--json")[0] == expected


@pytest.mark.usefixtures("quick_roofline")
def test_a_wrong_configuration_makes_the_exit_code_of_tuning_1(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        Tuned(
            "rms_norm",
            "xla",
            "1",
            "prefill",
            "float32",
            reason="the implementation has no configurations here",
        )
    ]
    monkeypatch.setattr("enginebay_bench.tune.tune_shape", lambda *_: found)
    command = ("tune", "--op", "rms_norm", "--shapes", "smollm2-135m/prefill")
    assert run(*command)[0] == 0
    found[0] = dataclasses.replace(
        found[0], refused=(("block 8", "wrong: off by 1, 2 of allowed"),)
    )
    assert run(*command)[0] == 1


@pytest.mark.parametrize("command", [BENCH, ("tune", "--op", "rms_norm")])
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--case", "prefil2"), "a part of a name, such as"),
        (("--target", "cqu"), "Did you mean 'cpu'?"),
        (("--interpret",), "--interpret without --impl"),
        (("--platform", "cqu"), "Did you mean 'cpu'?"),
    ],
)
def test_wrong_choices_are_refused_before_anything_is_measured(
    run: Run, command: tuple[str, ...], flags: tuple[str, ...], text: str
) -> None:
    code, out, err = run(*command, *flags)
    assert (code, out) == (2, "")
    assert text in err


class Sized:
    """A norm for a device that is not here, with an interpreted form."""

    def interpreted(self) -> Any:
        from enginebay_xla.norm import rms_norm

        return rms_norm


SIZED = Sized()


@pytest.mark.long
@pytest.mark.usefixtures("quick_roofline")
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "needs platform absent, this is cpu"),
        (("--interpret",), None),
        (("--interpret", "--target", "interpreter"), None),
    ],
)
def test_a_named_kernel_of_another_platform_is_interpreted_for_a_benchmark(
    run: Run, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], reason: str | None
) -> None:
    part = Declaration("kernel", "sized", f"{__name__}:SIZED", op="rms_norm", platforms=("absent",))
    monkeypatch.setattr("enginebay.plugins.registry.load_registry", lambda: with_parts(part))
    seen: list[Any] = []

    def measure(bench: Any, op: Any, shape: Any, setting: Any, candidates: Any) -> list[Figure]:
        seen.extend(candidates)
        return []

    monkeypatch.setattr("enginebay_bench.kernels.measure_shape", measure)
    assert run(*BENCH, "--impl", "sized", *flags)[0] == 0
    assert {(one.name, one.unavailable) for one in seen} == {("sized", reason)}
    assert run(*BENCH, "--impl", "sized", "--interpret", "--target", "cpu")[0] == 0


def test_a_model_family_is_checked_with_the_configuration_of_a_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.json"
    config = tiny_config(family) | {"hidden_size": 48}
    file.write_text(json.dumps(config), encoding="utf-8")
    seen: list[Any] = []
    monkeypatch.setattr(
        "enginebay_testing.models.model_checks", lambda *_, config, **__: seen.append(config) or []
    )
    entry = load_registry().find("model", "llama")
    part_checks(load_registry(), entry, Choices(config=str(file)))
    part_checks(load_registry(), entry)
    assert seen == [config, None]
    asked = checking(monkeypatch, RECORD)
    assert run("check", "model:llama", "--config", str(file), "--seed", "7")[0] == 0
    assert asked["choices"] == Choices(config=str(file), seed=7)


@pytest.mark.parametrize("text", ["[1]", "{", None])
def test_a_configuration_that_cannot_be_read_is_refused(
    run: Run, tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    code, out, err = run("check", "model:llama", "--config", str(file))
    assert (code, out) == (2, "")
    assert str(file) in err


@pytest.mark.parametrize(
    ("former", "today"),
    [
        ("tool_parser:hermes", ["format:hermes"]),
        ("reasoning_parser", ["format:think"]),
        ("logits_processor:penalties", ["processor:penalties"]),
    ],
)
def test_a_former_kind_selects_the_parts_of_today(former: str, today: list[str]) -> None:
    assert [label(entry) for entry in select_parts(load_registry(), former)] == today
