"""Priority and tenant of requests: they reach the scheduler from every method, and wrong ones reach
nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.errors import RequestError
from enginebay.serving.priority import MAX_PRIORITY, RequestPriority, priorities_of
from tests.brief import BRIEF
from tests.fakes import install
from tests.unit.loops import generate_at_once
from tests.unit.serving import SIZES, Endings, assert_idle, forbid_requests

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=["priority", "fair"])
def one_row(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        llm = LLM(BRIEF, scheduler=request.param, **(SIZES | {"max_num_seqs": 1}))
    with llm:
        yield llm


@pytest.fixture
def endings(one_row: LLM) -> Iterator[list[tuple[int, str]]]:
    """Of the requests of a test."""
    observer = Endings()
    one_row.loop.observers.add(observer)
    yield observer.seen
    one_row.loop.observers.remove(observer)
    assert_idle(one_row)


def test_the_scheduler_serves_by_them(one_row: LLM, endings: list[tuple[int, str]]) -> None:
    priorities = {"priority": [-1, 0, 3, 0], "tenant": ["a", "a", "a", "b"]}
    outputs = generate_at_once(one_row, ["A"] * 4, SHORT, **priorities)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    by_priority = [(3, "a"), (0, "a"), (0, "b"), (-1, "a")]
    by_tenant = [(-1, "a"), (0, "b"), (0, "a"), (3, "a")]
    assert endings == (by_priority if one_row.config.scheduler.name == "priority" else by_tenant)


def by_asyncio(llm: LLM, **priorities: Any) -> None:
    async def all_of_it() -> None:
        await llm.agenerate("A", SHORT, **priorities)
        async for _ in llm.astream("A", SHORT, **priorities):
            pass
        await llm.achat(MESSAGES, SHORT, **priorities)

    asyncio.run(all_of_it())


WAYS: list[tuple[int, Callable[..., Any]]] = [
    (2, lambda llm, **priorities: llm.generate(["A", "B"], SHORT, **priorities)),
    (1, lambda llm, **priorities: list(llm.stream("A", SHORT, **priorities))),
    (
        2,
        lambda llm, **priorities: list(
            llm.stream("A", SamplingParams(max_tokens=1, n=2), **priorities)
        ),
    ),
    (1, lambda llm, **priorities: llm.chat(MESSAGES, SHORT, **priorities)),
    (1, lambda llm, **priorities: list(llm.chat_stream(MESSAGES, SHORT, **priorities))),
    (3, by_asyncio),
]


@pytest.mark.parametrize(("count", "way"), WAYS)
def test_every_method_passes_them_on(
    one_row: LLM, endings: list[tuple[int, str]], count: int, way: Callable[..., Any]
) -> None:
    way(one_row)
    way(one_row, priority=np.int64(-7), tenant="a")
    one_row.run_on_engine(lambda: None)
    assert endings == [(0, "")] * count + [(-7, "a")] * count


BAD: list[tuple[dict[str, Any], str]] = [
    ({"priority": "high"}, "priority = 'high'. Allowed: a whole number from"),
    ({"priority": 1.5}, "priority = 1.5"),
    ({"priority": 10**5000}, "priority = a value of type int. Allowed"),
    ({"priority": 10**400}, r"priority = 10{99}\.\.\.\. Allowed"),
    ({"priority": True}, "priority = True"),
    ({"priority": None}, "priority = None"),
    ({"priority": MAX_PRIORITY + 1}, "larger is more urgent"),
    ({"priority": -MAX_PRIORITY - 1}, "larger is more urgent"),
    ({"priority": b"ab"}, "priority = b'ab'"),
    ({"tenant": ""}, "tenant = ''. Allowed: a text that is not empty"),
    ({"tenant": 5}, "tenant = 5"),
]


@pytest.mark.parametrize(("priorities", "message"), BAD)
def test_bad_ones_are_refused_and_nothing_is_queued(
    one_row: LLM, monkeypatch: pytest.MonkeyPatch, priorities: dict[str, Any], message: str
) -> None:
    forbid_requests(one_row, monkeypatch)
    for _, way in WAYS:
        with pytest.raises(RequestError, match=message):
            way(one_row, **priorities)
    for name, value in priorities.items():
        good = 0 if name == "priority" else "a"
        with pytest.raises(RequestError, match=message):
            one_row.generate(["A", "B"], SHORT, **{name: [good, value]})


def test_there_is_one_for_all_or_one_for_each() -> None:
    assert priorities_of(2, 1, "a") == [RequestPriority(1, "a")] * 2
    given = priorities_of(2, np.array([1, 2]), ("a", None))  # type: ignore[arg-type]
    assert given == [RequestPriority(1, "a"), RequestPriority(2)]
    assert priorities_of(0, 1, []) == []
    for priority, tenant, message in (
        ([1], None, "1 priorities for 2"),
        (0, ["a"] * 3, "3 tenants for 2"),
    ):
        with pytest.raises(
            RequestError,
            match=f"{message} prompts. Allowed: one for all prompts, or one per prompt",
        ):
            priorities_of(2, priority, tenant)


@pytest.mark.usefixtures("faked")
def test_the_flags_of_generate_pass_them_on(
    run: Callable[..., tuple[int, str, str]], config: str
) -> None:
    flags = ("--max-tokens", "1", "--config", config)
    assert run("generate", "A", "--priority", "3", "--tenant", "a", *flags)[0] == 0
    code, _, err = run("generate", "A", "--tenant", "", *flags)
    assert (code, "tenant = ''. Allowed: a text" in err) == (2, True)
    code, _, err = run("generate", "A", "--priority", str(MAX_PRIORITY + 1), *flags)
    assert (code, f"priority = {MAX_PRIORITY + 1}" in err) == (2, True)
