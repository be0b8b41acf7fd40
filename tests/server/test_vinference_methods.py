"""The documented async methods of vInferenceApiServer, called without a socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.in_process_client import HELLO, Asker, events_of, text_of

if TYPE_CHECKING:
    from starlette.responses import Response

    from enginebay import LLM
    from enginebay_vinference import vInference, vInferenceApiServer

END_S = 60
CHAT = {"messages": HELLO, "max_tokens": 6, "temperature": 0}
TEXT = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
PATHS = {"chat_completions": "/v1/chat/completions", "completions": "/v1/completions"}


@pytest.fixture(scope="module")
def own() -> Iterator[LLM]:
    from enginebay import LLM
    from tests.pool import few_sizes
    from tests.server.conftest import SIZES

    with few_sizes(), LLM("demo", engine="vinference", **SIZES) as made:
        yield made


@pytest.fixture(scope="module")
def inference(own: LLM) -> vInference:
    from enginebay_vinference import vInference

    return vInference(own, None, inference_name="story")


@pytest.fixture
def served(own: LLM, inference: vInference) -> Iterator[vInferenceApiServer]:
    from enginebay_vinference import vInferenceApiServer

    yield vInferenceApiServer(inference)
    end_s = time.monotonic() + END_S
    while (counts := own.counts()).waiting + counts.running and time.monotonic() < end_s:
        time.sleep(0.01)
    assert (counts.waiting, counts.running) == (0, 0)


def record(response: Response) -> dict[str, Any]:
    from starlette.responses import JSONResponse

    assert isinstance(response, JSONResponse)
    assert response.status_code == 200, response.body
    found: dict[str, Any] = json.loads(response.body)
    return found


async def streamed(response: Response) -> str:
    from starlette.responses import StreamingResponse

    assert isinstance(response, StreamingResponse)
    assert response.headers["content-type"].startswith("text/event-stream")
    return "".join([str(part, "utf-8") async for part in response.body_iterator])  # type: ignore[arg-type]


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    own = {"id", "created", "usage"}
    return {name: value for name, value in answer.items() if name not in own}


def asking(served: vInferenceApiServer, llm: LLM) -> Asker:
    asker = Asker(llm)
    asker.app, asker.state = served.app, served.app.state.server
    return asker


def test_the_methods_that_inform_answer_as_their_routes(
    served: vInferenceApiServer, inference: vInference
) -> None:
    assert record(asyncio.run(served.liveness())) == {"status": "alive"}
    assert record(asyncio.run(served.readiness())) == {"status": "ready"}
    [model] = record(asyncio.run(served.available_inference()))["data"]
    assert (model["id"], model["permission"]) == ("story", [])
    count = {"model": "story", "count": inference.count_tokens(HELLO)}
    assert record(asyncio.run(served.count_tokens({"conversation": HELLO}))) == count
    served.app.state.server.is_draining = True
    assert asyncio.run(served.readiness()).status_code == 503


@pytest.mark.parametrize(("method", "body"), [("chat_completions", CHAT), ("completions", TEXT)])
def test_the_methods_that_generate_answer_whole_and_streamed(
    served: vInferenceApiServer, own: LLM, method: str, body: dict[str, Any]
) -> None:
    asker, answer = asking(served, own), getattr(served, method)
    expected = asker.ok(PATHS[method], **body)
    assert without_times(record(asyncio.run(answer(body)))) == without_times(expected)

    async def stream() -> str:
        return await streamed(await answer({**body, "stream": True}))

    *events, last = events_of(asyncio.run(stream()))
    assert last == "[DONE]"
    [choice] = expected["choices"]
    whole = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text_of([json.loads(one) for one in events]) == whole


def test_requests_may_be_objects_of_pydantic(served: vInferenceApiServer) -> None:
    from enginebay_vinference.api_server import (
        ChatCompletionRequest,
        CompletionRequest,
        CountTokenRequest,
    )

    chat = asyncio.run(served.chat_completions(ChatCompletionRequest(**CHAT)))
    assert record(chat)["usage"]["completion_tokens"] == 6
    text = asyncio.run(served.completions(CompletionRequest(**TEXT)))
    assert record(text)["usage"]["completion_tokens"] == 6
    assert record(asyncio.run(served.count_tokens(CountTokenRequest(conversation="The"))))["count"]


def test_wrong_requests_are_answered_and_wrong_types_are_refused(
    served: vInferenceApiServer,
) -> None:
    from enginebay.errors import InputError

    for answer, body, status in (
        (served.chat_completions, {"messages": []}, 400),
        (served.chat_completions, {**CHAT, "colour": 3}, 400),
        (served.completions, {**TEXT, "model": "tale"}, 404),
        (served.count_tokens, {}, 400),
    ):
        response = asyncio.run(answer(body))
        assert response.status_code == status, response.body
        assert json.loads(response.body)["error"]["message"]
    for wrong in ("Hello", 3, {"messages": {1, 2}}):
        with pytest.raises(InputError, match="a request"):
            asyncio.run(served.chat_completions(wrong))  # type: ignore[arg-type]


def test_a_stream_that_is_dropped_ends_its_request(served: vInferenceApiServer, own: LLM) -> None:
    async def begin(number: int) -> None:
        body = {**TEXT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        response = await served.completions(body)
        parts: AsyncIterator[Any] = response.body_iterator  # type: ignore[attr-defined]
        for _ in range(number):
            await anext(parts)
        del parts, response
        end_s = time.monotonic() + END_S
        while (counts := own.counts()).waiting + counts.running and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        assert (counts.waiting, counts.running) == (0, 0)

    for number in (0, 2):
        asyncio.run(begin(number))
    ended = 'finished_reason="abort",model_name="story"} 2.0'
    assert ended in asking(served, own).get("/metrics").text


def test_an_app_of_its_own_may_serve_the_methods(served: vInferenceApiServer) -> None:
    import fastapi
    import httpx

    app = fastapi.FastAPI()

    @app.post("/talk")
    async def talk(body: dict[str, Any]) -> Any:
        return await served.chat_completions(body)

    async def ask(**more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://own") as client:
            return await client.post("/talk", json={**CHAT, **more})

    whole = asyncio.run(ask()).json()["choices"][0]["message"]["content"]
    *events, last = events_of(asyncio.run(ask(stream=True)).text)
    assert last == "[DONE]"
    assert text_of([json.loads(one) for one in events]) == whole


def test_they_answer_on_the_loop_of_fire_while_it_runs(served: vInferenceApiServer) -> None:
    thread = threading.Thread(
        target=served.fire, args=("127.0.0.1", 0, -1), kwargs={"log_level": "warning"}
    )
    thread.start()
    try:
        end_s = time.monotonic() + END_S
        while served._calls.loop is None and time.monotonic() < end_s:
            time.sleep(0.01)
        loops: set[Any] = set()
        inner = served.app.router.middleware_stack

        async def seen(*args: Any) -> None:
            loops.add(asyncio.get_running_loop())
            await inner(*args)

        served.app.router.middleware_stack = seen

        async def both() -> None:
            record(await served.liveness())
            await streamed(await served.completions({**TEXT, "stream": True}))

        asyncio.run(both())
        assert loops == {served._calls.loop}
    finally:
        served.stop()
        thread.join(END_S)
    assert not thread.is_alive()
    assert served._calls.loop is None
