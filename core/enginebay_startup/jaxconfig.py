"""The one place that sets jax.config: the platforms to start, and the compilation cache, in a
folder of the user's own.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src import compilation_cache as _cache
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental.compilation_cache import compilation_cache

from enginebay.config_sections import AUTO
from enginebay.errors import ConfigError
from enginebay_startup.folders import cache_folder, make_private

log = logging.getLogger("enginebay.compose")


def default_cache_folder() -> Path:
    """Where compiled programs are kept unless a folder is given."""
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
            "Correct its mode, or choose another.",
        )
    if problem:
        log.warning("compiled programs are not kept: %s", problem)
        return None
    if str(folder) != given:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # JAX settles whether and where it keeps programs when it first compiles
        compilation_cache.reset_cache()
    _keep_everything()
    return folder


@contextlib.contextmanager
def keeping_nothing() -> Iterator[None]:
    """Within the block, what is compiled is not put into the cache: programs for devices that are
    not there.
    """
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


def _find_folder(choice: str) -> tuple[Path, str | None]:
    """The folder of a choice, made if need be, and why it cannot be used, or None."""
    try:
        folder = default_cache_folder() if choice == AUTO else Path(choice).expanduser()
    except RuntimeError as error:  # a user without a home
        return Path(choice), str(error)
    problem = make_private(folder)
    return folder, f"{folder}: {problem}" if problem else None


class _Mending(CacheInterface):
    """JAX's cache, in which an entry that could not be used is replaced by the program that was
    compiled in its place.

    JAX looks for an entry before it compiles, and writes one after it. An entry that was found and
    is written all the same was damaged: JAX's own cache keeps it, and warns about it in every
    process to come.
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
        return found

    def put(self, key: str, value: bytes) -> None:
        if key in self._found:
            log.info("the damaged entry %s of the compile cache is replaced", key)
            (self._folder / f"{key}-cache").unlink(missing_ok=True)
        self._real.put(key, value)


def _mend_entries() -> None:
    """Have JAX replace damaged entries of the cache that it makes from now on."""
    make = _cache.get_file_cache
    if getattr(make, "mends", False):
        return

    def get_file_cache(path: str) -> tuple[CacheInterface, str] | None:
        made = make(path)
        return made if made is None else (_Mending(made[0], Path(path)), made[1])

    get_file_cache.mends = True  # type: ignore[attr-defined]
    _cache.get_file_cache = get_file_cache
    compilation_cache.reset_cache()  # one that it made before is made again


def _keep_everything() -> None:
    _mend_entries()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def keep_to_cpu() -> bool:
    """Let JAX start the CPU alone; whether it was done: platforms that somebody chose
    (JAX_PLATFORMS) stay.
    """
    if jax.config.jax_platforms:
        return False
    jax.config.update("jax_platforms", "cpu")
    return True
