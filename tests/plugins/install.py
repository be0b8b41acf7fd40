"""Installing the example plugins into a folder of their own, without a network."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginebay.cli.program import main

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def can_build() -> bool:
    """Whether a distribution can be built and installed without a network."""
    return all(importlib.util.find_spec(name) is not None for name in ("hatchling", "pip"))


def install(example: str, site: Path) -> Path:
    """Install an example."""
    return install_from(site, EXAMPLES / example)


def install_from(site: Path, *sources: Path) -> Path:
    """Install folders with pip where that is possible, else write by hand what pip would write."""
    if can_build():
        options = [
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-compile",
            "--disable-pip-version-check",
        ]
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            *options,
            "--target",
            str(site),
            *map(str, sources),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return site
    for source in sources:
        put(source, site)
    return site


def put(source: Path, site: Path) -> Path:
    """Write by hand what pip would write of a plugin's folder."""
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    heading = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(heading, encoding="utf-8")
    points = "".join(
        f"{name} = {module}\n" for name, module in project["entry-points"]["enginebay"].items()
    )
    (info / "entry_points.txt").write_text(f"[enginebay]\n{points}", encoding="utf-8")
    for path in [*(p.parent for p in source.glob("*/__init__.py")), *source.glob("enginebay_*.py")]:
        (site / path.name).symlink_to(path, target_is_directory=path.is_dir())
    return site


@contextlib.contextmanager
def visible(site: Path) -> Iterator[None]:
    """What is installed in the folder is found by this process too, and by what it starts; at the
    end it is forgotten.
    """
    before, path = set(sys.modules), _path_with(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ENGINEBAY_PLUGINS", raising=False)
        patch.setenv("PYTHONPATH", path)
        patch.syspath_prepend(site)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                file = getattr(sys.modules[name], "__file__", None)
                if file is not None and Path(file).is_relative_to(site):
                    del sys.modules[name]
    importlib.invalidate_caches()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`enginebay ARGUMENTS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def pytest_within(site: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a run of pytest in this process, with what is installed in the
    folder.
    """
    out = io.StringIO()
    with visible(site), contextlib.redirect_stdout(out):
        code = pytest.main(["--rootdir", str(site), "-c", os.devnull, "-p", "no:xdist", *arguments])
    return int(code), out.getvalue()


def parts() -> list[dict[str, Any]]:
    """What `enginebay plugins --json` prints in this process."""
    return read(command("plugins", "--json"))


def run(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`enginebay ARGUMENTS` in a process that sees the folder."""
    return python(site, "-m", "enginebay", *arguments, **variables)


def python(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a process that sees the folder, and what the caller sees, with more environment
    variables.
    """
    env = {k: v for k, v in os.environ.items() if k != "ENGINEBAY_PLUGINS"}
    env |= {"PYTHONPATH": _path_with(site)} | variables
    words = [sys.executable, *arguments]
    return subprocess.run(
        words, capture_output=True, text=True, check=False, timeout=900, env=env, cwd=site
    )


def listed(site: Path) -> list[dict[str, Any]]:
    """What `enginebay plugins --json` prints in a process that sees the folder."""
    return read(run(site, "plugins", "--json"))


def read(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that a command printed which went well."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _path_with(site: Path) -> str:
    return os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
