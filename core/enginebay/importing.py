"""Imports of a plugin's code: what a module does to this process while it is imported is named, and
undone where it can be.

==================================  ====================================================
while it is imported, it            then
==================================  ====================================================
raises, whatever it is              PluginError's cause; Ctrl-C alone ends the program
prints                              the lines go to stderr, behind the plugin's name
changes JAX's configuration         a warning names the settings; they are put back
starts a thread                     the thread is a daemon: the program ends without it
==================================  ====================================================
"""

from __future__ import annotations

import contextlib
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


class StrayExitError(Exception):
    """An import raised something that is no Exception, such as SystemExit or KeyboardInterrupt."""


def reason_of(error: BaseException) -> str:
    """An error in one line, a stray exit as what it was raised as."""
    if isinstance(error, StrayExitError) and error.__cause__ is not None:
        error = error.__cause__
    return error_line(error)


@contextlib.contextmanager
def guarded(who: str) -> Iterator[None]:
    """Within the block this thread runs code of `who`, such as "plugin 'lifo'", as the table above
    says.

    Whatever the code raises that is no Exception becomes a StrayExitError, but for the
    KeyboardInterrupt of a real Ctrl-C.
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


class _Watch:
    """Watches the standard streams and new threads of this process while any thread imports a
    plugin's code.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._current = threading.local()
        self._streams: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        self._start_thread = threading.Thread.start

    @property
    def who(self) -> str | None:
        """Whose code this thread imports; None: none."""
        found: str | None = getattr(self._current, "who", None)
        return found

    @contextlib.contextmanager
    def naming(self, who: str) -> Iterator[None]:
        """Within the block this thread imports code of `who`."""
        before = self.who
        self._enter()
        self._current.who = who
        try:
            yield
        finally:
            self._current.who = before
            self._leave()

    def print(self, who: str, lines: Sequence[str]) -> None:
        """Write lines to stderr, behind a name."""
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
                self._make_daemon(thread)
                real_start(thread)

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

    def _make_daemon(self, thread: threading.Thread) -> None:
        who = self.who
        if who is not None and not thread.daemon:
            told = (
                "%s starts the thread %r while it is imported: it does not keep the program alive"
            )
            log.warning(told, who, thread.name)
            thread.daemon = True


class _Labelled(io.TextIOBase):
    """A standard stream for all threads: lines of one that imports a plugin's code go to stderr,
    behind its name.
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
        """Print what was written without a line break."""
        for who, rest in self._rest.items():
            self._watch.print(who, [rest])
        self._rest = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_WATCH = _Watch()


@contextlib.contextmanager
def _ctrl_c_noted() -> Iterator[list[bool]]:
    """A list that is filled when the user presses Ctrl-C; code of plugins may raise
    KeyboardInterrupt as well.
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
    """JAX's configuration is after the block what it was before it, or what JAX itself set when the
    block imported it.
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
        _put_back(who, before)


def _settings() -> dict[str, Any]:
    config = getattr(sys.modules.get("jax"), "config", None)
    return {} if config is None else dict(config.values)


def _put_back(who: str, before: Mapping[str, Any]) -> None:
    now = _settings() if before else {}
    changed = {name: value for name, value in before.items() if now.get(name, value) != value}
    if not changed:
        return
    told = ", ".join(f"{name} {value!r} -> {now[name]!r}" for name, value in changed.items())
    log.warning(
        "%s changed JAX's configuration while it was imported: %s. It is put back.", who, told
    )
    for name, value in changed.items():
        sys.modules["jax"].config.update(name, value)


class _JaxWatch(importlib.abc.MetaPathFinder):
    """Notes JAX's configuration as it is when JAX has just been imported."""

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
    """JAX's own loader, and a note of the configuration behind it."""

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
