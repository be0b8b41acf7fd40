"""Traces: the spans that a receiver of OTLP over HTTP gets."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from enginebay.errors import InputError, StoppedError, UnsupportedError
from tests.server.in_process_client import HELLO, Asker
from tests.server.process import ServerProcess, refused

if TYPE_CHECKING:
    from enginebay import LLM

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="see `make test-serve`")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SERVER_KIND, UNSET, ERROR = 2, 0, 2


class Receiver:
    """A receiver of OTLP over HTTP, which keeps the spans that it gets."""

    def __init__(self) -> None:
        receiver = self
        self.spans: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/x-protobuf"
                receiver.take(self.path, data)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def take(self, path: str, data: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            about = attributes_of(resource.resource.attributes)
            for span in (one for scope in resource.scope_spans for one in scope.spans):
                self.spans.append(
                    {
                        "service": about["service.name"],
                        "name": span.name,
                        "kind": span.kind,
                        "trace": span.trace_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "status": span.status.code,
                        "message": span.status.message,
                        "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                        **attributes_of(span.attributes),
                    }
                )

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(30)


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with contextlib.closing(Receiver()) as made:
        yield made


@pytest.fixture
def traced(llm: LLM, receiver: Receiver) -> Asker:
    return Asker(llm, traces_url=f"{receiver.url}/v1/traces", max_body_bytes=10_000)


def spans_of(asker: Asker, receiver: Receiver) -> list[dict[str, Any]]:
    """All spans of an application, which ends."""
    asker.state.close()
    return receiver.spans


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_the_figures_of_its_answer(
    traced: Asker, receiver: Receiver, stream: bool
) -> None:
    body: dict[str, Any] = {
        "messages": HELLO, "max_tokens": 6, "n": 2, "temperature": 0.5, "seed": 3,
        "stop": ["zebra"],
    }  # fmt: skip
    answer = traced.post(CHAT, {**body, "stream": stream}, headers={"traceparent": TRACEPARENT})
    assert answer.status_code == 200
    usage = traced.ok(CHAT, **body)["usage"]
    span, _ = spans_of(traced, receiver)
    assert (span["service"], span["name"], span["kind"]) == ("enginebay", "chat demo", SERVER_KIND)
    assert (span["trace"], span["parent"], span["status"]) == (TRACE, PARENT, UNSET)
    expected = {
        "http.request.method": "POST",
        "url.path": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "enginebay",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ["zebra"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert {name: span.get(name) for name in expected} == expected
    assert span.get("gen_ai.request.stream", False) is stream
    assert span["gen_ai.response.id"] in answer.text
    queued, first = (
        span[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token")
    )
    assert 0 < queued < first < span["seconds"]
    assert not any("Hello" in str(value) for value in span.values())


def test_each_kind_of_request_has_its_operation(traced: Asker, receiver: Receiver) -> None:
    long = "Tell me about the cat and the sun. " * 12
    fields: dict[str, Any] = {"prompt": [long, "One day"], "max_tokens": 2, "cache_salt": "traced"}
    for _ in range(2):
        usage = traced.ok(COMPLETIONS, **fields)["usage"]
    traced.ok("/v1/responses", input="Hello!", max_output_tokens=2)
    traced.ok("/v1/messages", messages=HELLO, max_tokens=2)
    num_embedded = traced.ok("/v1/embeddings", input="One day")["usage"]["prompt_tokens"]
    for path in ("/v1/models", "/health", "/readiness", "/metrics", "/ui/"):
        traced.get(path)
    first, second, *others = spans_of(traced, receiver)
    assert [one["name"] for one in others] == [
        "chat demo", "chat demo", "embeddings demo", "GET /v1/models",
    ]  # fmt: skip
    assert first["name"] == "text_completion demo"
    assert second["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert second["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 4
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert second["gen_ai.usage.cache_read.input_tokens"] == cached > 0
    assert others[2]["gen_ai.usage.input_tokens"] == num_embedded
    assert len({one["trace"] for one in (first, second, *others)}) == 6
    assert all(one["parent"] == "" for one in others)


def test_errors_are_in_the_status(
    traced: Asker, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from enginebay.serving.events import RequestEnded
    from enginebay_server.generation import Generation

    traced.refused(COMPLETIONS, 400, prompt="a", temperature=-1)
    traced.refused(COMPLETIONS, 413, prompt="a" * 20_000)

    async def get(generation: Generation) -> list[Any]:
        return [RequestEnded(f"{generation.id}-0", error=StoppedError("the engine was closed"))]

    monkeypatch.setattr(Generation, "get", get)
    traced.post(COMPLETIONS, {"prompt": "One day", "stream": True})
    traced.refused(COMPLETIONS, 503, prompt="One day")
    refused_, large, streamed, whole = spans_of(traced, receiver)
    assert (refused_["status"], refused_["error.type"]) == (UNSET, "400")
    assert (large["status"], large["http.response.status_code"]) == (UNSET, 413)
    assert (streamed["status"], streamed["error.type"]) == (ERROR, "engine_stopped")
    assert "the engine was closed" in streamed["message"]
    assert (whole["status"], whole["http.response.status_code"]) == (ERROR, 503)
    assert streamed["gen_ai.response.finish_reasons"] == ["abort"]


def test_without_an_endpoint_nothing_is_imported(asker: Asker) -> None:
    assert asker.state.tracer is None
    look = (
        "import sys, enginebay_server.app, enginebay_server.serving; "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_endpoint_comes_from_the_flag_or_the_environment() -> None:
    from enginebay_server.command import traces_url

    base = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://base:4318/"}
    own = {**base, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://own:4318/spans"}
    assert traces_url(None, {}) is None
    assert traces_url("http://flag:4318", own) == "http://flag:4318/v1/traces"
    assert traces_url("http://flag:4318/v1/traces", {}) == "http://flag:4318/v1/traces"
    assert traces_url(None, base) == "http://base:4318/v1/traces"
    assert traces_url(None, own) == "http://own:4318/spans"
    assert traces_url(None, {**own, "OTEL_SDK_DISABLED": "true"}) is None
    with pytest.raises(InputError, match="Pass one, such as --otlp-endpoint"):
        traces_url("collector:4318", {})


def test_a_wrong_endpoint_or_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the endpoint 4318 of" in refused("demo", "--otlp-endpoint", "4318")
    from enginebay_server.command import traces_url

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'enginebay\[otel\]'"):
        traces_url("http://127.0.0.1:4318", {})


def test_a_server_sends_its_last_spans_when_it_ends(receiver: Receiver) -> None:
    import httpx

    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_SERVICE_NAME": "storyteller"}
    with ServerProcess("--warmup", "lazy", environment=variables) as server:
        ask = functools.partial(httpx.get, timeout=60)
        assert ask(f"{server.url}/v1/models").status_code == 200
        server.terminate()
        assert server.exit_code() == 0
    [span] = receiver.spans
    assert (span["service"], span["name"]) == ("storyteller", "GET /v1/models")
