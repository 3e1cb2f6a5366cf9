"""Descriptions of the server and its models."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batchmaker.server.http.answers import as_json, encoded
from batchmaker.server.http.openapi import openapi_description
from batchmaker.server.http.routes.endpoint import named_model
from batchmaker.server.service.descriptions import model_config, model_metadata, model_statistics, server_metadata
from batchmaker.server.service.site import Site


def model_routes(site: Site) -> list[Route]:
    """Metadata, configuration and statistics, and the description of all routes."""
    repository = site.service.repository
    description = msgspec.json.encode(openapi_description())

    async def server(request: Request) -> Response:
        return as_json(server_metadata())

    async def metadata(request: Request) -> Response:
        served = repository.get(*named_model(request))
        return as_json(model_metadata(served, repository.versions(served.name)))

    async def config(request: Request) -> Response:
        return as_json(model_config(repository.get(*named_model(request))))

    async def statistics(request: Request) -> Response:
        return as_json({"model_stats": [model_statistics(repository.get(*named_model(request)))]})

    async def all_statistics(request: Request) -> Response:
        return as_json({"model_stats": [model_statistics(model) for model in repository.models()]})

    async def openapi(request: Request) -> Response:
        return encoded(description)

    return [
        Route("/openapi.json", openapi),
        Route("/v2", server),
        Route("/v2/models/stats", all_statistics),
        Route("/v2/models/{model}", metadata),
        Route("/v2/models/{model}/versions/{version}", metadata),
        Route("/v2/models/{model}/config", config),
        Route("/v2/models/{model}/versions/{version}/config", config),
        Route("/v2/models/{model}/stats", statistics),
        Route("/v2/models/{model}/versions/{version}/stats", statistics),
    ]
