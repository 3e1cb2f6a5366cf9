"""grpc.health.v1: whether the server and its service take requests.

The two messages are built like the other protocol messages, so that any version of protobuf works. The official package
requires a newer version than some clients' libraries allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from batchmaker.server.rpc.schema import SERVICE, messages_of

_HEALTH: Final = "grpc.health.v1"
_MESSAGES: Final = messages_of(
    _HEALTH,
    {"HealthCheckRequest": "service: 1 string", "HealthCheckResponse": "status: 1 ServingStatus"},
    {"ServingStatus": ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")},
)
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_LOOK_S: Final = 0.2
"""Seconds between two checks of a watched state."""


def health_handlers(ready: Callable[[], bool]) -> Any:
    """Return gRPC's handlers of the health service: Check, and Watch, which reports changes until the client goes.

    ready: whether requests are taken.
    """

    def state_of(name: str) -> int | None:
        if name not in ("", SERVICE):
            return None
        return _SERVING if ready() else _NOT_SERVING

    async def check(request: Any, context: Any) -> Any:
        state = state_of(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f'known are the server ("") and {SERVICE}')
        return _MESSAGES["HealthCheckResponse"](status=state)

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            state = state_of(request.service)
            now = _SERVICE_UNKNOWN if state is None else state
            if now != told:
                told = now
                yield _MESSAGES["HealthCheckResponse"](status=now)
            await asyncio.sleep(_LOOK_S)

    forms = {
        "request_deserializer": _MESSAGES["HealthCheckRequest"].FromString,
        "response_serializer": _MESSAGES["HealthCheckResponse"].SerializeToString,
    }
    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(check, **forms),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, **forms),
    }
    return grpc.method_handlers_generic_handler(f"{_HEALTH}.Health", methods)
