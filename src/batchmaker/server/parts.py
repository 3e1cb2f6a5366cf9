"""Common parts of the HTTP routes and the gRPC methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import final

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmaker.server.auth import KeyRing
from batchmaker.server.metrics import Metrics
from batchmaker.server.origins import Origins
from batchmaker.server.request_body import BodyBudget
from batchmaker.server.service import AnsweredCalls, Service


@dataclass(frozen=True, slots=True)
class CallAccess:
    """Who may call, and how much: the same for a server and for the front of a fleet. answered: counts calls."""

    keys: KeyRing
    bodies: BodyBudget
    answered: AnsweredCalls


@dataclass(frozen=True, slots=True)
class Site:
    """The parts of one server, for routes and methods.

    origins: checked without keys. page: the operator's HTML.
    """

    service: Service
    keys: KeyRing
    origins: Origins
    metrics: Metrics
    bodies: BodyBudget
    page: bytes | None = None

    @property
    def access(self) -> CallAccess:
        """What a protocol needs of it."""
        return CallAccess(self.keys, self.bodies, self.service.answered)


@final
class Endpoint:
    """A route's function as an ASGI application. Its exceptions reach the Gate, which answers all errors.

    With the plain function, Starlette would look for error handlers, twice.
    """

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)


def caller_of(request: Request) -> str:
    """Return the name of the API key's holder, as found by the Gate."""
    caller: str = request.scope["state"]["caller"]
    return caller


def holder_of(scope: Scope) -> str:
    """Return whose the bytes of a call are: the API key's holder, or the client's address."""
    client = scope.get("client")
    return scope["state"]["caller"] or (client[0] if client else "")


def named_model(request: HTTPConnection) -> tuple[str, str | None]:
    """Return the model and version in a call's path."""
    return request.path_params["model"], request.path_params.get("version")
