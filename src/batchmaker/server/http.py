"""The HTTP server as an ASGI application."""

from __future__ import annotations

from starlette.routing import Route, Router

from batchmaker.server.gate import Gate
from batchmaker.server.parts import Site
from batchmaker.server.routes.health import health_routes
from batchmaker.server.routes.infer import infer_routes
from batchmaker.server.routes.live import live_routes
from batchmaker.server.routes.models import model_routes
from batchmaker.server.routes.observe import observe_routes
from batchmaker.server.routes.repository import repository_routes
from batchmaker.server.spans import Spans


def make_app(site: Site, spans: Spans, *, log_access: bool = False) -> Gate:
    """Return the application."""
    return Gate(Router(all_routes(site), redirect_slashes=False), site.keys, spans, log_access=log_access)


def all_routes(site: Site) -> list[Route]:
    """Return all routes; what is called most comes first."""
    return [
        *infer_routes(site), *health_routes(site), *model_routes(site), *repository_routes(site),
        *observe_routes(site), *live_routes(site),
    ]  # fmt: skip
