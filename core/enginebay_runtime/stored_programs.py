"""ProgramStore: compiled steps in files, which a later process loads without tracing them.

A file has what JAX knows of a program, or of each program of a LayeredStep, and its executable as
an entry of JAX's compilation cache has it. The entry itself is not read later: processes that start
at once compile the same program to other bytes. The file's name is a digest of all that the program
was made from: `EngineParts.program_digest`, the step's key, the layouts, the shapes of weights and
state, versions, JAX's settings, devices, processor. The file also lists the modules of the process
that wrote it and the digests of their source files: when a source file has other content, or a
module was loaded from another file, the program is not loaded. The file has its name in it and a
checksum, and it must belong to the user and be closed to others, because loading it executes what
is in it.

A process in which a function of enginebay or of a plugin was replaced by one of a script neither
loads nor stores programs. A program that depends on a data file that a plugin reads is not told
from others.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import itertools
import json
import logging
import os
import pickle
import stat
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from enginebay.contracts.executor import EngineParts
from enginebay.folders import PART, write_whole
from enginebay.jax_config import executable_of
from enginebay.machine import processor_features
from enginebay_runtime.layered import LayeredStep

log = logging.getLogger("enginebay_runtime")

MAX_BYTES, MAX_AGE_S = 4 << 30, 60 * 24 * 3600
"""The oldest files are removed beyond this size of the folder, and files not used for this time."""

PRUNE_EVERY = 50
"""After how many stored programs old files are looked for."""

_STARTED_NS = time.time_ns()
"""When this process began. A source file that is newer may differ from what was imported."""

_SAVES = itertools.count()
_MAGIC = b"enginebay program 4\n"
_SUFFIX = ".program"
_DIGEST_BYTES = 32
_MAX_PART_AGE_S = 3600
"""A file that is older was left by a process that was killed while it wrote."""

_SETTINGS_OUT = frozenset({"cache", "log", "logging", "dump"})
"""Words in the names of JAX's settings that do not change a program."""

_VARIABLES = ("XLA_", "JAX_", "LIBTPU_", "CUDA_", "NVIDIA_", "OMP_", "TRITON_")
"""Beginnings of the names of environment variables on which a compiled program may depend."""


class ProgramStore:
    """The stored programs of one executor. Any thread may call any method. No method raises: a file
    that cannot be used is a miss, and its reason is logged at level debug.
    """

    def __init__(self, folder: Path, parts: EngineParts) -> None:
        """`folder`: a private folder of the user. `parts`: what the programs are made of, besides
        the names that `load` gets; they have a `program_digest`.
        """
        self.folder, self._devices = folder, tuple(parts.placement.devices)
        self._calls, self._register = parts.custom_calls, parts.register_call
        self._base = _digest(parts.program_digest, *_environment(self._devices))
        _sources()  # before anything is traced: the files may change while this process runs
        self._replaced = _replaced()
        if self._replaced is not None:
            log.debug("stored programs are not used: %s was replaced", self._replaced)

    @property
    def is_used(self) -> bool:
        """Whether this process loads and stores programs."""
        return self._replaced is None

    def has(self, *names: object) -> bool:
        """Whether there is a file of the program with these names."""
        return self.is_used and self._path(names).is_file()

    def load(self, *names: object) -> Any | None:
        """The program with these names, or None. A name's repr tells it from all others."""
        if not self.is_used:
            return None
        path = self._path(names)
        try:
            payload = _read(path)
            if payload is None:
                return None
            stored = pickle.loads(payload)  # noqa: S301  # a file of the user's own, like a program
            if stored["name"] != path.name:
                raise ValueError(f"it is a copy of {stored['name']}")
            changed = _first_changed(stored["sources"])
            if changed is not None:
                log.debug("stored program %s: %s has changed", path.name, changed)
                return None
            other = _first_other(stored["modules"])
            if other is not None:
                log.debug("stored program %s: %s is another file here", path.name, other)
                return None
            programs = [self._loaded(*each) for each in stored["programs"]]
            calls = stored["calls"]
            program = programs[0] if calls is None else LayeredStep(calls, programs)
            os.utime(path)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with a file, it is a miss
            log.debug("stored program %s: %s: %s", path.name, type(error).__name__, error)
            return None
        return program

    def _loaded(self, pickled: bytes, entry: bytes) -> Any:
        executable = executable_of(entry)
        for call in self._calls:
            if call.encode() in executable:
                self._register(call)
        client = self._devices[0].client
        loader = _Unpickler(io.BytesIO(pickled), client, self._devices)
        loader.executable = executable
        unloaded, args, no_kwargs, in_tree, out_tree = loader.load()
        return jax.stages.Compiled(
            unloaded.load(), [], in_tree.unflatten(args), out_tree, no_kwargs=no_kwargs
        )

    def save(self, program: Any, entries: Sequence[bytes], *names: object) -> None:
        """Store a compiled program, or a LayeredStep, under these names. `entries`: the content of
        the entry in JAX's compilation cache of each of its programs.
        """
        if not self.is_used:
            return
        path = self._path(names)
        try:
            sources, modules = _sources()
            if late := next((p for p in sources if _mark(p)[1] > _STARTED_NS), None):
                raise ValueError(f"{late} was changed after this process began")
            is_layered = isinstance(program, LayeredStep)
            programs = program.programs if is_layered else (program,)
            each = zip(programs, entries, strict=True)
            stored = {
                "name": path.name,
                "programs": [(_pickled(one), entry) for one, entry in each],
                "calls": program.calls if is_layered else None,
                "sources": sources,
                "modules": modules,
            }
            payload = pickle.dumps(stored)
            write_whole(path, _MAGIC + hashlib.sha256(payload).digest() + payload)
            if next(_SAVES) % PRUNE_EVERY == 0:
                _prune(self.folder)
        except Exception as error:  # noqa: BLE001  # a full disk must not end a request
            log.debug("program %s is not stored: %s: %s", path.name, type(error).__name__, error)

    def _path(self, names: Sequence[object]) -> Path:
        return self.folder / f"{_digest(self._base, *map(repr, names))}{_SUFFIX}"


_LIB = importlib.import_module("jax._src.lib")  # names that JAX does not export
_EXECUTABLES = (_LIB.xla_client.LoadedExecutable, _LIB._jax.Executable)


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Writes a mark in place of an executable, because an executable that was itself loaded from a
    cache cannot be serialized again.
    """

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _EXECUTABLES):
            return ("exec", None)
        return super().persistent_id(obj)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """Loads `executable` in place of the mark."""

    executable: bytes

    def persistent_load(self, pid: Any) -> Any:
        return super().persistent_load(("exec", self.executable) if pid[0] == "exec" else pid)


def _pickled(program: Any) -> bytes:
    """All of a compiled program but its executable. ValueError when it cannot be stored."""
    unloaded = getattr(program._executable, "_unloaded_executable", None)
    if unloaded is None or program._params.const_args:
        raise ValueError("JAX cannot serialize this program")
    args, in_tree = jax.tree.flatten(program.args_info)
    file = io.BytesIO()
    _Pickler(file).dump((unloaded, args, program._no_kwargs, in_tree, program.out_tree))
    return file.getvalue()


def trace_settings() -> tuple[tuple[str, str], ...]:
    """JAX's settings on this thread that change a program which is traced here."""
    values = sorted(jax.config.values.items())
    return tuple((n, repr(v)) for n, v in values if _SETTINGS_OUT.isdisjoint(n.split("_")))


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _environment(devices: Sequence[jax.Device]) -> list[str]:
    """What compiled programs depend on that is no part of an engine: versions, environment
    variables, and the machine.
    """
    variables = {n: v for n, v in os.environ.items() if n.startswith(_VARIABLES)}
    client = devices[0].client
    return [
        sys.version,
        *_distributions(),
        repr(sorted(variables.items())),
        f"{client.platform} {client.platform_version} {devices[0].device_kind}",
        repr([device.id for device in devices]),
        str(jax.device_count()),
        str(os.cpu_count()),
        processor_features(),
    ]


@functools.cache
def _distributions() -> tuple[str, ...]:
    """The installed distributions with their versions, as their metadata folders are named."""
    found: list[str] = []
    for folder in _site_packages():
        with contextlib.suppress(OSError):
            names = os.listdir(folder)  # noqa: PTH208  # a list of thousands of names
            found += [name for name in names if name.endswith((".dist-info", ".egg-info"))]
    return tuple(sorted(found))


def _site_packages() -> set[str]:
    """The folders of installed distributions: those of a virtual environment, of the Python that it
    was made from, and of the user.
    """
    paths = sysconfig.get_paths()
    names = ("site-packages", "dist-packages")
    others = {path for path in sys.path if isinstance(path, str) and Path(path).name in names}
    return {paths["purelib"], paths["platlib"]} | others


_seen: dict[str, str] = {}
"""The digests of source files by path, as this process first saw them. A file that is edited later
has not the code that runs here.
"""


def _sources() -> tuple[dict[str, str], dict[str, str]]:
    """The digests of the source files of all modules that are loaded now, by path, and the paths of
    these modules, by name. The modules of Python and of installed distributions are left out,
    except for those of enginebay and of plugins: their versions are part of a program's name.
    """
    library = tuple(f"{path}{os.sep}" for path in _library_folders())
    own = _plugin_packages()
    paths: set[str] = set()
    modules: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__")  # runs no __getattr__ of a module
        if not isinstance(path, str) or not path.endswith(".py"):
            continue
        top = name.partition(".")[0]
        is_own = top in own or top.startswith("enginebay_")
        if path.startswith(library) and not is_own:
            continue
        if is_own and name == top:
            paths.update(_native_sources(path))
        paths.add(path)
        if name not in ("__main__", "__mp_main__"):  # every script has these names
            modules[name] = path
    for path in paths:
        if path not in _seen and (digest := _file_digest(path, _mark(path))):
            _seen[path] = digest
    return {path: _seen[path] for path in paths if path in _seen}, modules


def _replaced() -> str | None:
    """The first function or class of enginebay, or of a plugin, that was replaced by one of a
    module that is neither theirs nor installed, such as a script's; None if there is none.
    """
    own, folders = _plugin_packages(), tuple(f"{path}{os.sep}" for path in _library_folders())

    def is_own(name: str) -> bool:
        top = name.partition(".")[0]
        return top in own or top.startswith("enginebay_")

    def is_foreign(value: object) -> bool:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        if not isinstance(value, types.FunctionType | type):
            return False
        name = value.__module__
        path = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
        return isinstance(path, str) and not is_own(name) and not path.startswith(folders)

    for name, module in list(sys.modules.items()):
        if not is_own(name):
            continue
        for attribute, value in list(vars(module).items()):
            if is_foreign(value):
                return f"{name}.{attribute}"
            if isinstance(value, type) and value.__module__ == name:
                for member, inner in list(vars(value).items()):
                    if is_foreign(inner):
                        return f"{name}.{attribute}.{member}"
    return None


def _library_folders() -> set[str]:
    """The folders of Python's own modules and of installed distributions."""
    return {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib")} | _site_packages()


@functools.cache
def _native_sources(module: str) -> tuple[str, ...]:
    """The C++ sources of a package, by the path of its module."""
    path = Path(module)
    if path.name != "__init__.py":
        return ()
    found = (each for suffix in ("cc", "h") for each in path.parent.rglob(f"*.{suffix}"))
    return tuple(map(str, found))


def _plugin_packages() -> set[str]:
    """The first names of the modules of enginebay and of what its entry points load."""
    import importlib.metadata

    points = importlib.metadata.entry_points(group="enginebay")
    names = {point.value.partition(":")[0].partition(".")[0] for point in points}
    return names | {"enginebay"}


def _mark(path: str) -> tuple[int, int]:
    """Size and time of the last change of a file, (-1, -1) if there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  # every load does this for hundreds of files
    except OSError:
        return -1, -1
    return found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=8192)
def _file_digest(path: str, mark: tuple[int, int]) -> str:
    """The digest of a file's content, "" if it cannot be read. It is computed once for each
    `mark`.
    """
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _first_changed(sources: dict[str, str]) -> str | None:
    """The first of these files whose content is another one, now or when it was first seen."""
    return next(
        (p for p, d in sources.items() if not _file_digest(p, _mark(p)) == d == _seen.get(p, d)),
        None,
    )


def _first_other(modules: dict[str, str]) -> str | None:
    """The first of these modules that this process loaded from another file."""
    for name, path in modules.items():
        here = getattr(sys.modules.get(name), "__file__", None)
        if here is not None and here != path:
            return name
    return None


def _read(path: Path) -> bytes | None:
    """The payload of a file; None if there is none. ValueError when it cannot be trusted, was cut
    short or changed.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with io.FileIO(number) as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_uid != os.getuid():
            raise ValueError("it belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError("other users can access it")
        if found.st_size > MAX_BYTES:
            raise ValueError("it is too large")
        data = file.readall()
    head, check = len(_MAGIC), len(_MAGIC) + _DIGEST_BYTES
    if data[:head] != _MAGIC:
        raise ValueError("it has another format")
    if hashlib.sha256(data[check:]).digest() != data[head:check]:
        raise ValueError("its bytes were changed")
    return data[check:]


_pruning = threading.Lock()


def _prune(folder: Path) -> None:
    """Remove files that were not used for MAX_AGE_S, the oldest ones beyond MAX_BYTES, and what
    killed processes left.
    """
    with _pruning:
        for part in folder.glob(f"*{PART}"):
            with contextlib.suppress(OSError):
                if part.stat().st_mtime < time.time() - _MAX_PART_AGE_S:
                    part.unlink()
        marks: list[tuple[float, int, Path]] = []
        for path in folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                found = path.stat()
                marks.append((found.st_mtime, found.st_size, path))
        total, oldest = sum(size for _, size, _ in marks), time.time() - MAX_AGE_S
        for used, size, path in sorted(marks):
            if used >= oldest and total <= MAX_BYTES:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
