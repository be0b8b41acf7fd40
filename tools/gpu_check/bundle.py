"""Collects our wheel and wheels of missing dependencies for a machine without a network.

python tools/gpu_check/bundle.py --out build/gpu-check [--present FILE]

FILE is the output of `python3 -m pip list --format freeze` on that machine. Wheels of the packages
in it are left out, and the other wheels are chosen to be compatible with it. Without FILE, the
machine is assumed to have only jax and triton.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.12"
"""The Python version of the machine. Requirements depend on it, so an interpreter of this version
resolves them.
"""

PRESENT = ("jax", "jaxlib", "ml-dtypes", "numpy", "opt-einsum", "scipy", "triton")
"""Packages of the machine that match its driver and are never replaced."""

JAX_TRITON = ("0.3.1", "0.4.1")
"""Both versions lower with triton 3.6, which comes with torch; run.py installs one of them."""


def main() -> None:
    """Fill the folder with a new bundle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument(
        "--present", type=Path, metavar="FILE", help="the machine's packages as lines NAME==VERSION"
    )
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    ours = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(args.out)]
    _pip([sys.executable, "-m", "pip"], ours)
    (wheel,) = args.out.glob("enginebay-*.whl")
    there = (
        present(args.present.read_text(encoding="utf-8"))
        if args.present
        else dict.fromkeys(PRESENT, "")
    )
    pip = [sys.executable, "-m", "pip", "--python", _interpreter()]
    wanted = lacking(resolve(pip, wheel, there), there)
    download = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(args.out)]
    if wanted:
        _pip(pip, [*download, *wanted])
    for version in JAX_TRITON:
        _pip(pip, [*download, f"jax-triton=={version}"])
    wheels = list(args.out.glob("*.whl"))
    megabytes = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"{len(wheels)} wheels in {args.out}, {megabytes:.0f} MB")


def canonical(name: str) -> str:
    """Return a distribution's name in the form in which the package index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def present(freeze: str) -> dict[str, str]:
    """Return versions by name from lines NAME==VERSION; other lines are ignored."""
    pairs = (
        line.strip().partition("==") for line in freeze.splitlines() if not line.startswith("#")
    )
    return {canonical(name): version for name, equals, version in pairs if equals}


def lacking(resolved: Sequence[tuple[str, str]], there: dict[str, str]) -> list[str]:
    """Return NAME==VERSION of the packages that are needed and missing."""
    ours = ("enginebay", "jax-triton")
    return [f"{name}=={v}" for name, v in resolved if canonical(name) not in (*ours, *there)]


def resolve(pip: Sequence[str], wheel: Path, there: dict[str, str]) -> list[tuple[str, str]]:
    """Return name and version of all packages that the wheel and jax-triton need; present ones
    stay.
    """
    with tempfile.TemporaryDirectory() as folder:
        fixed = Path(folder) / "constraints.txt"
        # A local version (2.11.0+cu130) is on no index, and our requirements include no package
        # that needs one.
        lines = [f"{name}=={v}" for name, v in there.items() if v and "+" not in v]
        fixed.write_text("\n".join(lines), encoding="utf-8")
        report = Path(folder) / "report.json"
        how = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--report", str(report)]
        _pip(
            pip,
            [
                "install",
                *how,
                "--constraint",
                str(fixed),
                str(wheel),
                f"jax-triton=={JAX_TRITON[0]}",
            ],
        )
        told = json.loads(report.read_text(encoding="utf-8"))
    return [(one["metadata"]["name"], one["metadata"]["version"]) for one in told["install"]]


def _interpreter() -> str:
    found = subprocess.run(
        [str(ROOT / "tools" / "setup_env.sh"), "--find", "--python", PYTHON],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    if found.returncode:
        raise SystemExit(f"a bundle must be made with Python {PYTHON}, the version of its machine")
    return found.stdout.strip()


def _pip(pip: Sequence[str], arguments: Sequence[str]) -> None:
    command, *rest = arguments
    done = subprocess.run(
        [*pip, "--quiet", "--disable-pip-version-check", "--no-color", command, *rest], check=False
    )
    if done.returncode:
        raise SystemExit(f"pip {command} failed; see its output above")


if __name__ == "__main__":
    main()
