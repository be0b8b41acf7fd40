"""A library of grammars that compiles nothing here before a worker process has compiled it within
limits.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from enginebay.config import GuidedLimits
from enginebay.constraint import GrammarLibrary
from enginebay.errors import RequestError, UnsupportedError, explain
from enginebay.grammar import Grammar, Structure
from enginebay.worker.process import (
    LimitedWorker,
    LimitError,
    StartError,
    WorkerError,
    WorkerLimits,
)

T = TypeVar("T")

_STACK = threading.Lock()
"""Held while the stack of new threads differs from the default, which is one for the whole process.
"""


class GuardedLibrary(GrammarLibrary):
    """A library over one tokenizer, and a worker process with the same library, which the first
    structure starts.
    """

    def __init__(
        self, library: GrammarLibrary, settings: dict[str, Any], limits: GuidedLimits
    ) -> None:
        self._library = library
        self._limits = limits
        self._worker = LimitedWorker(
            "enginebay.compose.grammar_child:Compiler",
            settings,
            WorkerLimits(limits.compile_s, limits.memory_bytes, limits.stack_bytes),
        )

    def compile(self, structure: Structure) -> Grammar:
        """The library's grammar, compiled with twice the stack that the worker had. RequestError
        for a limit that is exceeded.
        """
        try:
            refusal = self._worker.ask({"form": structure.form, "text": structure.text})
        except LimitError as error:
            raise self._exceeded(structure, error.limit) from None
        except StartError as error:
            raise UnsupportedError(
                explain(
                    f"guided decoding without the worker process that compiles grammars: {error}",
                    "a library that can be imported in a process of its own",
                    "Mend its plugin, or choose other grammars.",
                )
            ) from None
        except WorkerError as error:
            given = f"{structure.form} = {_shown(structure)}, on which the library fails: {error}"
            raise RequestError(explain(given, "what it can compile", "Simplify it.")) from None
        if refusal is not None:
            raise RequestError(refusal)
        return with_stack(2 * self._limits.stack_bytes, lambda: self._library.compile(structure))

    def close(self) -> None:
        """End the worker process; another structure starts another."""
        self._worker.close()

    def _exceeded(self, structure: Structure, limit: str) -> RequestError:
        limits = self._limits
        allowed = {
            "time": f"{limits.compile_s:g} seconds (guided_limits.compile_s)",
            "memory": f"{limits.memory_bytes} bytes of memory (guided_limits.memory_bytes)",
            "stack": f"{limits.stack_bytes} bytes of stack (guided_limits.stack_bytes)",
            "depth": "structures within Python's recursion limit",
        }
        given = (
            f"{structure.form} = {_shown(structure)}, "
            f"which exceeds the limit of {limit} when it is compiled"
        )
        return RequestError(explain(given, allowed[limit], "Simplify it, or raise the limit."))


def with_stack(stack_bytes: int, function: Callable[[], T]) -> T:
    """The result of a function that runs in a thread of its own with this stack. What it raises is
    raised here.
    """
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001  # whoever waits is answered
            result.set_exception(error)

    with _STACK:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run, name="enginebay-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return result.result()


def _shown(structure: Structure) -> str:
    text = " ".join(structure.text[:200].encode(errors="backslashreplace").decode().split())
    return text if len(text) <= 80 else f"{text[:80]}..."
