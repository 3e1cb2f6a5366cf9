"""grpc.health.v1: whether the server and its service take requests.

The two messages are built like the other protocol messages, so that any version of protobuf works. The official package
requires a newer version than some clients' libraries allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, final

from batchmaker.server.access.connections import Connections
from batchmaker.server.faults import FaultKind, ServiceError
from batchmaker.server.limits import Limits
from batchmaker.server.rpc.handlers import RpcCall, RpcHandlers, RpcService
from batchmaker.server.rpc.schema import SERVICE, decode, messages_of

_PACKAGE: Final = "grpc.health.v1"
_MADE: Final = messages_of(
    _PACKAGE,
    {"HealthCheckRequest": "service: 1 string", "HealthCheckResponse": "status: 1 ServingStatus"},
    {"ServingStatus": ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")},
)
_MESSAGES: Final = {
    f"{method}{kind}": _MADE[f"HealthCheck{kind}"] for kind in ("Request", "Response") for method in ("Check", "Watch")
}
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_LOOK_S: Final = 0.2
"""Seconds between two checks of a watched state."""


def health_service(limits: Limits) -> RpcService:
    """Return the service. It needs no key, so its calls are counted by themselves: nobody else waits for them."""
    calls = Connections(limits.max_connections, limits.max_client_connections, "health checks")
    return RpcService(f"{_PACKAGE}.Health", _MESSAGES, frozenset(("Check", "Watch")), calls)


def health_methods(handlers: RpcHandlers, ready: Callable[[], bool], limits: Limits) -> dict[str, Any]:
    """Return gRPC's handlers of the methods: Check, and Watch, which reports changes until the client goes.

    ready: whether requests are taken.
    """
    seen = _Seen(ready)

    def state_of(name: str) -> int | None:
        if name not in ("", SERVICE):
            return None
        return _SERVING if ready() else _NOT_SERVING

    async def check(request: Any, call: RpcCall) -> dict[str, Any]:
        state = state_of(request.service)
        if state is None:
            raise ServiceError(FaultKind.NOT_FOUND, f'known are the server ("") and {SERVICE}')
        return {"status": state}

    async def watch(call: RpcCall) -> None:
        """Send the state, and again whenever it changes, until the client goes."""
        data = await call.read(limits.body_seconds)
        request = decode("WatchRequest", data or b"", _MESSAGES)
        call.idle()
        last = None
        with seen:
            while True:
                state = state_of(request.service)
                now, changed = _SERVICE_UNKNOWN if state is None else state, seen.changed
                if now != last:
                    last = now
                    message = _MESSAGES["WatchResponse"](status=now)
                    await call.write(message.SerializeToString(), limits.write_seconds)
                await call.wait(changed)

    return {"Check": handlers.unary("Check", check), "Watch": handlers.stream("Watch", watch)}


@final
class _Seen:
    """Looks at the state for all who watch it, while there are any. changed: done at the next change."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._num_watching = 0
        self._looking: asyncio.Task[None] | None = None
        self.changed: asyncio.Future[None]

    def __enter__(self) -> None:
        self._num_watching += 1
        if self._looking is None:
            self.changed = asyncio.get_running_loop().create_future()
            self._looking = asyncio.get_running_loop().create_task(self._look(self._ready()))

    def __exit__(self, *_: object) -> None:
        self._num_watching -= 1
        if not self._num_watching and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self, was_ready: bool) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._ready() != was_ready:
                was_ready = not was_ready
                self.changed.set_result(None)
                self.changed = asyncio.get_running_loop().create_future()
