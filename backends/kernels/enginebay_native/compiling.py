"""Compiles the C++ sources into a shared library for this machine, kept in a private folder of the
user.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from enginebay.errors import UnsupportedError, unknown_name
from enginebay.folders import cache_folder, make_private
from enginebay.machine import processor_features
from enginebay.waits import waiting

log = logging.getLogger("enginebay.native")

SOURCES = Path(__file__).parent / "src"
SHIPPED = Path(__file__).parent / "lib"
"""The folder of libraries in a wheel, which were compiled for a level of processors. A source tree
has none.
"""

SSE4 = frozenset(("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"))
AVX2 = SSE4 | frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
LEVELS = {
    "x86-64-v4": AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": AVX2,
    "x86-64-v2": SSE4,
}
"""Levels of processors, best first, with the features of /proc/cpuinfo that each needs."""

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-DNDEBUG",
    "-w",
    "-shared",
    "-fPIC",
)
TIMEOUT_S = 300.0


def library(name: str) -> Path:
    """Return the compiled library of src/{name}.cc.

    It is a library compiled here earlier, or the one in the wheel, or it is compiled now. An
    earlier library is used when its sources, the processor's features, JAX's version and the text
    of CXX are the same; it needs no compiler. Where CXX is set, only libraries that it compiled are
    used. Raises UnsupportedError when there is no compiler (CXX, or c++, g++ or clang++ on the
    PATH), or when it fails.
    """
    target, there = _find(name)
    if there is not None:
        return there
    compiler = find_compiler()
    with _alone_at(target):
        if not target.exists():  # no other thread or process compiled it meanwhile
            with waiting(
                f"compiling the C++ kernel {name} with {Path(compiler[0]).name}, "
                "once for this processor"
            ):
                _compile(compiler, name, target, "native")
    return target


def begin_compiling(*names: str) -> None:
    """Begin to compile the libraries of these names that are not there, as many at a time as there
    are cores, and return at once. `library` waits for a library that is being compiled, and raises
    the errors, which are ignored here.
    """

    def compile_it(name: str) -> None:
        with contextlib.suppress(UnsupportedError, OSError), _compilers():
            library(name)

    for name in names:
        if _find(name)[1] is None:
            threading.Thread(
                target=compile_it, args=(name,), name=f"enginebay-compile-{name}"
            ).start()


@functools.cache
def _compilers() -> threading.Semaphore:
    """How many compilers `begin_compiling` runs at once."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return threading.Semaphore(len(os.sched_getaffinity(0)) if has_affinity else 1)


def check_library(name: str) -> None:
    """Raise UnsupportedError where there is neither a compiled library nor a compiler."""
    _, there = _find(name)
    if there is None:
        find_compiler()


def _find(name: str) -> tuple[Path, Path | None]:
    """Return (path of a library compiled here, the existing library or None)."""
    wanted = os.environ.get("CXX", "")
    digest = _digest(name, processor_features(), wanted)
    target = _folder(cache_folder() / "native") / f"{name}-{digest}.so"
    if target.exists():
        return target, target
    return target, None if wanted else _shipped(name)


def build_library(name: str, level: str, folder: Path) -> Path:
    """Compile src/{name}.cc for a level of LEVELS into a folder, for a wheel.

    The file has the name by which `library` finds it in SHIPPED. Raises UnsupportedError as
    `library` does.
    """
    if level not in LEVELS:
        raise unknown_name("level of processors", level, LEVELS)
    target = folder / f"{name}-{level}-{_digest(name, level)}.so"
    _compile(find_compiler(), name, target, level)
    return target


def _digest(name: str, *more: str) -> str:
    """Return a digest of a library's sources, the flags, and JAX, whose headers are used."""
    key = hashlib.sha256(repr((FLAGS, jax.__version__, more)).encode())
    for path in [*sorted(SOURCES.glob("*.h")), SOURCES / f"{name}.cc"]:
        key.update(path.name.encode() + b"\0" + path.read_bytes())
    return key.hexdigest()[:32]


def _shipped(name: str) -> Path | None:
    """Return the wheel's library for the best level that this processor has, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    features = set(processor_features().split())
    paths = (
        SHIPPED / f"{name}-{level}-{_digest(name, level)}.so"
        for level, needed in LEVELS.items()
        if needed <= features
    )
    return next((path for path in paths if path.exists()), None)


def find_compiler() -> list[str]:
    """Return the C++ compiler and its first arguments: those of CXX, or the first on the PATH."""
    given = os.environ.get("CXX", "").split()
    for words in [given] if given else [[name] for name in COMPILERS]:
        path = shutil.which(words[0])
        if path is not None:
            return [path, *words[1:]]
    raise UnsupportedError(
        f"no C++ compiler: {given[0]} is not there" if given else "no C++ compiler",
        f"what CXX names, or one of {', '.join(COMPILERS)} on the PATH",
        "Install one (on Debian: apt install g++), or choose the kernels xla.",
    )


@contextlib.contextmanager
def _alone_at(target: Path) -> Iterator[None]:
    """Let one process or thread at a time compile a library, so that it is compiled once. Others
    compile other libraries meanwhile.

    Without file locks several may compile it; each writes a complete library.
    """
    path = target.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        place = _locked(path)
        stack.callback(os.close, place)
        # Whoever waits for the lock of a file that is gone makes the file anew.
        stack.callback(path.unlink, missing_ok=True)
        yield


def _locked(path: Path) -> int:
    """Return the descriptor of a file that this thread has locked, and that still has this path."""
    while True:
        place = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(place), path.stat()):
                return place
        except FileNotFoundError:
            pass
        os.close(place)


@functools.cache
def _folder(folder: Path) -> Path:
    """Return a private folder, because its files are executed.

    It is the user's cache folder, or a temporary one where others can write to the former.
    """
    problem = make_private(folder)
    if problem is None:
        return folder
    log.warning("compiled kernels are not kept: %s: %s", folder, problem)
    return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="enginebay-native-")


def _compile(compiler: Sequence[str], name: str, target: Path, processor: str) -> None:
    """Compile for `processor`, a value of -march."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [
            *compiler,
            *FLAGS,
            f"-march={processor}",
            f"-I{jax.ffi.include_dir()}",
            str(SOURCES / f"{name}.cc"),
            "-o",
            str(made),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(compiler, str(error)) from None
        if done.returncode:
            raise _failed(
                compiler, next(iter(done.stderr.splitlines()), f"exit status {done.returncode}")
            )
        made.replace(target)


def _failed(compiler: Sequence[str], why: str) -> UnsupportedError:
    return UnsupportedError(
        f"compiling kernels with {compiler[0]} failed: {why}",
        "GCC 12 or later, or clang, with its C++ library",
        "Name another in CXX, or choose the kernels xla.",
    )
