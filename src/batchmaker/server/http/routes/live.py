"""The live page, and its data."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import re
from importlib import resources
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchmaker.clock import Clock, RealClock
from batchmaker.server.access.auth import TokenBucket
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.http.answers import encoded
from batchmaker.server.observe.live import SPANS_S, live_view
from batchmaker.server.service.served_model import ServedModel
from batchmaker.server.service.site import Site

MAX_LOOKS_PER_S: Final = 20.0
"""Answers a second to all viewers together, so that viewers cost the models little."""

_OWN_HEADERS: Final = {"Content-Security-Policy": "frame-ancestors 'none'", "Cache-Control": "no-cache"}
"""Headers of the operator's page. It may do anything except be shown inside another page."""


def live_routes(site: Site, clock: Clock | None = None) -> list[Route]:
    """The page at `/`, the operator's page at `/page`, and /v2/live. clock: for counting answers."""
    repository = site.service.repository
    page = (resources.files("batchmaker.server.observe") / "page" / "live.html").read_bytes()
    headers = {"Content-Security-Policy": _policy(page.decode()), "Cache-Control": "no-cache"}
    looks = TokenBucket(MAX_LOOKS_PER_S, 2 * MAX_LOOKS_PER_S, clock or RealClock())

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    async def own(request: Request) -> Response:
        if site.page is None:
            raise ServiceError(FaultKind.NOT_FOUND, "this server has no page of its own; start it with --page FILE")
        return Response(site.page, media_type="text/html", headers=_OWN_HEADERS)

    async def live(request: Request) -> Response:
        """Return the figures of one served model for the live page. TOO_MANY if too many ask for them."""
        query = request.query_params
        span_s = SPANS_S.get(query.get("span", "10"))
        if span_s is None:
            raise invalid(f"span must be one of {', '.join(SPANS_S)} (seconds)")
        after_s = _moment(query.get("after"))
        served = _chosen(query.get("model"), query.get("version"))
        wait_s = looks.take()
        if wait_s:
            raise ServiceError(FaultKind.TOO_MANY, "too many are looking on; ask less often", retry_after_s=wait_s)
        view = await asyncio.to_thread(
            live_view,
            served,
            repository.models(),
            span_s,
            after_s,
            server_ready=site.service.ready,
        )
        return encoded(msgspec.json.encode(view), {"Cache-Control": "no-store"})

    def _chosen(name: str | None, version: str | None) -> ServedModel:
        if name is not None:
            return repository.get(name, version)
        models = repository.models()
        if not models:
            raise ServiceError(FaultKind.NOT_FOUND, "no model is loaded")
        return models[0]

    return [Route("/", show), Route("/page", own), Route("/v2/live", live)]


def _moment(text: str | None) -> float | None:
    """Return the engine's time in `after`."""
    try:
        after_s = None if text is None else float(text)
    except ValueError:
        after_s = math.nan
    if after_s is not None and not 0 <= after_s < math.inf:
        raise invalid("after must be the now_s of an earlier answer")
    return after_s


def _policy(page: str) -> str:
    """Return a Content-Security-Policy that allows exactly the scripts and styles in the page."""
    hashes = {
        tag: " ".join(f"'sha256-{_hash(text)}'" for text in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
