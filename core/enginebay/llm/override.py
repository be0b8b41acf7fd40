"""Swapping implementations in a running engine for a while, and bringing the former ones back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from enginebay.compose.by_hand import by_hand
from enginebay.compose.composition import Composed
from enginebay.errors import EnginebayError, RequestError, StoppedError


class EngineDriver(Protocol):
    """Who drives an engine: a loop, or a service that has one at times."""

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row."""

    @property
    def num_running(self) -> int:
        """Requests that hold one."""

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between steps, and return its result; StoppedError when a step has failed
        just before.
        """


EndAll = Callable[[EnginebayError], None]
"""Ends every request with an error; called between steps."""


@contextlib.contextmanager
def overridden(
    parts: Composed,
    driver: EngineDriver,
    end_all: EndAll,
    given: Mapping[str, Any],
    *,
    check: bool = True,
) -> Iterator[Composed]:
    """While the block lasts, an engine's steps run with other implementations of ops; yields its
    parts with their plan.

    RequestError while requests are under way; for the rest see `ByHand.overridden`, and then
    nothing has changed. What is still under way at the end of the block ends with StoppedError,
    so that no request is served half by one and half by another. Within the block programs may
    be compiled, whatever forbid_compiling says. Blocks nest.
    """
    engine = parts.engine
    plan = by_hand(parts.plan.registry).overridden(parts.plan, given, check=check)

    def begin() -> tuple[Callable[[], None], bool]:
        count = driver.num_waiting + driver.num_running
        if count:
            raise RequestError(
                f"{count} requests are under way while implementations are to be swapped",
                "none",
                "Let them end, or end them, and try again.",
            )
        undo = engine.swap(plan.swapped)
        forbidden, engine.compilations.forbidden = engine.compilations.forbidden, False
        return undo, forbidden

    undo, forbidden = driver.call(begin)

    def end() -> None:
        end_all(
            StoppedError("the block of override() that the request ran in has ended: send it again")
        )
        engine.compilations.forbidden = forbidden
        undo()

    try:
        yield dataclasses.replace(parts, plan=plan)
    finally:
        try:
            driver.call(end)
        except (
            StoppedError
        ):  # a step failed just now, and the loop has recovered; or the loop is closed for good
            with contextlib.suppress(StoppedError):
                driver.call(end)
