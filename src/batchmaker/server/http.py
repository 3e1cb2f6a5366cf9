"""The HTTP server as an ASGI application."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Router
from starlette.types import Receive, Scope, Send

from batchmaker.server.gate import Gate
from batchmaker.server.parts import Site
from batchmaker.server.routes.chunks import chunk_routes
from batchmaker.server.routes.health import health_routes
from batchmaker.server.routes.infer import infer_routes
from batchmaker.server.routes.live import live_routes
from batchmaker.server.routes.models import model_routes
from batchmaker.server.routes.observe import observe_routes
from batchmaker.server.routes.repository import repository_routes
from batchmaker.server.spans import Spans


def make_app(site: Site, spans: Spans, *, log_access: bool = False) -> Gate:
    """Return the application."""
    router = Router(all_routes(site), redirect_slashes=False, default=_nothing_here)
    return Gate(router, site.keys, spans, log_access=log_access)


async def _nothing_here(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)


def all_routes(site: Site) -> list[BaseRoute]:
    """Return all routes; what is called most comes first."""
    return [
        *infer_routes(site), *chunk_routes(site), *health_routes(site), *model_routes(site), *repository_routes(site),
        *observe_routes(site), *live_routes(site),
    ]  # fmt: skip
