"""Conformance suite of guides: the fields of a request become a grammar within the configured
limits, and close() ends all threads and processes that the guide started.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginebay.config_sections import GuidedLimits
from enginebay.errors import RequestError
from enginebay.grammar import Grammar
from enginebay.text.guides.guide import Guides, MakeGuides
from enginebay.types import SamplingParams
from enginebay_testing.grammars import (
    DEADLOCK_S,
    THREADS,
    WORDS,
    check_place,
    check_texts,
    goes_on_alone,
)
from enginebay_testing.token_texts import example_vocabulary

OTHERS = ("no", "naught at all!", "yes", "yonder sky")
"""Other texts than WORDS, with the same lengths."""

BOTH: tuple[dict[str, Any], ...] = (
    {"choice": WORDS, "regex": "a+"},
    {"regex": "a+", "json_object": True},
    {"json_schema": {"type": "object"}, "grammar": 'start: "a"'},
)
"""Fields of a request, of which at most one may be set."""

CLOSING_S = 30.0
"""Seconds within which threads and processes of a guide must end after close()."""


def guide_checks(
    make: MakeGuides, limits: GuidedLimits | None = None, closing_s: float = CLOSING_S
) -> list[tuple[str, Callable[[], None]]]:
    """Return every check of the suite, by name; `make` makes a guide with these limits."""
    checks = (
        free_requests_have_no_grammar,
        grammars_allow_the_texts_and_nothing_else,
        completions_go_their_own_way,
        one_field_at_a_time,
        functools.partial(limits_are_refused, limits=limits or GuidedLimits()),
        malformed_constraints_are_refused,
        threads_get_their_own_grammars,
        functools.partial(close_ends_what_was_started, closing_s=closing_s),
    )
    return [(_name(check), functools.partial(_run, check, make)) for check in checks]


def _name(check: Any) -> str:
    return str(getattr(check, "func", check).__name__)


def _run(check: Callable[[Guides], None], make: MakeGuides) -> None:
    guide = make(example_vocabulary())
    try:
        check(guide)
    finally:
        guide.close()


def grammar_of(guide: Guides, **fields: Any) -> Grammar:
    """Return the grammar of a request with these fields."""
    found = guide.grammar(SamplingParams(**fields))
    assert found is not None, f"a request with {', '.join(fields)} has no grammar"
    return found


def free_requests_have_no_grammar(guide: Guides) -> None:
    """A request without a structure has no grammar."""
    for params in (SamplingParams(), SamplingParams(temperature=1.0, json_object=False)):
        assert guide.grammar(params) is None, "a request without a structure has a grammar"


def grammars_allow_the_texts_and_nothing_else(guide: Guides) -> None:
    """Each request gets the grammar of its own fields, also after other requests."""
    for words in (WORDS, OTHERS, WORDS):
        check_texts(grammar_of(guide, choice=words), words, f"choice = {words}")


def completions_go_their_own_way(guide: Guides) -> None:
    """Two constraints do not affect each other: neither two that start from one grammar, nor
    those of two requests with the same field.
    """
    grammar = grammar_of(guide, choice=WORDS)
    goes_on_alone(grammar, WORDS)
    check_place(grammar_of(guide, choice=WORDS).start(), WORDS, "", "a second request")


def one_field_at_a_time(guide: Guides) -> None:
    """Two structures in one request raise RequestError."""
    for fields in BOTH:
        _check_refused(guide, fields, " and ".join(fields))


def limits_are_refused(guide: Guides, limits: GuidedLimits) -> None:
    """Constraints beyond a size limit raise RequestError before they are compiled."""
    many = tuple(f"choice {i}" for i in range(limits.items + 1))
    _check_refused(guide, {"choice": many}, f"{len(many)} choices")
    long = tuple(str(i % 10) * (limits.size_bytes // 8) for i in range(9))
    _check_refused(guide, {"choice": long}, f"more than {limits.size_bytes} bytes")
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(limits.depth + 1):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    _check_refused(guide, {"json_schema": json.dumps(schema)}, f"more than {limits.depth} levels")
    check_place(grammar_of(guide, choice=WORDS).start(), WORDS, "", "after refusals")


def malformed_constraints_are_refused(guide: Guides) -> None:
    """Each malformed constraint raises RequestError, and the guide keeps working."""
    malformed: tuple[dict[str, Any], ...] = (
        {"regex": "(a"},
        {"json_schema": "[1, 2]"},
        {"json_schema": "{"},
        {"grammar": "start: missing"},
    )
    for fields in malformed:
        _check_refused(guide, fields, str(fields))
    check_place(grammar_of(guide, choice=WORDS).start(), WORDS, "", "after refusals")


def _check_refused(guide: Guides, fields: dict[str, Any], case: str) -> None:
    try:
        guide.grammar(SamplingParams(**fields))
    except RequestError:
        return
    raise AssertionError(f"{case}: accepted")


def threads_get_their_own_grammars(guide: Guides) -> None:
    """Threads that request different grammars at once each follow their own grammar."""

    def follow(number: int) -> None:
        words = (WORDS, OTHERS)[number % 2]
        check_texts(grammar_of(guide, choice=words), words, "in a thread")

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(follow, range(THREADS), timeout=DEADLOCK_S):
            pass


def close_ends_what_was_started(guide: Guides, closing_s: float) -> None:
    """close() ends threads and processes within `closing_s` seconds, may be called twice, and a
    later constraint starts them again.
    """
    before = _running()
    for _ in range(2):
        check_place(grammar_of(guide, choice=WORDS).start(), WORDS, "", "an open guide")
        guide.close()
        guide.close()
        deadline = time.monotonic() + closing_s
        while left := _running() - before:
            assert time.monotonic() < deadline, (
                f"still running after close(): {', '.join(sorted(left))}"
            )
            time.sleep(0.01)


def _running() -> set[str]:
    """Return the names of the threads and child processes of this process."""
    threads = {f"thread {one.name} ({one.ident})" for one in threading.enumerate()}
    tasks = Path("/proc/self/task")
    children = [path.read_text().split() for path in tasks.glob("*/children")]
    return threads | {f"process {pid}" for pids in children for pid in pids}
