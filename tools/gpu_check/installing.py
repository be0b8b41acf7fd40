"""Installs the wheels of a bundle into a separate folder, without a network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKE = "make a new bundle on a machine with a network: make gpu-bundle"


def install(bundle: Path, folder: Path, jax_triton: str) -> Path:
    """Return a folder for PYTHONPATH with our wheel, jax-triton, and their dependencies that this
    Python lacks.

    Neither this Python's environment nor the system is changed, and neither venv nor ensurepip is
    needed. SystemExit says what is missing.
    """
    ours = _one(bundle, "enginebay-*.whl")
    stale = changed(ours, ROOT)
    if stale is not None:
        raise SystemExit(f"{ours} does not match this checkout: {stale} differs; {MAKE}")
    triton = _one(bundle, f"jax_triton-{jax_triton}-*.whl")
    shutil.rmtree(folder, ignore_errors=True)
    lacking = [wheel for wheel in _resolve(bundle, ours) if wheel not in (ours, triton)]
    how = ["--no-index", "--no-deps", "--no-compile", "--target", str(folder)]
    _pip(["install", *how, *map(str, [ours, triton, *lacking])])
    return folder


def changed(wheel: Path, root: Path) -> str | None:
    """Return one of our files that differs between a wheel and a checkout, or None."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
    ours = {
        str(path.relative_to(folder.parent)): path
        for folder in _packages(root)
        for path in folder.rglob("*")
        if path.suffix == ".py" or str(path.relative_to(folder.parent)) in packed
    }
    both = sorted({*packed, *ours})
    return next(
        (n for n in both if n not in packed or n not in ours or packed[n] != ours[n].read_bytes()),
        None,
    )


def _packages(root: Path) -> list[Path]:
    """Return the folders of the packages that the wheel of a checkout has."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    return [root / folder for folder in wheel["packages"]]


def _one(bundle: Path, pattern: str) -> Path:
    wheels = sorted(bundle.glob(pattern))
    if len(wheels) != 1:
        raise SystemExit(f"{len(wheels)} wheels {pattern} in {bundle}, expected one; {MAKE}")
    return wheels[0].resolve()


def _resolve(bundle: Path, ours: Path) -> list[Path]:
    """Return the wheels that pip would install with ours; installed packages that fit stay."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        how = ["--dry-run", "--no-index", "--find-links", str(bundle), "--report", str(report)]
        _pip(["install", *how, str(ours), "absl-py"])  # absl-py is a dependency of jax-triton
        told = json.loads(report.read_text(encoding="utf-8"))
    urls = [one["download_info"]["url"] for one in told["install"]]
    return [Path(urllib.parse.unquote(urllib.parse.urlparse(url).path)).resolve() for url in urls]


def _pip(arguments: Sequence[str]) -> None:
    command, *rest = arguments
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # The user's pip settings may apply: only --no-index matters.
    if subprocess.run([*pip, command, *rest], check=False).returncode:
        raise SystemExit(
            f"the bundle does not fit the packages of {sys.executable}; see pip's output above. "
            f"List the packages with `{sys.executable} -m pip list --format freeze > "
            "there.txt`, and "
            f'{MAKE} GPU_BUNDLE_ARGS="--present there.txt"'
        )
