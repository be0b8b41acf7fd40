"""Installing the example plugins into a folder of their own, without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

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
    points = "".join(f"{name} = {module}\n" for name, module in project["entry-points"]["enginebay"].items())
    (info / "entry_points.txt").write_text(f"[enginebay]\n{points}", encoding="utf-8")
    for path in [*(p.parent for p in source.glob("*/__init__.py")), *source.glob("enginebay_*.py")]:
        (site / path.name).symlink_to(path, target_is_directory=path.is_dir())
    return site


def run(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`enginebay ARGUMENTS` in a process that sees the folder."""
    return python(site, "-m", "enginebay", *arguments, **variables)


def python(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in a process that sees the folder, and what the caller sees, with more environment variables."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {k: v for k, v in os.environ.items() if k != "ENGINEBAY_PLUGINS"} | {"PYTHONPATH": path} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env=env, cwd=site
    )


def listed(site: Path, **variables: str) -> list[dict[str, Any]]:
    """What `enginebay plugins --json` prints."""
    done = run(site, "plugins", "--json", **variables)
    assert done.returncode == 0, done.stderr
    records: list[dict[str, Any]] = json.loads(done.stdout)
    return records
