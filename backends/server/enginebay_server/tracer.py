"""Tracer: sends spans of OpenTelemetry by OTLP over HTTP. It imports the libraries when it is made,
which only a server that sends traces does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from enginebay import __version__
from enginebay_server.request_span import RequestSpan

FLUSH_S = 5.0
"""Max seconds to send the last spans when the server ends."""


class Tracer:
    """Makes spans, and sends them on a thread of its own. The owner calls close()."""

    def __init__(self, url: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        resource = Resource.create(None if is_named else {"service.name": "enginebay"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("enginebay.server", __version__)
        self._parents = TraceContextTextMapPropagator()

    def start(self, scope: Mapping[str, Any]) -> Any:
        """Return a started span of the server, whose parent is that of the traceparent header."""
        from opentelemetry.trace import SpanKind

        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        parent = self._parents.extract(headers)
        name = f"{scope['method']} {scope['path']}"
        return self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)

    def end(self, span: Any, facts: RequestSpan, status: int) -> None:
        """End a span with the attributes and the error of its request."""
        from opentelemetry.trace import Status, StatusCode

        span.update_name(facts.name)
        span.set_attributes(facts.end(status))
        if facts.error is not None or status >= 500:
            message = "" if facts.error is None else facts.error.message
            span.set_status(Status(StatusCode.ERROR, message or f"status {status}"))
        span.end()

    def close(self) -> None:
        """Send the remaining spans, for FLUSH_S at most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(FLUSH_S)
