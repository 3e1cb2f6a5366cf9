"""Health of the server and its models. Answers have no body."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchmaker.server.faults import ServiceError
from batchmaker.server.http.routes.endpoint import named_model
from batchmaker.server.service.site import Site


def health_routes(site: Site) -> list[Route]:
    """Live, ready, and ready for one model."""

    async def live(request: Request) -> Response:
        return Response()

    async def ready(request: Request) -> Response:
        return Response(status_code=200 if site.service.ready else 503)

    async def model_ready(request: Request) -> Response:
        try:
            served = site.service.repository.get(*named_model(request))
        except ServiceError:
            return Response(status_code=404)
        return Response(status_code=200 if site.service.takes(served) else 503)

    return [
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2/models/{model}/ready", model_ready),
        Route("/v2/models/{model}/versions/{version}/ready", model_ready),
    ]
