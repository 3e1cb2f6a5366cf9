"""The HTTP server as an ASGI application."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

from batchmaker.server.http.middleware import OPEN_PATHS, CallMiddleware
from batchmaker.server.http.routes.chunks import chunk_routes
from batchmaker.server.http.routes.completions import completion_routes
from batchmaker.server.http.routes.health import health_routes
from batchmaker.server.http.routes.infer import infer_routes
from batchmaker.server.http.routes.live import live_routes
from batchmaker.server.http.routes.models import model_routes
from batchmaker.server.http.routes.observe import observe_routes
from batchmaker.server.http.routes.realtime import realtime_routes
from batchmaker.server.http.routes.repository import repository_routes
from batchmaker.server.http.routes.transcriptions import transcription_routes
from batchmaker.server.observe.spans import Spans
from batchmaker.server.service.site import Site


def make_app(site: Site, spans: Spans, *, admin_apart: bool = False, log_access: bool = False) -> CallMiddleware:
    """Return the application. admin_apart: leave out the routes of `make_admin_app`."""
    routes = user_routes(site) if admin_apart else all_routes(site)
    return CallMiddleware(
        Router(routes, redirect_slashes=False, default=_nothing_here),
        site.keys,
        site.origins,
        spans,
        log_access=log_access,
        answered=site.service.answered,
    )


def make_admin_app(site: Site, spans: Spans, *, log_access: bool = False) -> CallMiddleware:
    """Return the application for operators, for a port that others cannot reach: metrics need no key."""
    router = Router(admin_routes(site), redirect_slashes=False, default=_nothing_here)
    open_paths = OPEN_PATHS | {"/metrics"}
    return CallMiddleware(
        router,
        site.keys,
        site.origins,
        spans,
        log_access=log_access,
        open_paths=open_paths,
        answered=site.service.answered,
    )


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)


def all_routes(site: Site) -> list[BaseRoute]:
    """Return all routes, the most frequent first."""
    return [*user_routes(site), *repository_routes(site), *observe_routes(site), *live_routes(site)]


def user_routes(site: Site) -> list[BaseRoute]:
    """Return the routes for users of models."""
    return [
        *infer_routes(site),
        *completion_routes(site),
        *transcription_routes(site),
        *realtime_routes(site),
        *chunk_routes(site),
        *health_routes(site),
        *model_routes(site),
    ]


def admin_routes(site: Site) -> list[BaseRoute]:
    """Return the routes for operators: probes, metrics, traces, loading and unloading."""
    return [*health_routes(site), *observe_routes(site), *repository_routes(site), *live_routes(site)]
