"""Spans, where OpenTelemetry is installed; and what is said where it is not."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from batchmaker.errors import OptionError
from batchmaker.server.auth import KeyRing
from batchmaker.server.gate import Gate
from batchmaker.server.spans import Spans

PARENT = "0af7651916cd43dd8448eb211c80319c"


def test_spans_that_cannot_be_made_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install opentelemetry-sdk"):
        Spans(enabled=True)


def test_without_spans_nothing_is_imported():
    assert not Spans(enabled=False).enabled


def test_a_call_is_a_span_under_the_clients_own():
    trace = pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry is optional")
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is optional")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exported = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    trace.set_tracer_provider(provider)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        pass

    headers = [(b"traceparent", f"00-{PARENT}-b7ad6b7169203331-01".encode()), (b"x-request-id", b"r-1")]
    scope = {"type": "http", "method": "GET", "path": "/v2", "headers": headers}
    asyncio.run(Gate(app, KeyRing({}), Spans(enabled=True), log_access=False)(scope, None, send))
    (span,) = exported.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}") == ("GET /v2", PARENT)
    assert span.attributes["http.response.status_code"] == 204
    assert span.attributes["batchmaker.request_id"] == "r-1"
