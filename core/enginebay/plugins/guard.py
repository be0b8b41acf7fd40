"""The guard of this process: limits what the code of a plugin can do while it is imported.

===========================  =============================================================
the imported module          then
===========================  =============================================================
raises any exception         the exception is the cause of a PluginError; only a real
                             Ctrl-C ends the program
prints                       the lines are written to stderr after the name of the plugin
changes JAX's configuration  a warning lists the settings, and they are restored
starts a thread              the thread becomes a daemon, so it cannot delay the program's
                             end; a warning names a thread that runs on after the import
===========================  =============================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import io
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, TextIO

from enginebay.errors import error_line

log = logging.getLogger("enginebay.plugins")

THREAD_END_S = 0.1
"""Seconds in which a thread ends that is not meant to run on. JAX starts such a thread, a timer,
when it looks for TPUs.
"""


class StrayExitError(Exception):
    """An import raised a BaseException that is no Exception, such as SystemExit."""


def reason_of(error: BaseException) -> str:
    """Return an error on one line; for a StrayExitError, the exception that was raised first."""
    if isinstance(error, StrayExitError) and error.__cause__ is not None:
        error = error.__cause__
    return error_line(error)


@contextlib.contextmanager
def guarded(who: str) -> Iterator[None]:
    """Run the block as code of `who`, such as "plugin 'lifo'", under the rules of the table above.

    A BaseException that is no Exception becomes a StrayExitError, except for the KeyboardInterrupt
    of a real Ctrl-C.
    """
    with _WATCH.naming(who), _jax_settings_kept(who), _ctrl_c_noted() as pressed:
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if pressed and isinstance(error, KeyboardInterrupt):
                raise
            raise StrayExitError(error_line(error)) from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Import:
    """The plugin whose code a thread imports, and the threads that the code has started."""

    who: str
    threads: list[threading.Thread]


class _Watch:
    """Replaces the standard streams and Thread.start of this process while any thread imports the
    code of a plugin.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._current = threading.local()
        self._streams: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        self._start_thread = threading.Thread.start

    @property
    def running(self) -> _Import | None:
        """The import that this thread runs, or None."""
        found: _Import | None = getattr(self._current, "running", None)
        return found

    @property
    def who(self) -> str | None:
        """The plugin whose code this thread imports, or None."""
        return None if self.running is None else self.running.who

    @contextlib.contextmanager
    def naming(self, who: str) -> Iterator[None]:
        """Mark this thread as importing code of `who` within the block."""
        before, running = self.running, _Import(who, [])
        self._enter()
        self._current.running = running
        try:
            yield
        finally:
            self._current.running = before
            self._leave()
            warn_of_threads(running)

    def print(self, who: str, lines: Sequence[str]) -> None:
        """Write lines to stderr, each after the name `who`."""
        self._streams[1].write("".join(f"{who}: {line}\n" for line in lines))

    def _enter(self) -> None:
        with self._lock:
            self._num_blocks += 1
            if self._num_blocks > 1:
                return
            self._streams = (sys.stdout, sys.stderr)
            sys.stdout, sys.stderr = (_Labelled(self, stream) for stream in self._streams)
            real_start = self._start_thread = threading.Thread.start

            def start(thread: threading.Thread) -> None:
                running = self.running
                if running is None or thread.daemon:
                    real_start(thread)
                    return
                thread.daemon = True
                real_start(thread)
                running.threads.append(thread)

            threading.Thread.start = start  # type: ignore[method-assign,assignment]

    def _leave(self) -> None:
        with self._lock:
            self._num_blocks -= 1
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, _Labelled):
                    stream.end_lines()
            if not self._num_blocks:
                sys.stdout, sys.stderr = self._streams
                threading.Thread.start = self._start_thread  # type: ignore[method-assign]


def warn_of_threads(running: _Import) -> None:
    """Log the threads of an import that run on after it."""
    for thread in running.threads:
        thread.join(THREAD_END_S)
        if thread.is_alive():
            text = "%s starts the thread %r while it is imported; enginebay makes it a daemon"
            log.warning(text, running.who, thread.name)


class _Labelled(io.TextIOBase):
    """A standard stream for all threads. Lines from a thread that imports the code of a plugin are
    written to stderr after the plugin's name.
    """

    def __init__(self, watch: _Watch, real: TextIO) -> None:
        self._watch = watch
        self._real = real
        self._rest: dict[str, str] = {}

    def write(self, text: str) -> int:
        who = self._watch.who
        if who is None:
            return self._real.write(text)
        *lines, rest = (self._rest.pop(who, "") + text).split("\n")
        self._watch.print(who, lines)
        if rest:
            self._rest[who] = rest
        return len(text)

    def flush(self) -> None:
        self._real.flush()

    def end_lines(self) -> None:
        """Print the last lines that were written without a line break."""
        for who, rest in self._rest.items():
            self._watch.print(who, [rest])
        self._rest = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_WATCH = _Watch()


@contextlib.contextmanager
def _ctrl_c_noted() -> Iterator[list[bool]]:
    """Yield a list that gets an item when the user presses Ctrl-C. It distinguishes this from a
    KeyboardInterrupt that the code of a plugin raises.
    """
    pressed: list[bool] = []
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield pressed
        return

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(True)
        handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _jax_settings_kept(who: str) -> Iterator[None]:
    """Restore JAX's configuration after the block. If the block imports JAX, restore the values
    that JAX has just after its import.
    """
    before: dict[str, Any] = {}
    watch = None
    if "jax" in sys.modules:
        before = _settings()
    else:
        watch = _JaxWatch(before)
        sys.meta_path.insert(0, watch)
    try:
        yield
    finally:
        if watch is not None and watch in sys.meta_path:
            sys.meta_path.remove(watch)
        _restore(who, before)


def _settings() -> dict[str, Any]:
    config = getattr(sys.modules.get("jax"), "config", None)
    return {} if config is None else dict(config.values)


def _restore(who: str, before: Mapping[str, Any]) -> None:
    now = _settings() if before else {}
    changed = {name: value for name, value in before.items() if now.get(name, value) != value}
    if not changed:
        return
    changes = ", ".join(f"{name} {value!r} -> {now[name]!r}" for name, value in changed.items())
    log.warning(
        "%s changed JAX's configuration while it was imported: %s. It is restored.", who, changes
    )
    for name, value in changed.items():
        sys.modules["jax"].config.update(name, value)


class _JaxWatch(importlib.abc.MetaPathFinder):
    """Records JAX's configuration when JAX has just been imported."""

    def __init__(self, into: dict[str, Any]) -> None:
        self._into = into

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "jax" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Noting(spec.loader, self._into)
        return spec


class _Noting(importlib.abc.Loader):
    """JAX's own loader, which also records JAX's configuration after the import."""

    def __init__(self, real: importlib.abc.Loader, into: dict[str, Any]) -> None:
        self._real = real
        self._into = into

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._into.update(module.config.values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
