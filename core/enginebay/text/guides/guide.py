"""Guides: compile the structure that a request's fields describe to a grammar, before the request
is queued.
"""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Callable
from typing import Any

from enginebay.config_sections import GuidedLimits
from enginebay.contracts.constraint import GrammarLibrary, Vocabulary, forms_of
from enginebay.errors import RequestError
from enginebay.grammar import Grammar, Structure
from enginebay.text.guides.guarded import GuardedLibrary
from enginebay.text.guides.guide_limits import check_size
from enginebay.types import SamplingParams

MAX_GRAMMARS = 64
"""Max compiled grammars that are kept for later requests."""

DEFAULT_LIMITS = GuidedLimits()

MakeGuides = Callable[[Vocabulary], "Guides"]
"""Makes the Guides of an engine from the vocabulary of its model."""

ANY_OBJECT = '{"type": "object"}'


class Guides:
    """Makes the grammars for the requests of one engine: compiles structures with a library that
    the first structure makes, and keeps the latest grammars. Thread-safe.
    """

    def __init__(
        self, make_library: Callable[[], GrammarLibrary], limits: GuidedLimits = DEFAULT_LIMITS
    ) -> None:
        self._make_library = make_library
        self._limits = limits
        self._library: GrammarLibrary | None = None
        self._compiled: collections.OrderedDict[Structure, Grammar] = collections.OrderedDict()
        self._lock = threading.Lock()

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of a request, or None for a request without a structure. RequestError
        for a structure that cannot be enforced.
        """
        structure = structure_of(params, self._limits)
        if structure is None:
            return None
        with self._lock:
            found = self._compiled.get(structure)
            if found is not None:
                if found.refusal is not None:
                    raise RequestError(str(found.refusal))
                self._compiled.move_to_end(structure)
                return found
            if self._library is None:
                self._library = self._make_library()
        made = self._library.compile(
            structure
        )  # without the lock, so that other requests need not wait
        with self._lock:
            self._compiled[structure] = made
            while len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return made

    def close(self) -> None:
        """End the library's worker processes, if any. The library stays, and starts others when it
        needs them.
        """
        library = self._library
        if isinstance(library, GuardedLibrary):
            library.close()


def structure_of(params: SamplingParams, limits: GuidedLimits = DEFAULT_LIMITS) -> Structure | None:
    """Return the structure that a request asks for. RequestError for two structures, for one beyond
    a size limit, and for a schema that is not a JSON object.
    """
    asked = forms_of(params)
    if not asked:
        return None
    form, *others = asked
    if others:
        raise RequestError(
            f"{' and '.join(asked)} in one request", "one of these fields", "Leave the others out."
        )
    check_size(form, asked[form], limits)
    if form == "json_schema":
        return Structure(form, _schema_text(asked[form]))
    if form == "json_object":
        return Structure(form, ANY_OBJECT)
    return Structure(form, json.dumps(asked[form]) if form == "choice" else asked[form])


def _schema_text(schema: Any) -> str:
    """Return a schema as JSON with its keys in the given order, which is their order in
    the output.
    """
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(read, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _no_schema(str(error) or type(error).__name__) from None
    if not isinstance(read, dict):
        raise _no_schema(f"it is a {type(read).__name__}")
    return text


def _no_schema(reason: str) -> RequestError:
    return RequestError(
        f"json_schema that cannot be read: {reason}",
        "a JSON object, as a dict or as text",
        'Pass a schema such as {"type": "object"}, or leave it out.',
    )
