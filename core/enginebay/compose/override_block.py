"""The block of override(): a running engine computes with other implementations for a while."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from enginebay.compose.composition import Composed
from enginebay.compose.override import by_op, overridden_plan
from enginebay.errors import EnginebayError, RequestError, StoppedError


class EngineDriver(Protocol):
    """What drives an engine: a loop, or a service that starts a loop when it needs one."""

    @property
    def num_waiting(self) -> int:
        """Requests that have no row."""

    @property
    def num_running(self) -> int:
        """Requests that have a row."""

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between steps, and return its result. StoppedError when the step before it
        failed.
        """

    def end_all(self, error: EnginebayError) -> None:
        """End every request with an error. Only called between steps."""


@contextlib.contextmanager
def overridden(
    parts: Composed, driver: EngineDriver, given: Mapping[str, Any], *, check: bool
) -> Iterator[Composed]:
    """Run the engine's steps with other implementations of ops while the block lasts. Yields the
    engine's parts with the changed plan.

    RequestError while requests are running or waiting, and the errors of `overridden_plan`; in
    all these cases nothing changes. Requests that have not ended at the end of the block get
    StoppedError, so that no request is served partly by one implementation and partly by another.
    Inside the block programs may be compiled even with forbid_compiling. Blocks may be nested.
    """
    engine = parts.engine
    plan = overridden_plan(parts.plan, by_op(given), check=check)

    def begin() -> tuple[Callable[[], None], bool]:
        count = driver.num_waiting + driver.num_running
        if count:
            raise RequestError(
                f"override() while {count} requests are running or waiting",
                "no unfinished request",
                "Wait until they have ended, or abort them, then try again.",
            )
        undo = engine.swap(plan.swapped)
        forbidden, engine.compilations.forbidden = engine.compilations.forbidden, False
        return undo, forbidden

    undo, forbidden = driver.call(begin)

    def end() -> None:
        driver.end_all(
            StoppedError(
                "the block of override() in which the request ran has ended: send it again"
            )
        )
        engine.compilations.forbidden = forbidden
        undo()

    try:
        yield dataclasses.replace(parts, plan=plan)
    finally:
        try:
            driver.call(end)
        # Either a step has just failed and the loop has recovered, or the loop is closed for good.
        except StoppedError:
            with contextlib.suppress(StoppedError):
                driver.call(end)
