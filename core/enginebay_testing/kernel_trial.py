"""Trials of registered kernels (see `trial`): in this process, and in a process of their own.

    python -m enginebay_testing.kernel_trial REQUEST

REQUEST is the JSON of a KernelRequest. The last line of output is the outcome's JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pickle
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginebay.compose.import_paths import with_paths_of
from enginebay.compose.quick_cases import CheckSetting
from enginebay.compose.quick_check import why_different
from enginebay.config import EngineConfig
from enginebay.contracts.cache import KVLayout
from enginebay.errors import EnginebayError, UnsupportedError
from enginebay.ops.caps import Env
from enginebay.ops.op import Op
from enginebay.ops.spec import AttnSpec
from enginebay.plugins.registry import Entry, Registry, import_target, load_registry
from enginebay_testing import suites
from enginebay_testing.process_state import ProcessState
from enginebay_testing.trial import OTHERWISE, Trial
from enginebay_testing.verdicts import CheatError, Outcome, judge
from enginebay_testing.workers import WORKER_ENVIRONMENT

SPEC = AttnSpec(4, 2, 16)
DTYPE, PAGE_SIZE = "float32", 16
MAX_SEED = 2**32 - 1
LIMIT_S = 180.0
"""Max seconds of a trial in a process of its own, and of a call outside of a check."""

BARE = Path(__file__).with_name("bare_call.py")


def drawn_seed() -> int:
    """Return a random seed, which a kernel cannot know before the run."""
    return secrets.randbelow(MAX_SEED + 1)


@dataclasses.dataclass(frozen=True)
class KernelRequest:
    """A trial in a process of its own: a kernel of an op by its registered name or import path,
    on a platform. `modules` are imported first, so that the kernel finds what a command imports.
    """

    op: str
    kernel: str
    seed: int
    platform: str = "cpu"
    modules: Sequence[str] = ()


def registered_trial(
    registry: Registry,
    entry: Entry,
    env: Env,
    seed: int,
    *,
    outside: bool,
    before: Callable[[], ProcessState] | None = None,
) -> Callable[[], None]:
    """Return a function that tries a kernel on one of the op's quick cases, which the seed chooses,
    and raises as `Trial.run` does. `outside`: also compare with a call in a process that checks
    nothing. `before` returns the state of the process before the kernel was imported; None: the
    state when the trial begins.
    """

    def run() -> None:
        trial, number, layout = quick_trial(registry, entry, env, seed)
        trial.run(None if before is None else before())
        if outside:
            name = next(n for n in registry.names("layout") if _layout(registry, n) is layout)
            _compare_outside(trial, entry, env, name, number)

    return run


def quick_trial(
    registry: Registry, entry: Entry, env: Env, seed: int
) -> tuple[Trial, int, type[KVLayout]]:
    """Return the trial of a kernel on one of the op's quick cases, which the seed chooses; the
    number of the case, and its layout. UnsupportedError when the kernel serves no quick case.
    """
    kernel = registry.load(entry)
    op: Op[Any] = registry.load(registry.find("op", entry.op))
    layout = suites.kernel_layouts(registry, entry, kernel)[0]
    setting = CheckSetting(env, [SPEC], layout, DTYPE, page_size=PAGE_SIZE)
    cases = import_target(op.quick_cases, f"the quick cases of op {op.name!r}")(setting)
    served = [(i, case) for i, case in enumerate(cases) if case.serves(kernel)]
    if not served:
        raise UnsupportedError(
            f"{suites.label(entry)} serves none of the op's quick cases",
            "a kernel that serves one of them",
            "Judge it by the op's other cases.",
        )
    number, case = served[seed % len(served)]
    return Trial(op, kernel, case, seed, _rivals(registry, entry, op, env)), number, layout


def _layout(registry: Registry, name: str) -> type[KVLayout]:
    found: type[KVLayout] = registry.load(registry.find("layout", name))
    return found


def _rivals(
    registry: Registry, entry: Entry, op: Op[Any], env: Env
) -> Mapping[str, Callable[..., Any]]:
    """Return what may not answer in a kernel's place: the op's reference and oracle, and its
    kernels of other packages.
    """
    found: dict[str, Callable[..., Any]] = {
        "the reference": import_target(op.reference, f"the reference of op {op.name!r}")
    }
    if op.oracle is not None:
        found["the oracle"] = import_target(op.oracle, f"the oracle of op {op.name!r}")
    for other in registry.entries:
        is_rival = (other.kind, other.op) == ("kernel", entry.op) and other.name != entry.name
        if is_rival and other.package != entry.package and other.why_not_on(env.platform) is None:
            with contextlib.suppress(EnginebayError):
                found[f"kernel {other.name}"] = registry.load(other)
    return found


def _compare_outside(trial: Trial, entry: Entry, env: Env, layout: str, number: int) -> None:
    """Raise CheatError when a kernel that is right here is wrong in a process without a check."""
    leaves = trial.secret(50)
    asked = {
        "op": entry.op,
        "kernel": entry.name,
        "layout": layout,
        "platform": env.platform,
        "case": number,
        "spec": {n: getattr(SPEC, n) for n in ("num_q_heads", "num_kv_heads", "head_dim")},
        "dtype": DTYPE,
        "page_size": PAGE_SIZE,
        "leaves": leaves,
    }
    environment = {k: v for k, v in os.environ.items() if k not in WORKER_ENVIRONMENT}
    if env.platform != "cpu":  # this process has its share of the device's memory
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    done = subprocess.run(
        [sys.executable, "-P", "-c", BARE.read_text(encoding="utf-8")],
        input=pickle.dumps(asked),
        capture_output=True,
        timeout=LIMIT_S,
        env=environment,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise CheatError(f"{OTHERWISE}: it raises {last[:200]}")
    found: Mapping[str, np.ndarray] = pickle.loads(done.stdout)  # noqa: S301  # our own program
    difference = why_different(trial.op, trial.case, found, trial.wanted(leaves))
    if difference is not None:
        raise CheatError(f"{OTHERWISE}: {difference}")


def tried_apart(request: KernelRequest) -> Outcome:
    """Return the outcome of a trial in a process of its own, which may end or never answer."""
    text = json.dumps(dataclasses.asdict(request))
    command = [sys.executable, "-m", "enginebay_testing.kernel_trial", text]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome("TIMEOUT", f"no answer to a trial within {LIMIT_S:g} s")
    try:
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return Outcome("ERROR", f"its trial ended with exit code {done.returncode}: {last[:200]}")


def tried_here(request: KernelRequest) -> Outcome:
    """Return the outcome of a trial in this process."""
    from enginebay.compose.platforms import find_platform

    for module in request.modules:
        importlib.import_module(module)
    before = ProcessState.now()

    def run() -> None:
        registry = with_paths_of(load_registry(), [request.op], [request.kernel], "hnd")
        platform = find_platform(registry, EngineConfig(platform=request.platform))
        entry = registry.find("kernel", request.kernel, request.op)
        env = platform.env()
        trial = registered_trial(
            registry, entry, env, request.seed, outside=True, before=lambda: before
        )
        suites.run_on(platform, trial)

    return judge(run)


def main(argv: Sequence[str]) -> None:
    """Print the outcome of the request in `argv`. What the kernel prints goes to stderr."""
    from enginebay.jax_start import start_jax

    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    start_jax()
    outcome = tried_here(KernelRequest(**json.loads(argv[0])))
    answer.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    answer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
