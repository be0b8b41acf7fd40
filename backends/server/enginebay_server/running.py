"""Runs a generation for one HTTP request, within the time limit and while its client waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from fastapi import Request

from enginebay.outputs import RequestOutput
from enginebay_server.errors import ApiError
from enginebay_server.generation import Generation, PromptJob, until_gone
from enginebay_server.request_span import request_span
from enginebay_server.served import ServedModel
from enginebay_server.sse import EventStream, StreamWriter
from enginebay_server.state import AppState

Result = TypeVar("Result")
MakeJobs = Callable[[], Sequence[PromptJob]]


def begin(
    state: AppState, request: Request, model: ServedModel, prefix: str, *, has_form: bool = False
) -> Generation:
    """Return a generation of a model for a request; its id begins with `prefix`. `has_form`: the
    output format is constrained.
    """
    lane = state.lanes.of(request.scope, has_form=has_form)
    generation = Generation(model, state.metrics.of[model.base], state.limit, lane, prefix)
    generation.span = request_span(request.scope)
    if generation.span is not None:
        generation.span.begin(model.name, generation.id)
    if state.settings.usage_times:
        generation.usage_since_s = time.monotonic()
    return generation


async def in_time(state: AppState, request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of `work`; ApiError 504 after the request timeout."""
    limit_s = state.settings.request_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await until_gone(request.receive, work)
    except TimeoutError:
        raise ApiError(504, f"the request took more than {limit_s:g} s") from None


async def whole_outputs(
    state: AppState, request: Request, generation: Generation, make: MakeJobs
) -> list[RequestOutput]:
    """Return the outputs of the jobs of `make`, and close the generation."""

    async def run() -> list[RequestOutput]:
        await generation.start(make, stream=False)
        return await generation.outputs()

    try:
        return await in_time(state, request, run())
    finally:
        generation.close()


async def streamed(
    state: AppState,
    request: Request,
    generation: Generation,
    make: MakeJobs,
    make_writer: Callable[[], StreamWriter],
    headers: Mapping[str, str] | None = None,
) -> EventStream:
    """Submit the jobs of `make`, and return their stream, which closes the generation.

    The jobs are submitted before this returns, so that a wrong request still gets an error status.
    """
    limit_s = state.settings.request_timeout_s
    end_s = asyncio.get_running_loop().time() + limit_s
    try:
        await in_time(state, request, generation.start(make, stream=True))
        return EventStream(generation, make_writer(), end_s, headers)
    except BaseException:
        generation.close()
        raise
