"""Kernels that cheat who checks them are named by their trial; right ones pass it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginebay.compose.import_paths import BY_PATH, with_paths_of
from enginebay.ops.caps import Env
from enginebay.ops.norm import RMS_NORM
from enginebay.plugins.registry import Registry, load_registry
from enginebay_bench import timing  # noqa: F401  # a cheat changes it where it is loaded
from enginebay_testing import cases, trial
from enginebay_testing.kernel_trial import KernelRequest, quick_trial, registered_trial, tried_apart
from enginebay_testing.process_state import ProcessState
from enginebay_testing.suites import Choices
from enginebay_testing.verdicts import Outcome, judge
from enginebay_testing.worker import CaseRunner
from tests.zoo.cheats.__main__ import Finding, summary
from tests.zoo.cheats.host import places_of
from tests.zoo.cheats.listed import CHEATS, Cheat

pytestmark = pytest.mark.long

SEED = 20_261_129
REGISTRY = load_registry()
QUICK = ("results_last_call", "answers_reference")
"""Cheats of every kind that are found in tenths of a second."""


def found(registry: Registry, op: str, kernel: str, seed: int = SEED) -> Outcome:
    entry = registry.find("kernel", kernel, op)
    return judge(registered_trial(registry, entry, Env("cpu"), seed, outside=False))


def of_cheat(cheat: Cheat) -> Outcome:
    return found(with_paths_of(REGISTRY, ["rms_norm"], [cheat.path], "hnd"), "rms_norm", cheat.path)


def marked(cheat: Cheat) -> Any:
    marks = () if cheat.name in QUICK else (pytest.mark.long,)
    return pytest.param(cheat, id=cheat.name, marks=marks)


@pytest.mark.parametrize("cheat", [marked(c) for c in CHEATS if not c.apart])
def test_a_cheat_is_named(cheat: Cheat) -> None:
    before = ProcessState.now()
    outcome = of_cheat(cheat)
    assert (outcome.verdict, outcome.detail[: len(cheat.says)]) == ("CHEAT", cheat.says)
    assert not before.changes()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux has priorities of threads")
def test_work_that_goes_on_is_seen_beside_busy_programs() -> None:
    """Its thread waits for a processor all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    ended, data = threading.Event(), bytes(2**20)

    def compute() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        while not ended.is_set():
            hashlib.sha256(data)  # without the interpreter's lock

    thread = threading.Thread(target=compute)
    try:
        assert not trial._is_busy()
        thread.start()
        assert trial._is_busy()
    finally:
        for other in others:
            other.kill()
            other.wait()
        ended.set()
        thread.join()


def test_the_zoo_has_cheats_of_every_kind() -> None:
    assert len({cheat.path for cheat in CHEATS}) == len(CHEATS) >= 20
    assert {trial.ADDRESS, *(cheat.says for cheat in CHEATS)} >= set(trial.KINDS)


def test_a_cheat_finds_its_input_where_others_hold_arrays_of_several_devices() -> None:
    numbers = np.arange(4 * 61, dtype=np.float32).reshape(4, 61)
    mesh = jax.make_mesh((4,), ("rows",))
    sharded = jax.device_put(numbers, jax.NamedSharding(mesh, jax.P("rows")))
    whole = jnp.asarray(numbers)
    assert places_of(numbers) == [whole.unsafe_buffer_pointer()]
    assert sharded.shape == whole.shape


def test_the_table_counts_the_cheats_that_a_command_met() -> None:
    found = [
        Finding("results_last_call", "check", named=True, says=""),
        Finding("results_late", "check", named=False, says=""),
        Finding("inputs_writes", "tune", named=True, says=""),
    ]
    lines = summary(found).splitlines()
    assert lines[2] == "| return, keep or delay results | 1/2 | 0/0 | 0/0 | 0/0 |"
    assert lines[-1] == "| all | 1/2 | 0/0 | 1/1 | 0/0 |"


def test_a_right_kernel_passes_its_trial() -> None:
    assert found(REGISTRY, "rms_norm", "xla").verdict == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        (e.op, e.name)
        for e in REGISTRY.entries
        if e.kind == "kernel" and e.why_not_on("cpu") is None
    ],
)
@pytest.mark.parametrize("seed", range(4))  # a seed chooses one of an op's cases
def test_no_kernel_of_ours_is_called_a_cheat(op: str, kernel: str, seed: int) -> None:
    outcome = found(REGISTRY, op, kernel, SEED + seed)
    assert outcome.verdict in ("PASS", "UNSUPPORTED"), outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize("cheat", [c for c in CHEATS if c.apart], ids=lambda c: c.name)
def test_a_kernel_that_is_tried_in_a_process_of_its_own_is_named(
    cheat: Cheat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process outside of a check lacks the variables of a check's worker."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    outcome = tried_apart(KernelRequest("rms_norm", cheat.path, SEED))
    assert (outcome.verdict, outcome.detail[: len(cheat.says)]) == ("CHEAT", cheat.says)


def test_a_check_ends_with_the_trial_of_the_kernel() -> None:
    path = "tests.zoo.cheats.results:last_call"
    registry = cases.with_path(REGISTRY, f"kernel:rms_norm:{path}")
    entry = registry.find("kernel", path, "rms_norm")
    found = cases.part_cases(registry, entry, "run", Choices(seed=SEED))
    assert found[-1].name == "rms_norm[trial]"
    outcome = judge(found[-1].run)
    assert (outcome.verdict, outcome.detail) == ("CHEAT", trial.EARLIER)
    assert not [c for c in cases.part_cases(registry, entry, "run") if "trial" in c.name]


def test_secret_inputs_differ_by_seed_and_keep_what_must_not_change() -> None:
    entry = REGISTRY.find("kernel", "xla", "attention")
    made = [quick_trial(REGISTRY, entry, Env("cpu"), seed)[0] for seed in (0, 0, 4)]
    one, same, other = (each.secret(0) for each in made)
    known = made[0].known()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one, same, strict=True))
    real = [i for i, leaf in enumerate(known) if leaf.dtype == np.float32]
    assert all(one[i].tobytes() != other[i].tobytes() for i in real)
    for a, b in zip(one, known, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.array_equal(np.isfinite(a), np.isfinite(b))
        assert a.dtype == np.float32 or np.array_equal(a, b)


def test_what_a_kernel_changed_is_named_and_set_back() -> None:
    before, clock = ProcessState.now(), time.perf_counter
    tolerance: Any = RMS_NORM.tolerance
    held = dict(tolerance)
    setattr(time, "perf_counter", time.monotonic)  # noqa: B010
    tolerance["float32"] = 1.0
    changes = before.changes()
    before.restore()
    assert "replaces time.perf_counter" in changes
    assert any("enginebay.ops" in change for change in changes)
    assert (time.perf_counter, dict(tolerance)) == (clock, held)
    assert not before.changes()


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.11 cannot tell who answers")
def test_a_kernel_may_be_made_of_the_reference_of_its_own_package() -> None:
    def reference(x: int) -> int:
        return x

    def kernel(x: int) -> int:
        return reference(x)

    kernel.__module__ = "mine.blocks"
    for module, named in (("mine.plain", set()), ("other.plain", {"reference"})):
        reference.__module__ = module
        with trial._watched({"reference": reference}, kernel) as answered:
            kernel(1)
        assert answered == named


NEW_VARIABLE = "enginebay_test_of_cheats"


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        ("xla", ""),
        pytest.param("tests.zoo.cheats.importing:norm", "replaces numpy.allclose"),
        ("tests.zoo.cheats.process:environment", "changes the environment variable XLA_FLAGS"),
        ("tests.zoo.cheats.process:once", "replaces numpy.allclose"),
    ],
)
def test_what_other_parts_change_in_the_process_is_no_cheat(
    kernel: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing of a kernel's cases and its trial, checks of other parts run."""
    state = ProcessState.now()
    monkeypatch.setattr(np, "allclose", np.allclose)
    monkeypatch.delitem(sys.modules, "tests.zoo.cheats.importing", raising=False)
    choices = {"platform": None, "config": None, "seeds": None, "seed": SEED, "trace": None}
    asked = {"part": f"kernel:rms_norm:{kernel}", "level": "run", "choices": choices}
    asked["package"] = BY_PATH if ":" in kernel else kernel
    runner = CaseRunner()
    try:
        listed = runner.answer({"do": "list", **asked})["cases"]
        case = next(one for one in listed if one["name"] == "rms_norm[trial]")
        first = {"do": "run", "case": listed[-2], **asked}
        runner.answer(first)  # a cheat may do what it does in an ordinary case
        other = {"part": "kernel:rms_norm:pallas", "package": "pallas"}
        runner.answer({"do": "list", **asked, **other})
        monkeypatch.setenv(NEW_VARIABLE, "1")
        np.random.seed(3)  # noqa: NPY002  # as a library does
        outcome = runner.answer({"do": "run", "case": case, **asked})
        assert outcome["verdict"] == ("CHEAT" if says else "PASS"), outcome["detail"]
        assert outcome["detail"].startswith(says)
        assert NEW_VARIABLE not in outcome["detail"]
    finally:
        state.restore()


@pytest.mark.long
@pytest.mark.parametrize("processes", ["0", "2"])
def test_the_pytest_plugin_names_a_cheat_and_tells_the_seed(processes: str) -> None:
    part = "kernel:rms_norm:tests.zoo.cheats.results:last_call"
    options = ("-p", "enginebay_testing", "-p", "no:cacheprovider", "-n", processes, "-k", "trial")
    command = [sys.executable, "-m", "pytest", *options, "--enginebay-check", part]
    seed = ("--enginebay-seed", "7")
    done = subprocess.run([*command, *seed], capture_output=True, text=True, check=False)
    assert "enginebay: --enginebay-seed 7" in done.stdout
    assert f"CheatError: {trial.EARLIER}" in done.stdout
    assert "1 failed" in done.stdout
    done = subprocess.run(
        [*command, "--enginebay-seed", "-1"], capture_output=True, text=True, check=False
    )
    assert "--enginebay-seed -1. Allowed: 0 to 4294967295." in done.stderr
