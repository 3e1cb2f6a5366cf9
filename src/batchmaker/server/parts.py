"""Common parts of the HTTP routes and the gRPC methods."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, final

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from batchmaker.server.auth import FRONT, KeyRing
from batchmaker.server.metrics import Metrics
from batchmaker.server.origins import Origins
from batchmaker.server.request_body import DEPARTURE, BodyBudget
from batchmaker.server.sender import HEADER, Sender
from batchmaker.server.service import AnsweredCalls, Service

_SENDER: Final = HEADER.encode()


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


def sender_of(scope: Scope, keys: KeyRing) -> Sender:
    """Return who sends a call that has passed the Gate."""
    if keys.is_of_fleet:
        for name, value in scope["headers"]:
            if name == _SENDER:
                return forwarded_sender(scope["state"]["caller"], value.decode("latin-1"))
    client, departure = scope.get("client"), scope.get("extensions", {}).get(DEPARTURE)
    connection = "" if departure is None else f"http {departure.connection}"
    return Sender(scope["state"]["caller"], client[0] if client else "", connection)


def forwarded_sender(holder: str, forwarded: str) -> Sender:
    """Return the sender of a call that the front of a fleet has sent on."""
    return Sender.read("" if holder == FRONT else holder, forwarded)


def named_model(request: HTTPConnection) -> tuple[str, str | None]:
    """Return the model and version in a call's path."""
    return request.path_params["model"], request.path_params.get("version")
