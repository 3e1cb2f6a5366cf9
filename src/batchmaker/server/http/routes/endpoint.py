"""What the routes have in common: how a function answers, and the model in a path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import final

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ModelName = tuple[str, str | None]
"""A model and its version; None: the newest."""


@final
class Endpoint:
    """A route's function as an ASGI application. Its exceptions reach the middleware, which answers all errors.

    With the plain function, Starlette would look for error handlers, twice.
    """

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)


def named_model(request: HTTPConnection) -> ModelName:
    """Return the model in a call's path."""
    return request.path_params["model"], request.path_params.get("version")
