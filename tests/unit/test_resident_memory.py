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
    unset = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # programs as users have them
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.resident_process", engine],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    if engine != "dashinfer":  # which has compiled everything when it has started
        assert found["start"] == pytest.approx(found["start_plan"], rel=0.3)
    assert max(found["full"], found["start"]) < found["max_plan"]
    assert found["full"] - found["idle"] > 0.5 * found["cache"], "the load has filled the cache"
    assert found["idle_again"] < found["idle"] + 0.1 * found["full"]
    assert found["idle_again"] < found["full"] - 0.5 * found["cache"]
