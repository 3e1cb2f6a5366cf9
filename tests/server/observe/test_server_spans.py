"""Spans, where OpenTelemetry is installed; and what is said where it is not."""

from __future__ import annotations

import asyncio
import importlib.util

import grpc
import pytest

from batchmaker.errors import OptionError
from batchmaker.server.access.auth import KeyRing
from batchmaker.server.access.connections import Connections
from batchmaker.server.access.origins import Origins
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.config import Config
from batchmaker.server.http.middleware import CallMiddleware
from batchmaker.server.limits import Limits
from batchmaker.server.observe.metrics import Metrics
from batchmaker.server.observe.spans import Spans
from batchmaker.server.rpc.methods import EngineAnswers, unary_methods
from batchmaker.server.rpc.schema import SERVICE
from batchmaker.server.rpc.server import RpcServer
from batchmaker.server.service.repository import Repository
from batchmaker.server.service.service import Service
from batchmaker.server.service.site import Site

ANY_ORIGIN = Origins((), only_this_machine=False)
PARENT = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{PARENT}-b7ad6b7169203331-01"


def test_spans_that_cannot_be_made_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install opentelemetry-sdk"):
        Spans(enabled=True)


def test_without_spans_nothing_is_imported():
    assert not Spans(enabled=False).enabled


@pytest.fixture(scope="module")
def exporter():
    """Where all spans of this process end; OpenTelemetry takes one provider for each."""
    trace = pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry is optional")
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is optional")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    made = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture
def finished(exporter):
    """The spans that have ended within the test."""
    exporter.clear()
    return exporter.get_finished_spans


def test_a_call_is_a_span_under_the_clients_own(finished):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        pass

    headers = [(b"traceparent", TRACEPARENT.encode()), (b"x-request-id", b"r-1")]
    scope = {"type": "http", "method": "GET", "path": "/v2", "headers": headers}
    asyncio.run(CallMiddleware(app, KeyRing({}), ANY_ORIGIN, Spans(enabled=True), log_access=False)(scope, None, send))
    (span,) = finished()
    assert (span.name, f"{span.context.trace_id:032x}") == ("GET /v2", PARENT)
    assert span.attributes["http.response.status_code"] == 204
    assert span.attributes["batchmaker.request_id"] == "r-1"


def test_a_call_by_grpc_is_one_with_its_status(finished):
    async def calls():
        limits = Limits()
        service = Service(Repository([], limits), limits)
        site = Site(service, KeyRing({}), ANY_ORIGIN, Metrics(service, Connections(9, 9)), BodyBudget(limits))
        methods, answers = unary_methods(site), EngineAnswers(site)
        server = RpcServer(
            Config(grpc_port=0), site.access, Spans(enabled=True), Connections(9, 9), methods, answers, lambda: True
        )
        await server.start()
        metadata = [("traceparent", TRACEPARENT), ("x-request-id", "r-2")]
        async with grpc.aio.insecure_channel(server.address.removeprefix("grpc://")) as channel:
            await channel.unary_unary(f"/{SERVICE}/ServerLive")(b"", metadata=metadata)
            with pytest.raises(grpc.RpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/ModelMetadata")(b"\n\x06nobody", metadata=metadata)
        await server.close(0.0)
        return caught.value.code()

    assert asyncio.run(calls()) is grpc.StatusCode.NOT_FOUND
    good, bad = finished()
    assert (good.name, bad.name) == (f"{SERVICE}/ServerLive", f"{SERVICE}/ModelMetadata")
    assert {f"{span.context.trace_id:032x}" for span in (good, bad)} == {PARENT}
    assert [span.attributes["rpc.grpc.status_code"] for span in (good, bad)] == [0, 5]
    assert {span.attributes["batchmaker.request_id"] for span in (good, bad)} == {"r-2"}
    assert {span.attributes["rpc.system"] for span in (good, bad)} == {"grpc"}
