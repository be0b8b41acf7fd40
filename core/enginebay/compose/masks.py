"""Constraints that a worker process follows: each mask has a limit of time, and a process that
exceeds it is killed. No thread of this process ever runs a library's code for a mask.
"""

from __future__ import annotations

import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import queue
import threading
import weakref
from typing import Any

import numpy as np

from enginebay.config_sections import GuidedLimits
from enginebay.errors import RequestError, StoppedError, explain
from enginebay.grammar import Constraint, Grammar, Structure
from enginebay.worker.process import LimitedWorker, LimitError, WorkerError, WorkerLimits

MEMORY_SHARE = 8
"""Memory of the process that follows all constraints, in units of that for compiling one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """What may come next: uint32 [words of the vocabulary], and whether the text may or must end."""

    bits: np.ndarray
    may_end: bool
    is_done: bool

    @classmethod
    def read(cls, answer: dict[str, Any]) -> Mask:
        """From a worker's answer."""
        bits = np.frombuffer(base64.b64decode(answer["bits"]), np.uint32)
        return cls(bits, answer["may_end"], answer["is_done"])


@dataclasses.dataclass(slots=True)
class Order:
    """One token of one constraint, and the place for the mask behind it."""

    key: int
    grammar: FollowedGrammar
    token_ids: list[int]
    """All tokens so far, the new one last. The list of the constraint, which adds none meanwhile."""
    result: concurrent.futures.Future[Mask]

    def message(self, *, whole: bool) -> dict[str, Any]:
        """For a process that has the constraint behind all tokens but the last one, or for any."""
        if not whole:
            return {"key": self.key, "token_ids": self.token_ids[-1:]}
        structure = dataclasses.asdict(self.grammar.structure)
        return {"key": self.key, "token_ids": self.token_ids, "structure": structure}


class MaskWorker:
    """One process that follows all constraints of a library, and the thread that waits for it.

    Orders that are there together are carried out together. When they exceed a limit, each of them
    is tried alone in a new process, and the order that exceeds it again fails.
    """

    def __init__(self, settings: dict[str, Any], limits: GuidedLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._clerk: _Clerk | None = None
        self._settings = settings
        self.dropped: collections.deque[int] = collections.deque()
        """Keys of constraints that are not needed any more."""

    def start(self) -> None:
        """Begin to start the process, so that the first order finds it."""
        with self._lock:
            self._started()

    def put(self, order: Order) -> None:
        """Carry out an order soon. Its result is set in bounded time, whatever the library does."""
        with self._lock:
            self._started().orders.put(order)

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
            clerk.thread.join()

    @property
    def pid(self) -> int | None:
        """The id of the process, or None when there is none."""
        clerk = self._clerk
        return None if clerk is None else clerk.worker.pid


class _Clerk:
    """The thread of a MaskWorker. It keeps no MaskWorker alive, and ends when that has gone."""

    def __init__(
        self, settings: dict[str, Any], limits: GuidedLimits, dropped: collections.deque[int]
    ) -> None:
        self.limits = limits
        self.worker = LimitedWorker(
            "enginebay.compose.grammar_child:Follower",
            settings,
            WorkerLimits(
                limits.compile_s + limits.mask_s,
                MEMORY_SHARE * limits.memory_bytes,
                2 * limits.stack_bytes,
            ),
        )
        self.orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._dropped = dropped
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name="enginebay-masks", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End soon."""
        self._is_closed = True
        self.orders.put(None)
        self.worker.interrupt()

    def _run(self) -> None:
        try:
            with contextlib.suppress(WorkerError):  # the first order says why
                self.worker.start()
            while not self._is_closed:
                together = [order] if (order := self.orders.get()) is not None else []
                with contextlib.suppress(queue.Empty):
                    while (order := self.orders.get_nowait()) is not None:
                        together.append(order)
                if together:
                    self._carry_out(together, whole=False)
                order = None
                together.clear()  # an idle thread keeps no constraint alive
        finally:
            self.worker.close()

    def _carry_out(self, orders: list[Order], *, whole: bool) -> None:
        """Set the result of each order. `whole`: the process may know nothing of them."""
        whole = whole or self.worker.pid is None
        try:
            answers = self._ask(orders, whole=whole)
        except BaseException as error:  # noqa: BLE001  # whoever waits is answered
            if len(orders) > 1 and not self._is_closed:
                for order in orders:  # in a new process, which knows none of them
                    self._carry_out([order], whole=True)
                return
            for order in orders:
                order.result.set_exception(self._why(order, error))
            return
        unknown: list[Order] = []
        for order, answer in zip(orders, answers, strict=True):
            if answer is None:
                unknown.append(order)
            elif "refused" in answer:
                order.result.set_exception(RequestError(answer["refused"]))
            else:
                order.result.set_result(Mask.read(answer))
        if unknown:
            self._carry_out(unknown, whole=True)

    def _ask(self, orders: list[Order], *, whole: bool) -> list[dict[str, Any] | None]:
        if self._is_closed:
            raise StoppedError("the engine was closed before the request finished")
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        messages = [o.message(whole=whole or len(o.token_ids) == 1) for o in orders]
        compiles = any("structure" in message for message in messages)
        answers: list[dict[str, Any] | None] = self.worker.ask(
            {"dropped": dropped, "orders": messages},
            time_s=self.limits.mask_s + compiles * self.limits.compile_s,
        )
        return answers

    def _why(self, order: Order, error: BaseException) -> RequestError | StoppedError:
        """The error with which the request of an order ends."""
        if self._is_closed:
            return StoppedError("the engine was closed before the request finished")
        place = f"the mask behind token {len(order.token_ids)} of its output"
        if isinstance(error, LimitError):
            values = {
                "time": f"{self.limits.mask_s:g} seconds (guided_limits.mask_s)",
                "memory": f"{MEMORY_SHARE} x guided_limits.memory_bytes",
                "stack": "2 x guided_limits.stack_bytes",
                "depth": "structures within Python's recursion limit",
            }
            why = RequestError(
                explain(
                    f"a constraint that exceeds the limit of {error.limit} at {place}",
                    values[error.limit],
                    "Simplify it, or raise the limit.",
                )
            )
            order.grammar.refuse(why)
            return why
        if isinstance(error, WorkerError):
            given = f"a constraint on which the library fails at {place}: {error}"
            return RequestError(explain(given, "what it can follow", "Simplify it."))
        return RequestError(
            explain(
                f"a constraint that cannot be followed: {type(error).__name__}: {error}",
                "a worker process that answers",
                "Send the request again.",
            )
        )


class FollowedGrammar(Grammar):
    """A structure that was compiled in a worker, and its first mask."""

    _keys = itertools.count()

    def __init__(self, structure: Structure, first: Mask, worker: MaskWorker) -> None:
        self.structure = structure
        self.first = first
        self.worker = worker
        self._refusal: RequestError | None = None

    def start(self) -> Constraint:
        """A constraint that the worker hears of with its first token."""
        return FollowedConstraint(self, next(self._keys))

    @property
    def refusal(self) -> RequestError | None:
        """The limit that a request exceeded."""
        return self._refusal

    def refuse(self, why: RequestError) -> None:
        """Let no further request use it."""
        self._refusal = why


class FollowedConstraint(Constraint):
    """The place of one completion in a grammar, which the worker knows by a key."""

    def __init__(self, grammar: FollowedGrammar, key: int) -> None:
        self._grammar = grammar
        self._key = key
        self._token_ids: list[int] = []
        self._next: concurrent.futures.Future[Mask] = concurrent.futures.Future()
        self._next.set_result(grammar.first)
        weakref.finalize(self, grammar.worker.dropped.append, key).atexit = False

    def accept(self, token_id: int) -> None:
        """Order the mask behind a token. It waits for the mask before it."""
        self._next.result()
        self._token_ids.append(token_id)
        self._next = concurrent.futures.Future()
        self._grammar.worker.put(Order(self._key, self._grammar, self._token_ids, self._next))

    def wait(self, timeout_s: float) -> bool:
        """Whether the mask is there."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self._next.exception(timeout_s)
        return self._next.done()

    def bits(self) -> np.ndarray:
        """The worker's mask, or the error with which it failed."""
        return self._next.result().bits

    @property
    def may_end(self) -> bool:
        """As the worker's library says."""
        return self._next.result().may_end

    @property
    def is_done(self) -> bool:
        """As the worker's library says."""
        return self._next.result().is_done
