"""A mask that never comes ends its own request, and a mask that is late holds nothing else up."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginebay import SamplingParams
from enginebay.compose.composition import Composed
from enginebay.config_sections import GuidedLimits
from enginebay.errors import RequestError, StoppedError
from enginebay.grammar import Structure
from enginebay.serving.running import Running
from enginebay.text.guides.guarded import GuardedLibrary
from enginebay.text.guides.guide import Guides
from enginebay.text.guides.mask_messages import (
    Mask,
    pack_answers,
    pack_orders,
    unpack_answers,
    unpack_orders,
)
from enginebay.text.worker.process import LimitedWorker
from enginebay.types import Request
from enginebay_models.tokenizer import load_tokenizer
from tests.brief import DEMO
from tests.fakes import VOCAB_SIZE, expected_tokens
from tests.pool import EnginePool
from tests.unit.loops import OPTIONS, Loops, Preempting, composed, events, request, running, tokens
from tests.unit.serving import DEADLOCK_S
from tests.unit.slow_grammar import NEVER_S
from tests.unit.test_guided_limits import chosen, guides_of

LATE = (
    'start: /[a-z ]{30}/ r0\nr1: (r1){1,1000}\nr3: ("a" & (/\\d/){0,1000000})\n'
    "r0: (%json {}(/(a){1000,}/  r1))?\n"
)
"""Thirty bytes go well. The mask behind the `n` of a null behind them is not found in minutes."""
SETTINGS: dict[str, Any] = {
    "library": "tests.unit.slow_grammar:SlowLibrary",
    "options": None,
    "tokenizer": (DEMO / "tokenizer.json").read_text(),
    "size": VOCAB_SIZE,
    "eos_token_ids": [0, 2],
}


@pytest.fixture
def parts(engine_pool: EnginePool) -> Iterator[Composed]:
    with composed(engine_pool, "fake", "oengine", **OPTIONS["oengine"]) as made:
        yield made


@pytest.fixture
def start(parts: Composed) -> Iterator[Loops]:
    yield from running(parts)


@pytest.fixture(scope="module")
def library() -> Iterator[GuardedLibrary]:
    made = GuardedLibrary(SETTINGS, GuidedLimits())
    yield made
    made.close()


def guided(
    library: GuardedLibrary, name: str, slow: int, pause_s: float, ends: int, max_tokens: int = 12
) -> Request:
    grammar = library.compile(Structure("grammar", json.dumps([slow, pause_s, ends])))
    return request(name, max_tokens=max_tokens, grammar=grammar)


def outcome(ticket: Running) -> tuple[list[int], str | None, Exception | None]:
    found = events(ticket)
    token_ids = [token_id for event in found for token_id in event.token_ids]
    return token_ids, found[-1].finish_reason, found[-1].error


def test_others_finish_while_a_mask_never_comes_and_closing_does_not_wait_for_it(
    start: Loops,
) -> None:
    library, loop = GuardedLibrary(SETTINGS, GuidedLimits(mask_s=NEVER_S)), start()
    stuck = guided(library, "stuck", 3, NEVER_S, 9)
    free = [request(f"free {i}", max_tokens=40) for i in range(6)]
    doomed, *tickets = loop.submit([stuck, *free])
    assert [tokens(ticket) for ticket in tickets] == [expected_tokens(one) for one in free]
    assert loop.call(lambda: "served") == "served"
    token_ids: list[int] = []
    while len(token_ids) < 3:
        token_ids += doomed.get(DEADLOCK_S).token_ids
    began_s = time.monotonic()
    loop.close()
    library.close()
    assert time.monotonic() - began_s < NEVER_S / 4
    more, reason, error = outcome(doomed)
    assert (token_ids, more, reason) == (expected_tokens(stuck)[:3], [], "error")
    assert isinstance(error, StoppedError)


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_the_mask_that_exceeds_the_limit_of_time_ends_its_own_request(
    start: Loops,
) -> None:
    """Guided requests beside it go on in a new process, with the tokens that they have alone."""
    limits = GuidedLimits(mask_s=1.0, compile_s=0.5)
    library, loop = GuardedLibrary(SETTINGS, limits), start()
    guides = Guides(lambda: library)
    text = json.dumps([4, NEVER_S, 9])
    grammar = guides.grammar(SamplingParams(grammar=text))
    others = [guided(library, f"other {i}", -1, 0, 8 + i) for i in range(2)]
    doomed, *tickets = loop.submit([request("stuck", grammar=grammar), *others])
    token_ids, reason, error = outcome(doomed)
    assert (len(token_ids), reason) == (4, "error")
    assert isinstance(error, RequestError)
    assert "the mask after token 4 of the request's output exceeds the time limit" in str(error)
    assert "1 seconds (guided_limits.mask_s)" in str(error)
    for i, (one, ticket) in enumerate(zip(others, tickets, strict=True)):
        assert outcome(ticket) == (expected_tokens(one)[: 8 + i], "stop", None)
    with pytest.raises(RequestError, match=r"guided_limits.mask_s"):
        guides.grammar(SamplingParams(grammar=text))
    library.close()


@pytest.mark.parametrize(("ends", "reason"), [(5, "stop"), (6, "stop"), (99, "length")])
def test_a_late_mask_changes_no_token_and_no_reason(
    start: Loops, library: GuardedLibrary, ends: int, reason: str
) -> None:
    """It comes behind the fifth token: before the end, at the end, and at max_tokens."""
    loop = start()
    one = guided(library, "late", 5 if ends != 99 else 6, 0.15, ends, max_tokens=6)
    assert outcome(loop.submit([one])[0]) == (expected_tokens(one)[:ends], reason, None)


def test_a_late_row_is_preempted_and_goes_on_with_the_same_tokens(
    start: Loops, parts: Composed, library: GuardedLibrary
) -> None:
    loop = start(Preempting(parts.scheduler, after=4))
    asked = [guided(library, f"row {i}", 4 + i, 0.1, 9 + i) for i in range(3)]
    for i, (one, ticket) in enumerate(zip(asked, loop.submit(asked), strict=True)):
        assert outcome(ticket) == (expected_tokens(one)[: 9 + i], "stop", None)


def test_a_process_that_was_killed_is_replaced_and_hears_all_tokens_again(
    library: GuardedLibrary,
) -> None:
    constraint = library.compile(Structure("grammar", "[-1, 0, 4]")).start()
    for token_id in (5, 6):
        constraint.accept(token_id)
        assert constraint.bits().all()
    os.kill(int(library._masks.pid or 0), signal.SIGKILL)
    constraint.accept(7)
    assert constraint.bits().all()
    constraint.accept(8)
    assert constraint.is_done


def test_a_process_that_is_killed_while_it_makes_a_mask_is_replaced(
    library: GuardedLibrary,
) -> None:
    constraint = library.compile(Structure("grammar", "[2, 0.2, 3]")).start()
    constraint.accept(5)
    assert constraint.wait(DEADLOCK_S)
    constraint.accept(6)
    assert not constraint.wait(0.0)
    os.kill(int(library._masks.pid or 0), signal.SIGKILL)
    assert constraint.bits().all()
    constraint.accept(7)
    assert constraint.is_done


def test_tokens_of_one_step_go_to_the_process_in_one_message(
    library: GuardedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = library.compile(Structure("grammar", "[-1, 0, 4]"))
    constraints = [grammar.start() for _ in range(3)]
    sent: list[list[int]] = []
    post = LimitedWorker.post

    def recorded(worker: LimitedWorker, content: bytes, time_s: float) -> bool:
        sent.append([token_id for _, token_id in unpack_orders(content)[1]])
        return post(worker, content, time_s)

    monkeypatch.setattr(LimitedWorker, "post", recorded)
    for step in range(2):
        for i, constraint in enumerate(constraints):
            constraint.accept(10 * step + i)
        assert all(constraint.wait(DEADLOCK_S) for constraint in constraints)
        while library._masks._started()._num_jobs:
            time.sleep(0.001)
    assert sent == [[10, 11, 12]], "the first tokens bring their structures, as JSON"


def test_messages_of_orders_and_masks_are_read_as_they_were_written() -> None:
    dropped, orders = unpack_orders(pack_orders([3, 2**40], [(7, 5), (2**50, 2**31)]))
    assert (list(dropped), list(orders)) == ([3, 2**40], [(7, 5), (2**50, 2**31)])
    bits = np.array([1, 2**32 - 1, 0], np.uint32)
    given = [Mask(bits, may_end, is_done) for may_end in (False, True) for is_done in (False, True)]
    reason = "no é\ud800 of it"
    first, refused, unknown, *others = unpack_answers(
        memoryview(pack_answers([given[0], reason, None, *given[1:]]))
    )
    assert (refused, unknown) == ("no é\\ud800 of it", None)
    for found, mask in zip((first, *others), given, strict=True):
        assert isinstance(found, Mask)
        assert found.bits.tolist() == bits.tolist()
        assert (found.may_end, found.is_done) == (mask.may_end, mask.is_done)


def test_the_process_forgets_constraints_that_are_not_needed(library: GuardedLibrary) -> None:
    grammar = library.compile(Structure("grammar", "[-1, 0, 4]"))
    constraints = [grammar.start() for _ in range(3)]
    for constraint in constraints:
        constraint.accept(5)
        assert constraint.wait(DEADLOCK_S)
    del constraint, constraints[1:]
    assert len(library._masks.dropped) == 2
    constraints[0].accept(6)
    assert constraints[0].wait(DEADLOCK_S)
    assert not library._masks.dropped


def test_a_hostile_grammar_whose_twentieth_mask_takes_minutes_is_a_refused_request() -> None:
    tokenizer = load_tokenizer(DEMO)
    guides = guides_of(tokenizer, chosen(guided_limits={"mask_s": 0.5}))
    grammar = guides.grammar(SamplingParams(grammar=LATE))
    assert grammar is not None, "the tried steps find nothing"
    constraint = grammar.start()
    token_ids = tokenizer.encode("a" * 30 + "n", add_special_tokens=False)
    for token_id in token_ids:
        bits = constraint.bits()
        assert np.unpackbits(bits.view(np.uint8), bitorder="little")[token_id]
        constraint.accept(token_id)
    with pytest.raises(RequestError, match=r"time limit\. .*0.5 seconds \(guided_limits.mask_s\)"):
        constraint.bits()
    guides.close()
