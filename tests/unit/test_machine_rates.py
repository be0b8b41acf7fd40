"""The rates of this machine: what is measured, which stored file is theirs, and what is printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from enginebay.compose.platforms import find_platform
from enginebay.config import make_config
from enginebay.contracts.platform import Platform
from enginebay.plugins.registry import load_registry
from enginebay_bench import machine_rates, stored_rates
from enginebay_bench.cli.roofline import size_text
from enginebay_bench.machine_rates import (
    MachineRates,
    MemoryRate,
    OneProcessor,
    ProductRate,
    Rates,
    Sweep,
)

Run = Callable[..., tuple[int, str, str]]

SMALL = Sweep((4096,), ("float32", "int8"), (1, 2), width=16, rounds=1)
KNOWN = MachineRates(
    "some device",
    num_processors=2,
    all=Rates(
        (MemoryRate(1 << 14, 80e9, 200e9), MemoryRate(1 << 26, 30e9, 40e9)),
        (
            ProductRate("float32", 1, 40e9),
            ProductRate("float32", 256, 400e9),
            ProductRate("int8", 1, 50e9),
        ),
        4e-6,
    ),
    one=Rates(
        (MemoryRate(1 << 14, 70e9, 150e9), MemoryRate(1 << 26, 20e9, 25e9)),
        (
            ProductRate("float32", 1, 35e9),
            ProductRate("float32", 256, 200e9),
            ProductRate("int8", 1, 45e9),
        ),
        4e-6,
    ),
)


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """A platform, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return find_platform(load_registry(), make_config({}))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Measurements return KNOWN at once; the list has what was measured."""
    calls: list[Any] = []

    def measure(*given: Any) -> MachineRates:
        calls.append(given)
        return KNOWN

    monkeypatch.setattr(stored_rates, "measure_machine", measure)
    return calls


@pytest.mark.long
def test_every_size_and_product_is_measured() -> None:
    rates = machine_rates.measure_rates(jax.devices()[0], {}, SMALL)
    assert [one.num_bytes for one in rates.memory] == [4096]
    assert [(one.dtype, one.num_rows) for one in rates.products] == [
        *(("float32", 1), ("float32", 2), ("int8", 1), ("int8", 2))
    ]
    every = [r for one in rates.memory for r in (one.read_bytes_per_s, one.copy_bytes_per_s)]
    assert all(1e3 < rate < 1e15 for rate in [*every, *(p.flops_per_s for p in rates.products)])
    assert 0 < rates.launch_s < 1


def test_a_rate_is_the_work_of_the_best_sample_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each call of the clock is a start or an end: two samples to learn the time of a call (2 s and
    # 1 s), then three rounds of 4, 2 and 8 s. A call takes longer than a sample, so it is one.
    ticks = iter([0, 2, 2, 3, 10, 14, 20, 22, 30, 38])
    monkeypatch.setattr(machine_rates.time, "perf_counter", lambda: float(next(ticks)))
    case = machine_rates._Case(lambda x: x, jax.numpy.zeros(1), work=100.0)
    found = machine_rates._best_rates({"case": case}, Sweep(rounds=3, case_s=100.0))
    assert found == {"case": 100.0}, "the best sample has taken 1 s"


def test_a_case_is_measured_no_longer_than_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 1, 1, 2, 2, 4, 4, 6])
    monkeypatch.setattr(machine_rates.time, "perf_counter", lambda: float(next(ticks)))
    case = machine_rates._Case(lambda x: x, jax.numpy.zeros(1), work=1.0)
    machine_rates._best_rates({"case": case}, Sweep(rounds=9, case_s=3.0))
    assert next(ticks, None) is None
    assert case.seconds == 4.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "work"),
    [
        (lambda: machine_rates._read_case(1 << 14, dots=False, options={}), (1 << 14) * 512),
        (lambda: machine_rates._read_case(1 << 24, dots=True, options={}), 1 << 24),
        (lambda: machine_rates._copy_case(1 << 14, {}), 2 * (1 << 14) * 256),
        (lambda: machine_rates._product_case("float32", 4, 1024, {}), 2 * 4 * 1024 * 1024 * 2),
    ],
)
def test_the_work_of_a_call_is_counted(case: Callable[[], Any], work: int) -> None:
    assert case().work == work


@pytest.mark.long
def test_a_copy_writes_every_value_and_a_read_sums_every_value() -> None:
    copying = machine_rates._copy_case(4096, {})
    source, target, number = copying.program(copying.argument)
    loops = copying.work / (2 * 4096)
    assert (target == (source ^ int(loops))).all()
    assert int(number) == 2
    reading = machine_rates._read_case(1 << 24, dots=False, options={})
    array, sums = reading.program(reading.argument)
    assert (sums == array.shape[1]).all()
    assert sums.shape == array.shape[:1]


def test_rates_are_stored_and_found_again(platform: Platform, measured: list[Any]) -> None:
    assert stored_rates.known_rates(platform, SMALL) == KNOWN
    assert stored_rates.known_rates(platform, SMALL) == KNOWN
    assert len(measured) == 1, "the second call reads the file"
    assert stored_rates.known_rates(platform, SMALL, remeasure=True) == KNOWN
    assert len(measured) == 2


def test_rates_of_another_machine_are_not_found(platform: Platform, measured: list[Any]) -> None:
    here = stored_rates.machine_of(platform, SMALL)
    assert set(here) == {
        *("format", "processor", "processors", "jax", "platform", "device", "options", "sweep")
    }
    stored_rates.write_rates(here, KNOWN)
    for name in here:
        other = {**here, name: here[name] + "x"}
        assert stored_rates.read_rates(other) is None, name
        # The same file under the name of another machine is not believed either.
        path = stored_rates.rates_path(other)
        path.write_bytes(stored_rates.rates_path(here).read_bytes())
        assert stored_rates.read_rates(other) is None, name
    assert stored_rates.read_rates(here) == KNOWN


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:0],
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("80000000000.0", "-1.0"),
        lambda text: text.replace("80000000000.0", "NaN"),
        lambda text: text.replace('"read_bytes_per_s"', '"other"'),
        lambda text: "\0\xff" + text,
    ],
)
def test_a_damaged_file_is_measured_again(
    platform: Platform, measured: list[Any], damage: Callable[[str], str]
) -> None:
    stored_rates.known_rates(platform, SMALL)
    path = stored_rates.rates_path(stored_rates.machine_of(platform, SMALL))
    text = path.read_text(encoding="utf-8")
    path.write_text(damage(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text, "the file is damaged"
    assert stored_rates.known_rates(platform, SMALL) == KNOWN
    assert len(measured) == 2
    assert path.read_text(encoding="utf-8") == text, "the file is whole again"


def test_rates_without_those_of_one_processor_are_measured_again(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = dataclasses.replace(KNOWN, one=None)
    monkeypatch.setattr(stored_rates, "measure_machine", lambda *_: partial)
    monkeypatch.setattr(machine_rates, "num_processors", lambda _: 2)
    assert stored_rates.known_rates(platform, SMALL) == partial
    assert stored_rates.read_rates(stored_rates.machine_of(platform, SMALL)) is None
    monkeypatch.setattr(machine_rates, "num_processors", lambda _: 1)  # there is nothing to add
    assert stored_rates.known_rates(platform, SMALL) == partial
    assert stored_rates.read_rates(stored_rates.machine_of(platform, SMALL)) == partial


def test_rates_that_cannot_be_stored_are_returned(
    platform: Platform, measured: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "enginebay").write_text("a file where the folder belongs")
    assert stored_rates.known_rates(platform, SMALL) == KNOWN
    assert "are not stored" in caplog.text


def test_the_rate_of_a_size_is_that_of_the_next_larger_one() -> None:
    assert KNOWN.read_bytes_per_s(100) == 80e9
    assert KNOWN.read_bytes_per_s(1 << 14) == 80e9
    assert KNOWN.read_bytes_per_s((1 << 14) + 1) == 30e9
    assert KNOWN.read_bytes_per_s(1 << 40) == 30e9


def test_the_rate_of_a_dtype_is_its_best_and_an_unknown_dtype_has_that_of_the_widest() -> None:
    assert KNOWN.flops_per_s("float32") == 400e9
    assert KNOWN.flops_per_s("int8") == 50e9
    assert KNOWN.flops_per_s("float16") == 400e9


def test_one_processor_is_measured_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed: list[Any] = []
    text = stored_rates.TypeAdapter(OneProcessor).dump_json(OneProcessor("cpu", {}, SMALL))
    monkeypatch.setattr(machine_rates.sys, "stdin", _Text(text.decode()))
    monkeypatch.setattr(machine_rates.os, "sched_getaffinity", lambda _: {3, 5})
    monkeypatch.setattr(machine_rates.os, "sched_setaffinity", lambda _, s: allowed.append(s))
    monkeypatch.setattr(machine_rates, "measure_rates", lambda *_: KNOWN.one)
    machine_rates.main()
    assert allowed == [{3}]
    assert KNOWN.one is not None
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(dataclasses.asdict(KNOWN.one))
    )


@pytest.mark.long
def test_the_process_of_one_processor_returns_its_rates() -> None:
    found = machine_rates._measured_apart(OneProcessor("cpu", {}, SMALL))
    assert found is not None
    assert [one.num_bytes for one in found.memory] == list(SMALL.num_bytes)


def test_a_process_that_fails_leaves_the_rates_of_all_processors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_rates, "num_processors", lambda _: 2)
    monkeypatch.setattr(machine_rates, "measure_rates", lambda *_: KNOWN.all)
    monkeypatch.setattr(machine_rates.sys, "executable", "/bin/false")
    found = machine_rates.measure_machine(jax.devices()[0], "some device", {}, SMALL)
    assert found == dataclasses.replace(KNOWN, one=None)
    assert "one processor was not measured" in caplog.text


@dataclasses.dataclass
class _Text:
    text: str

    def read(self) -> str:
        return self.text


def test_the_command_prints_each_size_with_one_and_with_all_processors(
    run: Run, platform: Platform, measured: list[Any]
) -> None:
    code, out, err = run("roofline")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["16", "KiB", "70.0", "80.0", "150.0", "200.0"] in rows
    assert ["float32", "256", "200.0", "400.0"] in rows
    assert "a launch takes 4.0 us" in out
    record = json.loads(run("roofline", "--json")[1])
    assert record["machine"]["all"]["memory"][1]["read_bytes_per_s"] == 30e9
    assert len(measured) == 1
    run("roofline", "--remeasure")
    assert len(measured) == 2


def test_a_device_of_its_own_has_one_column(
    run: Run, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = dataclasses.replace(KNOWN, num_processors=1, one=None)
    monkeypatch.setattr(stored_rates, "measure_machine", lambda *_: alone)
    rows = [line.split() for line in run("roofline")[1].splitlines()]
    assert ["64", "MiB", "30.0", "40.0"] in rows


def test_sizes_have_units() -> None:
    assert [size_text(n) for n in (512, 16 << 10, 3 << 19, 1 << 30)] == [
        *("512 B", "16 KiB", "1.5 MiB", "1 GiB")
    ]
