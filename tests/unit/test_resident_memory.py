"""What a process with an engine takes, beside what `explain` says before."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from enginebay_xla import demand_memory
from tests.brief import ROOT

MIB = 2**20


def measured(program: str, engine: str) -> dict[str, int]:
    """What a program of tests/unit prints of an engine."""
    unset = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # programs as users have them
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.unit.{program}", engine],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, int] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.skipif(not demand_memory.IS_AVAILABLE, reason="memory is given back on Linux only")
@pytest.mark.parametrize(
    "engine",
    [
        "vinference",
        "oengine",
        "esurge",
        pytest.param("dashinfer", marks=pytest.mark.slow),  # it compiles every program
    ],
)
def test_resident_memory_is_what_the_plan_says_and_comes_back(engine: str) -> None:
    found = measured("resident_process", engine)
    if engine != "dashinfer":  # which has compiled everything when it has started
        assert found["start"] == pytest.approx(found["start_plan"], rel=0.3)
    assert max(found["full"], found["start"]) < found["max_plan"]
    assert found["full"] - found["idle"] > 0.5 * found["cache"], "the load has filled the cache"
    assert found["idle_again"] < found["idle"] + 0.1 * found["full"]
    assert found["idle_again"] < found["full"] - 0.5 * found["cache"]


@pytest.mark.long
@pytest.mark.skipif(not demand_memory.IS_AVAILABLE, reason="memory is given back on Linux only")
def test_the_interpreter_and_the_programs_each_take_what_the_plan_says() -> None:
    """Each figure is an upper bound, and no more than twice what it is the bound of."""
    found = measured("programs_process", "oengine")
    assert found["runtime"] + found["kept"] < found["runtime_plan"] < 2 * found["runtime"]
    assert found["programs"] < found["programs_plan"] < 2 * found["programs"]
