"""Configures JAX: the platforms to start, and the compilation cache in a folder of the user. No
other module sets jax.config.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache as _cache
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental.compilation_cache import compilation_cache

from enginebay.config_sections import AUTO
from enginebay.errors import ConfigError
from enginebay.folders import cache_folder, make_private, write_whole

log = logging.getLogger("enginebay.compose")


def default_cache_folder() -> Path:
    """Return the default folder of compiled programs."""
    return cache_folder() / "programs"


def configure_compile_cache(choice: str) -> Path | None:
    """Turn JAX's persistent compilation cache on, and return its folder; None when it stays off.

    "off" leaves JAX as it is, and a folder that JAX was already given (JAX_COMPILATION_CACHE_DIR)
    is kept for "auto". Programs in the folder are executed, so it must belong to the user and be
    closed to others (mode 0700): an explicit folder that is not is a ConfigError, the default one
    is then not used, with a warning.
    """
    if choice == "off":
        return None
    given = jax.config.jax_compilation_cache_dir
    if choice == AUTO and given:
        _keep_everything()
        return Path(given)
    folder, problem = _find_folder(choice)
    if problem and choice != AUTO:
        raise ConfigError(
            f"compile_cache = {choice!r}: {problem}",
            "a folder of your own with mode 0700",
            "Run chmod 700 on it, or pass another folder.",
        )
    if problem:
        log.warning("compiled programs are not cached: %s", problem)
        return None
    if str(folder) != given:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # JAX decides at its first compilation whether and where it caches programs
        compilation_cache.reset_cache()
    _keep_everything()
    return folder


CACHE_FILES = ("*-cache", "*-atime", "*.part", "steps/*.program", "steps/*.part")
"""What JAX's compilation cache and the stored programs consist of."""


def compiled_programs() -> tuple[Path, list[Path]]:
    """Return the folder of compiled programs that "auto" uses, and its files."""
    given = jax.config.jax_compilation_cache_dir
    folder = Path(given) if given else default_cache_folder()
    return folder, [path for files in CACHE_FILES for path in folder.glob(files)]


def stored_programs_folder() -> Path | None:
    """Return the folder of whole programs, below that of JAX's compilation cache; None where there
    is no cache, the cache is a remote one ("gs://..."), or the folder is not closed to other users.
    """
    given = jax.config.jax_compilation_cache_dir
    if (
        not given
        or "://" in given
        or jax.config.jax_persistent_cache_min_compile_time_secs == math.inf
    ):
        return None
    folder = Path(given) / "steps"
    if problem := make_private(folder):
        log.debug("programs are not stored in %s: %s", folder, problem)
        return None
    return folder


@contextlib.contextmanager
def keeping_nothing() -> Iterator[None]:
    """Within the block, compiled programs are not cached: they are for devices that are absent."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def _find_folder(choice: str) -> tuple[Path, str | None]:
    """Return the folder of a choice, created if necessary, and why it cannot be used, or None."""
    try:
        folder = default_cache_folder() if choice == AUTO else Path(choice).expanduser()
    except RuntimeError as error:  # a user without a home folder
        return Path(choice), str(error)
    problem = make_private(folder)
    return folder, f"{folder}: {problem}" if problem else None


_seen = threading.local()


@contextlib.contextmanager
def seen_entries() -> Iterator[list[bytes]]:
    """Yield a list to which the content of each entry is added that JAX reads from its cache, or
    writes, on this thread within the block.
    """
    found: list[bytes] = []
    _seen.entries = found
    try:
        yield found
    finally:
        _seen.entries = None


def executable_of(entry: bytes) -> bytes:
    """Return the serialized executable of an entry."""
    executable, _ = _cache.extract_executable_and_time(_cache.decompress_executable(entry))
    return executable


def _note(entry: bytes) -> None:
    found = getattr(_seen, "entries", None)
    if found is not None:
        found.append(entry)


class _RepairingCache(CacheInterface):
    """JAX's cache, except that an unusable entry is replaced by the newly compiled program, and an
    entry is written whole, or not at all: other processes can read what JAX has written in part.

    JAX looks for an entry before it compiles, and writes one afterwards. An entry that was found
    and is still written was damaged. JAX's own cache would keep the damaged entry and warn about it
    in every later process.
    """

    def __init__(self, real: CacheInterface, folder: Path) -> None:
        self._real = real
        self._path = real._path
        self._folder = folder
        self._found: set[str] = set()

    def get(self, key: str) -> bytes | None:
        found = self._real.get(key)
        if found is not None:
            self._found.add(key)
            _note(found)
        return found

    def put(self, key: str, value: bytes) -> None:
        entry = self._folder / f"{key}-cache"
        if key in self._found:
            log.info("replacing the damaged entry %s of the compile cache", key)
            entry.unlink(missing_ok=True)
        if getattr(self._real, "eviction_enabled", True) or not self._folder.is_dir():
            self._real.put(key, value)  # it counts the entries; or the folder is a remote one
        elif not entry.exists():
            write_whole(entry, value)
        _note(value)


def mend_cache_entries() -> None:
    """Make JAX write whole entries, and replace damaged ones, in every cache that it makes from now
    on.
    """
    make = _cache.get_file_cache
    if getattr(make, "mends", False):
        return

    def get_file_cache(path: str) -> tuple[CacheInterface, str] | None:
        made = make(path)
        return made if made is None else (_RepairingCache(made[0], Path(path)), made[1])

    get_file_cache.mends = True  # type: ignore[attr-defined]
    _cache.get_file_cache = get_file_cache
    compilation_cache.reset_cache()  # an existing cache is made again


def _keep_everything() -> None:
    mend_cache_entries()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_to_cpu() -> bool:
    """Restrict JAX to the CPU; return whether that was done. Platforms that the user chose
    (JAX_PLATFORMS) are kept.
    """
    if jax.config.jax_platforms:
        return False
    jax.config.update("jax_platforms", "cpu")
    return True
