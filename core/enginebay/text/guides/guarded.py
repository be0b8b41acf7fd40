"""A grammar library whose code only runs in worker processes with limits: one process compiles
grammars, another one follows them.
"""

from __future__ import annotations

from typing import Any

from enginebay.config_sections import GuidedLimits
from enginebay.contracts.constraint import GrammarLibrary
from enginebay.errors import RequestError, StoppedError, UnsupportedError
from enginebay.grammar import Grammar, Structure
from enginebay.text.guides.mask_messages import Mask
from enginebay.text.guides.masks import FollowedGrammar, MaskWorker
from enginebay.text.worker.process import (
    KilledError,
    LimitedWorker,
    LimitError,
    StartError,
    WorkerError,
    WorkerLimits,
)


class GuardedLibrary(GrammarLibrary):
    """Two worker processes with the same library. The first structure starts the process that
    compiles; the first token of a guided request starts the process that computes masks.
    """

    def __init__(self, settings: dict[str, Any], limits: GuidedLimits) -> None:
        self._limits = limits
        self._unsupported: UnsupportedError | None = None
        self._masks = MaskWorker(settings, limits)
        self._worker = LimitedWorker(
            "enginebay.text.guides.grammar_child:Compiler",
            settings,
            WorkerLimits(limits.compile_s, limits.memory_bytes, limits.stack_bytes),
        )

    def compile(self, structure: Structure) -> Grammar:
        """Compile a structure to a grammar that the second process follows. RequestError for an
        exceeded limit, UnsupportedError if the library does not support the vocabulary.
        """
        if self._unsupported is not None:
            raise UnsupportedError(str(self._unsupported))
        try:
            answer = self._worker.ask({"form": structure.form, "text": structure.text})
        except UnsupportedError as error:
            self._unsupported = error
            raise
        except LimitError as error:
            raise self._exceeded(structure, error.limit) from None
        except StartError as error:
            raise UnsupportedError(
                f"the worker process that compiles grammars cannot run: {error}",
                "a library that can be imported in a separate process",
                "Fix its plugin, or set grammars to another library.",
            ) from None
        except KilledError as error:
            raise StoppedError(f"the worker process of grammars cannot work: {error}") from None
        except WorkerError as error:
            given = f"{structure.form} = {_shown(structure)}, with which the library fails: {error}"
            raise RequestError(
                given, "a structure that it can compile", "Simplify the structure."
            ) from None
        if "refused" in answer:
            raise RequestError(answer["refused"])
        self._masks.start()
        return FollowedGrammar(structure, Mask.read(answer), self._masks)

    def close(self) -> None:
        """End the worker processes; the next structure starts others."""
        self._masks.close()
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
        return RequestError(given, allowed[limit], "Simplify it, or raise the limit.")


def _shown(structure: Structure) -> str:
    text = " ".join(structure.text[:200].encode(errors="backslashreplace").decode().split())
    return text if len(text) <= 80 else f"{text[:80]}..."
