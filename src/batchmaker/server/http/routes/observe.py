"""Metrics, and a trace of the last seconds."""

from __future__ import annotations

import asyncio
import math

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchmaker.server.faults import invalid
from batchmaker.server.http.answers import encoded
from batchmaker.server.observe.chrome_trace import chrome_trace, trace_events
from batchmaker.server.service.site import Site

_DEFAULT_SECONDS = 5.0
_MAX_SECONDS = 60.0


def observe_routes(site: Site) -> list[Route]:
    """/metrics and /v2/trace."""

    async def metrics(request: Request) -> Response:
        text, content_type = site.metrics.answer(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def trace(request: Request) -> Response:
        seconds = _seconds(request.query_params.get("seconds"))
        body = await asyncio.to_thread(_trace, site, seconds)
        return encoded(body, {"Content-Disposition": 'attachment; filename="batchmaker-trace.json"'})

    return [Route("/metrics", metrics), Route("/v2/trace", trace)]


def _seconds(text: str | None) -> float:
    try:
        seconds = _DEFAULT_SECONDS if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_SECONDS:
        raise invalid(f"seconds must be a number above 0 and up to {_MAX_SECONDS:g}")
    return seconds


def _trace(site: Site, seconds: float) -> bytes:
    """Return the trace as JSON. Time 0 is the beginning of the time span, for all models."""
    starts = [(model, model.port.clock.now_s() - seconds) for model in site.service.repository.models()]
    events = [
        event
        for number, (model, begin_s) in enumerate(starts)
        for event in trace_events(2 * number, f"{model.name} {model.version}", model.steps.since(begin_s), begin_s)
    ]
    return msgspec.json.encode(chrome_trace(events))
