"""The HTTP server as an ASGI application."""

from __future__ import annotations

from starlette.routing import Router

from batchmaker.server.auth import KeyRing
from batchmaker.server.gate import Gate
from batchmaker.server.metrics import Metrics
from batchmaker.server.parts import Site
from batchmaker.server.reading import BodyBudget
from batchmaker.server.routes.health import health_routes
from batchmaker.server.routes.infer import infer_routes
from batchmaker.server.routes.models import model_routes
from batchmaker.server.routes.observe import observe_routes
from batchmaker.server.routes.repository import repository_routes
from batchmaker.server.service import Service
from batchmaker.server.spans import Spans


def make_app(service: Service, keys: KeyRing, spans: Spans, *, log_access: bool = False) -> Gate:
    """Return the application. What is called most comes first among its routes."""
    site = Site(service, keys, Metrics(service), BodyBudget(service.limits))
    routes = [
        *infer_routes(site), *health_routes(site), *model_routes(site), *repository_routes(site), *observe_routes(site)
    ]  # fmt: skip
    return Gate(Router(routes, redirect_slashes=False), keys, spans, log_access=log_access)
