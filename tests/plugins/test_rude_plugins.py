"""Whatever a plugin does while it is imported harms nobody: it is named, and put back where it can
be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from enginebay import LLM
from enginebay.compose.platforms import make_platforms, pick_platform
from enginebay.config import EngineConfig
from enginebay.errors import InternalError, PluginError, UnsupportedError
from enginebay.plugins.registry import Registry, import_target, load_registry
from tests.brief import BRIEF
from tests.unit.serving import SIZES

pytestmark = pytest.mark.xdist_group("rude_plugins")  # they share a listing of a few seconds

GOOD = """
from enginebay.plugins.hooks import hookimpl
@hookimpl
def register_schedulers(register):
    register("{module}_part", "enginebay_schedulers.fcfs:Fcfs")
"""

PLUGINS = {
    "leaving": "raise SystemExit('from a plugin')",
    "exiting": "import sys\nsys.exit(3)",
    "ending": "class End(BaseException): pass\nraise End('of everything')",
    "wordless": ("class Wordless(Exception):\n    def __str__(self): raise SystemExit(3)\n"
        "raise Wordless"),
    "shouting": "raise ValueError('red \\x1b[31m' + 'a' * 10**6)",
    "asked": ("def __getattr__(name): raise SystemExit(name)\n"
        "def __dir__(): raise SystemExit('dir')"),
    "widening": "import jax\njax.config.update('jax_enable_x64', True)",
    "threading_on": ("import threading, time\nthreading.Thread(target=time.sleep, args=(5,), "
        "name='long').start()"),
    "timing": ("import threading\nshort = threading.Timer(60, print)\nshort.name = 'short'\n"
        "short.start()\nshort.cancel()"),
    "slow": "import time\ntime.sleep(0.2)",
    "failing": """
from enginebay.contracts.scheduler import Scheduler
class Failing(Scheduler):
    def initial_state(self):
        return None
    def decide(self, view, state):
        raise RuntimeError("no decision")
from enginebay.plugins.hooks import hookimpl
@hookimpl
def register_schedulers(register):
    register("never", "harmful_failing:Failing")
""",
    "sinking": """
from enginebay.plugins.hooks import hookimpl
class Leaving:
    def __init__(self):
        raise SystemExit(3)
class Asked:
    priority = 99
    def why_not(self):
        raise RuntimeError("no driver")
@hookimpl
def register_platforms(register):
    register("leaving", "harmful_sinking:Leaving")
    register("asked", "harmful_sinking:Asked")
""",
    "hooking": """
from enginebay.plugins.hooks import hookimpl
@hookimpl
def register_kernels(register):
    raise SystemExit
""",
}  # fmt: skip
BROKEN = {
    "leaving": "SystemExit: from a plugin",
    "exiting": "SystemExit: 3",
    "ending": "End: of everything",
    "hooking": "register_kernels failed: SystemExit",
    "wordless": "Wordless: its message cannot be read",
    "shouting": "ValueError: red [31maaaa",
    "asked": "SystemExit: dir",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one distribution for each plugin."""
    folder = tmp_path_factory.mktemp("harmful")
    for name, source in PLUGINS.items():
        module = f"harmful_{name}"
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[enginebay]\n{name} = {module}\n")
        (folder / f"{module}.py").write_text(
            f"{source}\n{'' if 'register_' in source else GOOD}".replace("{module}", name)
        )
    return folder


@pytest.fixture(scope="module")
def listing(site: Path) -> subprocess.CompletedProcess[str]:
    """`plugins --json --timings` in a process of its own."""
    code = (
        "import sys\n"
        "from enginebay.cli.program import main\n"
        "code = main(['plugins', '--json', '--timings'])\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_ends_and_prints_nothing_but_its_table(
    listing: subprocess.CompletedProcess[str],
) -> None:
    assert listing.returncode == 0, listing.stderr
    assert {row["plugin"] for row in json.loads(listing.stdout)} >= {*PLUGINS, "schedulers"}


def test_threads_are_named(listing: subprocess.CompletedProcess[str]) -> None:
    """JAX looks for TPUs with a timer that it cancels, which is not worth a warning."""
    assert "plugin 'threading_on' starts the thread 'long'" in listing.stderr
    assert "starts the thread 'short'" not in listing.stderr


def test_timings_say_who_is_slow(listing: subprocess.CompletedProcess[str]) -> None:
    rows = json.loads(listing.stdout)
    seconds = {row["plugin"]: row["seconds"] for row in rows}
    assert seconds["slow"] > 0.2 > seconds["schedulers"]
    assert [row["seconds"] for row in rows] == sorted(seconds.values(), reverse=True)


@pytest.fixture
def registry(site: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.syspath_prepend(site)
    for name in PLUGINS:
        monkeypatch.delitem(sys.modules, f"harmful_{name}", raising=False)
    monkeypatch.setenv("ENGINEBAY_PLUGINS", ",".join([*BROKEN, "schedulers", "widening"]))
    return load_registry()


def test_a_plugin_that_raises_no_exception_is_broken_and_the_others_are_there(
    registry: Registry,
) -> None:
    broken = {entry.name: entry.reason for entry in registry.entries if entry.kind == "plugin"}
    assert broken.keys() == BROKEN.keys()
    for name, reason in BROKEN.items():
        assert reason.strip() in broken[name]
    assert registry.find("scheduler", "fcfs").state == "ready"
    with pytest.raises(PluginError, match="SystemExit: from a plugin"):
        registry.find("scheduler", "leaving")


def test_jax_that_was_imported_before_is_put_back_too(
    caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    import jax

    request.getfixturevalue("registry")
    assert "plugin 'widening' changed JAX's configuration" in caplog.text
    assert not jax.config.jax_enable_x64


def test_a_part_that_raises_no_exception_when_it_is_imported_is_a_plugin_error(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site)
    with pytest.raises(PluginError, match=r"scheduler 'x': importing .* failed: SystemExit"):
        import_target("harmful_leaving:Part", "scheduler 'x'")


def test_platforms_that_raise_are_left_out_and_refused_when_asked_for(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("ENGINEBAY_PLUGINS", "sinking,xla")
    registry = load_registry()
    platforms = make_platforms(registry)
    assert "leaving" not in {one.name for one in platforms if one.impl is not None}
    assert pick_platform(registry, EngineConfig(), platforms).name == "cpu"
    for name, reason in (("asked", "RuntimeError: no driver"), ("leaving", "SystemExit: 3")):
        with pytest.raises(UnsupportedError, match=reason):
            pick_platform(registry, EngineConfig(platform=name), platforms)


@pytest.mark.usefixtures("faked")
def test_the_plugin_whose_part_failed_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv(
        "ENGINEBAY_PLUGINS", "executor,failing,models,oengine,samplers,schedulers,xla"
    )
    with LLM(BRIEF, scheduler="never", **SIZES) as llm:
        with pytest.raises(InternalError, match="no decision") as caught:
            llm.generate("Once upon a time")
    assert "Please report this to the authors of plugin 'failing' of harmful_failing 1.0." in str(
        caught.value
    )


CTRL_C = """
import signal
from enginebay.plugins.guard import guarded
try:
    with guarded("plugin 'slow'"):
        signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_real_ctrl_c_ends_the_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "interrupted\n", done.stderr
