"""What a machine without a network needs: our wheel, and wheels of what we depend on.

python tools/gpu_check/bundle.py --out build/gpu-check [--no-dependencies]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.12"
PRESENT = ("jax", "numpy", "triton")
"""What the machine has, fit for its driver: never replaced."""

EXTRA = ("jax-triton==0.3.1",)
"""Lowers with triton 3.6, which comes with torch."""


def main() -> None:
    """Fill the folder anew."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument("--no-dependencies", action="store_true", help="our own wheel alone")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    ours = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(args.out)]
    subprocess.run([*pip, *ours], check=True)
    if not args.no_dependencies:
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "dependencies"
        ]
        wanted = [line for line in known if not line.startswith(PRESENT)]
        platform = ["--python-version", PYTHON, "--only-binary=:all:", "--dest", str(args.out)]
        subprocess.run([*pip, "download", *platform, *wanted], check=True)
        subprocess.run([*pip, "download", "--no-deps", *platform, *EXTRA], check=True)
    print(f"{len(list(args.out.glob('*.whl')))} wheels in {args.out}")


if __name__ == "__main__":
    main()
