"""The set-up of all tests: four virtual CPU devices, a compilation cache, a reason for each
skip.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pool import EnginePool

ROOT = Path(__file__).resolve().parent.parent
NUM_HOST_DEVICES = 4
# XLA spends nine tenths of a cold run on optimizing tiny programs. The tests do not depend on that:
# XLA lowers the same HLO with fewer passes of LLVM and without the fusions that go through MLIR, in
# a third of the time. Users run XLA's own settings. `make test-slow`, `make parity` and `make
# test-eval` do too, by ENGINEBAY_TESTS_XLA=default, and so do the stages of .ci/run that run from
# the wheel. XLA aborts on an unknown flag: jax 0.10.2 to 0.12 know these. An unknown extra option
# is no error.
QUICK_COMPILING = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def _prepare_jax() -> None:
    """Settle what JAX reads from the environment. XLA reads its flags when the first device is
    asked for.

    What the caller has set stays: JAX_PLATFORMS=cuda runs the device tests on a GPU. Processes that
    tests start inherit all of it.
    """
    cache = ROOT / ".cache" / "jax"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: what lies in it is executed
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # Nothing that a test does may leave this machine: a hub that nobody answers for. Tests of the
    # hub path name their own.
    os.environ.setdefault("HF_ENDPOINT", "http://127.0.0.1:9")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A user's folder of its own: tables that a developer has tuned must not change what is tested.
    os.environ["XDG_CACHE_HOME"] = str(ROOT / ".cache" / "user")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags = f"{flags} --xla_force_host_platform_device_count={NUM_HOST_DEVICES}".strip()
    if (
        os.environ["JAX_PLATFORMS"] == "cpu"
        and os.environ.get("ENGINEBAY_TESTS_XLA", "quick") == "quick"
    ):
        flags = " ".join(
            [flags, *(flag for flag in QUICK_COMPILING if flag.split("=")[0] not in flags)]
        )
    os.environ["XLA_FLAGS"] = flags
    if "jax" in sys.modules:
        # A plugin named with -p may have imported JAX before this file was read: too late for the
        # variables, not for the settings.
        import jax

        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


_prepare_jax()

# A shell that runs tests in the background lets them ignore Ctrl-C, and so would all that they
# start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW_S = 4 * 3600
"""When a slow test is said to hang."""
MARKED_FOLDERS = ("clients", "cluster", "server")
"""Folders of tests, each of which has the marker of its name."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the report that counts the programs of the run."""
    from tests.run_report import RunReport

    config.pluginmanager.register(RunReport(config), "enginebay-run-report")


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from garbage collection, and collect less often.

    Tracing makes many objects, so the default thresholds collect too often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of MARKED_FOLDERS, skip what needs torch where there is none, and let slow
    tests take hours.
    """
    for item in items:
        folder = item.nodeid.removeprefix("tests/").partition("/")[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if item.get_closest_marker("slow") or item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    if importlib.util.find_spec("torch") is not None:
        return
    skip = pytest.mark.skip(
        reason="torch is not installed; `make parity` runs this in an environment that has it"
    )
    for item in items:
        if item.get_closest_marker("torch") is not None:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def patient() -> Iterator[None]:
    """No wait is named on stderr, however slow the machine: tests compare what programs write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginebay.waits.PATIENCE_S", 3600.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def chosen_programs() -> Iterator[None]:
    """With ENGINEBAY_TESTS_PROGRAMS=first, engines have the first programs alone, as a server has
    them when it becomes ready (tests/first_programs.py).
    """
    if os.environ.get("ENGINEBAY_TESTS_PROGRAMS") != "first":
        yield
        return
    from tests.first_programs import first_programs

    with first_programs() as begun:
        yield
        assert begun, "no engine took a step with its first programs"


@pytest.fixture(scope="session", autouse=True)
def whole_entries() -> None:
    """The processes of a run share JAX's cache, and none reads an entry that another one is still
    writing.
    """
    from enginebay.jax_config import mend_cache_entries

    mend_cache_entries()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that pyproject.toml lies in."""
    return ROOT


@pytest.fixture(scope="session")
def engine_pool() -> EnginePool:
    """The pool of real engines of this process."""
    from tests.pool import EnginePool

    return EnginePool()


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """A module's tests leave room for what later ones compile."""
    yield
    if "tests.pool" in sys.modules:
        from tests.pool import make_room

        make_room()


@pytest.fixture
def pooled(engine_pool: EnginePool) -> Iterator[None]:
    """Every engine that a test composes is leased from the pool until the test ends."""
    with engine_pool.leases():
        yield


@pytest.fixture(scope="module")
def pooled_module(engine_pool: EnginePool) -> Iterator[None]:
    """Like `pooled`, until the last test of the module ends."""
    with engine_pool.leases():
        yield


@pytest.fixture(scope="module")
def few_sizes_module(engine_pool: EnginePool) -> Iterator[None]:
    """Like `pooled_module`, for engines with one size of each step: four programs at most."""
    from tests.pool import few_sizes

    with few_sizes(), engine_pool.leases():
        yield


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine that a test composes is the fake engine (tests/fake_engine.py)."""
    from tests.fakes import install

    install(monkeypatch)
