"""What the routes of HTTP and the methods of gRPC stand on."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from batchmaker.server.auth import KeyRing
from batchmaker.server.metrics import Metrics
from batchmaker.server.reading import BodyBudget
from batchmaker.server.service import Service


@dataclass(frozen=True, slots=True)
class Site:
    """One server's parts, for the routes and methods that need them."""

    service: Service
    keys: KeyRing
    metrics: Metrics
    bodies: BodyBudget


def named_model(request: Request) -> tuple[str, str | None]:
    """Return the model and version in a call's path."""
    return request.path_params["model"], request.path_params.get("version")
