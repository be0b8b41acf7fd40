"""Constraints that a worker process follows. Each mask has a time limit, and a process that exceeds
it is killed. No thread of this process runs a library's code for a mask.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from enginebay.config_sections import GuidedLimits
from enginebay.errors import RequestError, StoppedError, UnsupportedError, error_line
from enginebay.grammar import Constraint, Grammar, Structure
from enginebay.text.guides.mask_messages import Answer, Mask, pack_orders, unpack_answers
from enginebay.text.worker.process import (
    KilledError,
    LimitedWorker,
    LimitError,
    WorkerError,
    WorkerLimits,
)
from enginebay.waits import has_ended

PATIENCE_S = 0.02
"""Seconds that a thread waits for an answer itself, before the clerk's thread takes over."""

MEMORY_SHARE = 8
"""Memory of the process that follows all constraints, in multiples of that for compiling one."""


@dataclasses.dataclass(slots=True)
class Order:
    """One token of one constraint, and the mask after it once it is computed."""

    key: int
    grammar: FollowedGrammar
    token_ids: list[int]
    """All tokens so far, the new one last. The constraint owns this list, and adds no token until
    the mask is computed.
    """
    outcome: Mask | RequestError | StoppedError | None = None

    def message(self, *, whole: bool) -> dict[str, Any]:
        """Return the message: all tokens if `whole`, else the last one for a process that has the
        others.
        """
        if not whole:
            return {"key": self.key, "token_ids": self.token_ids[-1:]}
        structure = dataclasses.asdict(self.grammar.structure)
        return {"key": self.key, "token_ids": self.token_ids, "structure": structure}


class MaskWorker:
    """One process that follows all constraints of a library.

    Orders that wait at the same time are carried out together. The thread that waits for one of
    them sends all of them and reads the answer, so that no other thread has to wake up in a step.
    The clerk, a thread of this class, does what can take longer: it starts the process, sends
    constraints that are new to the process, and takes over when the waiting thread has waited too
    long. When several orders exceed a limit, it tries each of them alone in a new process; an order
    that exceeds the limit again fails.
    """

    def __init__(self, settings: dict[str, Any], limits: GuidedLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._clerk: _Clerk | None = None
        self._settings = settings
        self.dropped: collections.deque[int] = collections.deque()
        """Keys of constraints that are no longer needed."""

    def start(self) -> None:
        """Start the process in the background, so that the first order need not wait for it."""
        with self._lock:
            self._started()

    def put(self, order: Order) -> _Clerk:
        """Queue an order; it is carried out when a thread waits for it at the returned clerk."""
        with self._lock:
            clerk = self._started()
        clerk.put(order)
        return clerk

    def _started(self) -> _Clerk:
        if self._clerk is None:
            self._clerk = clerk = _Clerk(self._settings, self._limits, self.dropped)
            weakref.finalize(self, clerk.close).atexit = False
        return self._clerk

    def close(self) -> None:
        """End the process and the thread, without waiting for a mask that is being computed."""
        with self._lock:
            clerk, self._clerk = self._clerk, None
        if clerk is not None:
            clerk.close()
            has_ended(clerk.thread)

    @property
    def pid(self) -> int | None:
        """Return the id of the process, or None when there is none."""
        clerk = self._clerk
        return None if clerk is None else clerk.worker.pid


class _Clerk:
    """The thread of a MaskWorker and its work. It keeps no MaskWorker alive, and ends after its
    MaskWorker is gone.

    While the thread has jobs, only the thread uses the process; otherwise the holder of the lock
    may use it.
    """

    def __init__(
        self, settings: dict[str, Any], limits: GuidedLimits, dropped: collections.deque[int]
    ) -> None:
        self.limits = limits
        self.worker = LimitedWorker(
            "enginebay.text.guides.grammar_child:Follower",
            settings,
            WorkerLimits(
                limits.compile_s + limits.mask_s,
                MEMORY_SHARE * limits.memory_bytes,
                2 * limits.stack_bytes,
            ),
        )
        self._lock = threading.Condition()
        self._unsent: list[Order] = []
        self._sent: list[Order] = []
        """Orders that were sent and whose answers are still to be read, but not by this thread."""
        self._sent_s = 0.0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_jobs = 0
        self._dropped = dropped
        self._is_closed = False
        self._has_ended = False
        self._later(functools.partial(_start, self.worker))
        self.thread = threading.Thread(target=self._run, name="enginebay-masks", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the thread soon."""
        self._is_closed = True
        self._jobs.put(None)
        self.worker.interrupt()

    def put(self, order: Order) -> None:
        """Queue an order for the next message."""
        with self._lock:
            self._unsent.append(order)

    def wait(self, order: Order, timeout_s: float | None) -> bool:
        """Return whether an order has its outcome, after at most `timeout_s` seconds. None waits
        for the outcome, which comes within a bounded time whatever the library does.
        """
        if order.outcome is not None:
            return True
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            if self._unsent:
                self._send()
            if self._sent:
                self._receive(PATIENCE_S if timeout_s is None else timeout_s)
            if order.outcome is None:
                left_s = None if timeout_s is None else max(0.0, until_s - time.monotonic())
                self._lock.wait_for(lambda: order.outcome or self._has_ended, left_s)
            if order.outcome is None and self._has_ended:
                order.outcome = _stopped()
        return order.outcome is not None

    def _send(self) -> None:
        """Send the queued orders at once if the process is idle and knows all their constraints."""
        if self._sent:
            self._receive(0.0)
        if self._sent:
            self._leave_to_thread()
        orders, self._unsent = self._unsent, []
        if not (self._num_jobs or self._is_closed or any(len(o.token_ids) == 1 for o in orders)):
            dropped = _forgotten(self._dropped)
            content = pack_orders(dropped, [(o.key, o.token_ids[-1]) for o in orders])
            if self.worker.post(content, self.limits.mask_s):
                self._sent, self._sent_s = orders, time.monotonic()
                return
        self._later(functools.partial(self._carry_out, orders, whole=False))

    def _receive(self, wait_s: float) -> None:
        """Read the answer to the sent orders if it arrives within `wait_s`; a later answer is left
        to the thread.
        """
        left_s = max(0.0, self._sent_s + PATIENCE_S - time.monotonic())
        if self.worker.has_answer(min(wait_s, left_s)):
            orders, self._sent = self._sent, []
            self._finish(orders)
        elif wait_s >= left_s:
            self._leave_to_thread()

    def _leave_to_thread(self) -> None:
        orders, self._sent = self._sent, []
        self._later(functools.partial(self._finish, orders))

    def _later(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._num_jobs += 1
            self._jobs.put(job)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                if (job := self._jobs.get()) is None:
                    break
                job()
                job = None  # an idle thread must not keep a constraint alive
                with self._lock:
                    self._num_jobs -= 1
        finally:
            with self._lock:
                self.worker.close()
                self._has_ended = True
                self._lock.notify_all()

    def _finish(self, orders: list[Order]) -> None:
        """Read the answer to the sent orders."""
        try:
            answers = unpack_answers(self.worker.take())
        except KilledError:
            self._later(functools.partial(self._carry_out, orders, whole=True))
        except BaseException as error:  # noqa: BLE001  # every waiting thread gets an outcome
            self._later(functools.partial(self._fail, orders, error))
        else:
            self._answer(orders, answers)

    def _carry_out(self, orders: list[Order], *, whole: bool) -> None:
        """Set the outcome of each order. `whole`: the process may not know their constraints."""
        if self._is_closed:
            self._fail(orders, _stopped())
            return
        whole = whole or self.worker.pid is None
        try:
            messages = [o.message(whole=whole or len(o.token_ids) == 1) for o in orders]
            content = {"dropped": _forgotten(self._dropped), "orders": messages}
            answers = _ask(self.worker, self.limits, content)
        except BaseException as error:  # noqa: BLE001  # every waiting thread gets an outcome
            self._fail(orders, error)
        else:
            self._answer(orders, answers)

    def _fail(self, orders: list[Order], error: BaseException) -> None:
        """Try each of several orders alone, in a new process that knows none of the constraints."""
        if len(orders) > 1 and not self._is_closed:
            for order in orders:
                self._carry_out([order], whole=True)
            return
        with self._lock:
            for order in orders:
                order.outcome = _stopped() if self._is_closed else _why(self.limits, order, error)
            self._lock.notify_all()

    def _answer(self, orders: list[Order], answers: list[Answer]) -> None:
        unknown: list[Order] = []
        with self._lock:
            for order, answer in zip(orders, answers, strict=True):
                if answer is None:
                    unknown.append(order)
                else:
                    order.outcome = RequestError(answer) if isinstance(answer, str) else answer
            self._lock.notify_all()
        if unknown:
            self._later(functools.partial(self._carry_out, unknown, whole=True))


def _start(worker: LimitedWorker) -> None:
    with contextlib.suppress(WorkerError, UnsupportedError):  # the first order reports it
        worker.start()


def _forgotten(dropped: collections.deque[int]) -> list[int]:
    return [dropped.popleft() for _ in range(len(dropped))]


def _ask(worker: LimitedWorker, limits: GuidedLimits, content: dict[str, Any]) -> list[Answer]:
    compiles = any("structure" in message for message in content["orders"])
    time_s = limits.mask_s + compiles * limits.compile_s
    answers: list[dict[str, Any] | None] = worker.ask(content, time_s=time_s)
    return [None if a is None else a.get("refused") or Mask.read(a) for a in answers]


def _why(limits: GuidedLimits, order: Order, error: BaseException) -> RequestError | StoppedError:
    """Return the error with which the request of an order ends."""
    place = f"the mask after token {len(order.token_ids)} of the request's output"
    if isinstance(error, LimitError):
        values = {
            "time": f"{limits.mask_s:g} seconds (guided_limits.mask_s)",
            "memory": f"{MEMORY_SHARE} x guided_limits.memory_bytes",
            "stack": "2 x guided_limits.stack_bytes",
            "depth": "structures within Python's recursion limit",
        }
        why = RequestError(
            f"a constraint with which {place} exceeds the {error.limit} limit",
            values[error.limit],
            "Simplify the constraint, or raise the limit.",
        )
        order.grammar.refuse(why)
        return why
    if isinstance(error, KilledError):
        return StoppedError(f"the worker process of masks cannot work: {error}")
    if isinstance(error, WorkerError):
        given = f"a constraint with which the library fails at {place}: {error}"
        return RequestError(given, "a constraint that it can follow", "Simplify the constraint.")
    return RequestError(
        f"a constraint that cannot be followed: {error_line(error)}",
        "a worker process that answers",
        "Send the request again.",
    )


def _stopped() -> StoppedError:
    return StoppedError("the engine was closed before the request finished")


class FollowedGrammar(Grammar):
    """A structure that was compiled in a worker, and its first mask."""

    _keys = itertools.count()

    def __init__(self, structure: Structure, first: Mask, worker: MaskWorker) -> None:
        self.structure = structure
        self.first = first
        self.worker = worker
        self._refusal: RequestError | None = None

    def start(self) -> Constraint:
        """Return a constraint; its first token sends it to the worker."""
        return FollowedConstraint(self, next(self._keys))

    @property
    def refusal(self) -> RequestError | None:
        """The limit that a request exceeded, if any."""
        return self._refusal

    def refuse(self, why: RequestError) -> None:
        """Refuse this grammar in all later requests."""
        self._refusal = why


class FollowedConstraint(Constraint):
    """The place of one completion in a grammar; the worker identifies it by a key."""

    def __init__(self, grammar: FollowedGrammar, key: int) -> None:
        self._grammar = grammar
        self._key = key
        self._token_ids: list[int] = []
        self._mask = grammar.first
        self._order: Order | None = None
        """The latest order, until its mask has arrived."""
        self._clerk: _Clerk
        weakref.finalize(self, grammar.worker.dropped.append, key).atexit = False

    def accept(self, token_id: int) -> None:
        """Order the mask after a token. Waits for the mask before it."""
        self._next()
        self._token_ids.append(token_id)
        self._order = Order(self._key, self._grammar, self._token_ids)
        self._clerk = self._grammar.worker.put(self._order)

    def wait(self, timeout_s: float) -> bool:
        """Return whether the mask arrives within `timeout_s` seconds."""
        return self._order is None or self._clerk.wait(self._order, timeout_s)

    def bits(self) -> np.ndarray:
        """Return the worker's mask, or raise the error with which it failed."""
        return self._next().bits

    @property
    def may_end(self) -> bool:
        """Whether the text may end here, as the worker's library says."""
        return self._next().may_end

    @property
    def is_done(self) -> bool:
        """Whether the text must end here, as the worker's library says."""
        return self._next().is_done

    def _next(self) -> Mask:
        if self._order is not None:
            self._clerk.wait(self._order, None)
            outcome = self._order.outcome
            if not isinstance(outcome, Mask):
                assert outcome is not None, "a wait without a timeout has an outcome"
                raise outcome
            self._mask, self._order = outcome, None
        return self._mask
