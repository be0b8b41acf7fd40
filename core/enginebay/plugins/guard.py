"""The guard around code of plugins: a plugin that fails while it is imported is listed with its
reason, and what it leaves changed in this process is reported.

===========================  =============================================================
the imported module          then
===========================  =============================================================
raises an exception, or      the plugin is listed as broken; a part is a PluginError.
ends the program             Ctrl-C ends the program, as everywhere
changes JAX's configuration  a warning lists the settings, and they are restored, if JAX
                             was imported before
starts a thread              a warning names a thread that runs on after the import
===========================  =============================================================

Nothing of the process is replaced for this: what a plugin prints, is printed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

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

    A BaseException that is no Exception becomes a StrayExitError, except for KeyboardInterrupt.
    """
    threads, settings = threading.enumerate(), _jax_settings()
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise StrayExitError(error_line(error)) from error
    finally:
        _restore_jax_settings(who, settings)
        _report_threads(who, threads)


def _report_threads(who: str, before: Collection[threading.Thread]) -> None:
    """Log the threads that were started since `before` and run on."""
    for thread in threading.enumerate():
        if thread in before or thread.daemon:
            continue
        thread.join(THREAD_END_S)
        if thread.is_alive():
            text = "%s starts the thread %r while it is imported; the program ends after it"
            log.warning(text, who, thread.name)


def _jax_settings() -> dict[str, Any]:
    """Return JAX's configuration; {} where JAX is not imported."""
    config = getattr(sys.modules.get("jax"), "config", None)
    return {} if config is None else dict(config.values)


def _restore_jax_settings(who: str, before: Mapping[str, Any]) -> None:
    now = _jax_settings() if before else {}
    changed = {name: value for name, value in before.items() if now.get(name, value) != value}
    if not changed:
        return
    changes = ", ".join(f"{name} {value!r} -> {now[name]!r}" for name, value in changed.items())
    log.warning(
        "%s changed JAX's configuration while it was imported: %s. It is restored.", who, changes
    )
    for name, value in changed.items():
        sys.modules["jax"].config.update(name, value)
