"""bench and tune rank no kernel that cheats, and keep no configuration of one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay.ops.select import Candidate
from enginebay.ops.tuning import OpProblem
from enginebay_bench.kernels import CHEAT, is_faulty, measure_shape
from enginebay_bench.op_problems import problems_of
from enginebay_bench.problem import bench_of
from enginebay_bench.shapes import Shape, parse_shapes
from enginebay_bench.tune import tune_shape
from enginebay_testing.kernel_trial import KernelRequest
from enginebay_testing.trial import EARLIER, FIRST, WRITES
from enginebay_testing.verdicts import Outcome
from tests.unit.test_bench_kernels import OPS, TINY, bench, only, setting, xla
from tests.zoo.cheats import inputs, results
from tests.zoo.cheats.host import Norm

Run = Callable[..., tuple[int, str, str]]
PATH = "tests.zoo.cheats.results:last_call"


def shape_of(op: str) -> Shape:
    (one, *_) = parse_shapes(["smollm2-135m/decode/b1"], bench_of(OPS[op]).axes)
    return dataclasses.replace(one, layer=TINY, batch=3)


@pytest.mark.parametrize(
    ("make", "says"), [(results.few_calls_norm, FIRST), (lambda: inputs.writes, WRITES)]
)
def test_a_kernel_that_cheats_while_it_is_timed_gets_no_figures(
    make: Callable[[], Norm], says: str
) -> None:
    candidates = [Candidate("mine", 0, make()), xla("rms_norm")]
    figures = measure_shape(bench(), OPS["rms_norm"], shape_of("rms_norm"), setting(), candidates)
    mine, right = only(figures, "mine"), only(figures)
    assert (mine.reason, mine.timing) == (f"{CHEAT}: {says}", None)
    assert is_faulty(mine)
    assert right.parity is not None
    assert right.parity.is_right
    assert not is_faulty(right)


@dataclasses.dataclass(frozen=True)
class Size:
    size: int


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A norm with two configurations, of which the second one cheats."""

    cheat: Norm
    choose: Callable[[Any], Any] = lambda _: Size(1)
    name: str = "mine"
    version: str = "1"

    def default_config(self, *_: Any) -> Size:
        return Size(1)

    def candidates(self, *_: Any) -> list[Size]:
        return [Size(1), Size(2)]

    def tuned(self, choose: Callable[[Any], Any]) -> Tunable:
        return dataclasses.replace(self, choose=choose)

    def __call__(self, x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
        norm = xla("rms_norm").impl if self.choose(OpProblem(len(x), ())).size == 1 else self.cheat
        found: jax.Array = norm(x, weight, eps=eps)
        return found


def test_nothing_is_kept_of_a_kernel_that_cheats_with_one_configuration() -> None:
    mine = Candidate("mine", 0, Tunable(results.few_calls_norm()))
    (one,) = tune_shape(bench(), OPS["rms_norm"], shape_of("rms_norm"), setting(), [mine])
    assert (one.entry, one.reason, one.cheats) == (None, f"{CHEAT}: {FIRST}", True)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=[] if op == "rms_norm" else [pytest.mark.long])
        for op, one in OPS.items()
        if one.bench
    ],
)
def test_a_seed_makes_the_numbers_of_a_benchmark(op: str) -> None:
    def leaves(seed: int) -> list[bytes]:
        of_seed = dataclasses.replace(setting(), seed=seed)
        (problem, *_) = problems_of(OPS[op], shape_of(op), of_seed)
        assert problem.other is not None
        made = (problem.make(0.0), problem.other.make(0.0))
        return [
            b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves((i.state, i.arrays)))
            for i in made
        ]

    first, other = leaves(5)
    assert leaves(5) == [first, other]
    assert first != other
    assert leaves(6)[0] == other


def of_trial(verdict: Any, detail: str, asked: list[KernelRequest]) -> Callable[..., Outcome]:
    def tried(request: KernelRequest) -> Outcome:
        asked.append(request)
        return Outcome(verdict, detail)

    return tried


@pytest.mark.parametrize("command", [("bench", "kernels"), ("tune",)], ids=lambda c: c[0])
def test_the_commands_try_a_kernel_that_is_not_built_in(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    asked: list[KernelRequest] = []
    monkeypatch.setattr("enginebay_bench.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("enginebay_bench.roofline.MATRIX", 32)
    tried = of_trial("CHEAT", EARLIER, asked)
    monkeypatch.setattr("enginebay_testing.kernel_trial.tried_apart", tried)
    flags = ("--op", "rms_norm", "--impl", f"xla,{PATH}", "--shapes", "smollm2-135m/decode/b1")
    common = ("--dtype", "float32", "--rounds", "1", "--seed", "7", "--json")
    if command == ("tune",):
        common = (*common, "--tuned-folder", str(tmp_path))
    code, out, err = run(*command, *flags, *common)
    assert code == 1, err
    record = json.loads(out)
    named = {one.get("implementation") or one["impl"]: one for one in _results(record)}
    assert named[PATH]["reason"] == f"{CHEAT}: {EARLIER}"
    assert named[PATH].get("entry") is named[PATH].get("timing") is None
    assert not (named["xla"]["reason"] or "").startswith(CHEAT)
    assert [(one.op, one.kernel, one.seed) for one in asked] == [("rms_norm", PATH, 7)]
    assert "--seed=7" in record["command"]


def _results(record: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record.get("figures") or record["results"]
    return found


@pytest.mark.parametrize("verdict", ["ERROR", "TIMEOUT"])
def test_a_kernel_without_a_trial_is_not_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    monkeypatch.setattr("enginebay_bench.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("enginebay_bench.roofline.MATRIX", 32)
    tried = of_trial(verdict, "its trial ended with exit code 3", [])
    monkeypatch.setattr("enginebay_testing.kernel_trial.tried_apart", tried)
    flags = ("--op", "rms_norm", "--impl", PATH, "--shapes", "smollm2-135m/decode/b1", "--json")
    _, out, _ = run("bench", "kernels", *flags, "--dtype", "float32", "--rounds", "1")
    (figure,) = json.loads(out)["figures"]
    assert (figure["reason"], figure["timing"]) == ("its trial ended with exit code 3", None)
