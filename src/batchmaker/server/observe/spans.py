"""OpenTelemetry spans, one for each call, if the package is installed and spans are enabled."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from batchmaker.errors import OptionError


@final
class Spans:
    """Opens a span around each call, as a child of the client's span in `traceparent`."""

    def __init__(self, *, enabled: bool) -> None:
        self._tracer: Any = _make_tracer() if enabled else None

    @property
    def enabled(self) -> bool:
        """Whether spans are made at all."""
        return self._tracer is not None

    @contextmanager
    def call(self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, str]) -> Iterator[Any]:
        """Open a span for the block and yield it. carrier: headers by lower-case name."""
        from opentelemetry import propagate, trace

        context = propagate.extract(dict(carrier))
        with self._tracer.start_as_current_span(
            name, context=context, kind=trace.SpanKind.SERVER, attributes=dict(attributes)
        ) as span:
            yield span


def _make_tracer() -> Any:
    if importlib.util.find_spec("opentelemetry") is None:
        raise OptionError("log.spans needs OpenTelemetry: pip install opentelemetry-sdk opentelemetry-exporter-otlp")
    from opentelemetry import trace

    _export_as_configured(trace)
    return trace.get_tracer("batchmaker.server")


def _export_as_configured(trace: Any) -> None:
    """Send spans to OTEL_EXPORTER_OTLP_ENDPOINT, unless the process already has a provider."""
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise OptionError(f"log.spans: {error}. pip install opentelemetry-sdk opentelemetry-exporter-otlp") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "batchmaker"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
