"""The server of gRPC, from its port to its last answer."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import grpc
from grpc import aio

from batchmaker.server.access.connections import Connections
from batchmaker.server.config import Config
from batchmaker.server.observe.spans import Spans
from batchmaker.server.rpc.handlers import Answer, RpcCall, RpcHandlers, RpcService
from batchmaker.server.rpc.health import health_methods, health_service
from batchmaker.server.rpc.listener import RpcListener
from batchmaker.server.rpc.schema import MESSAGES, SERVICE
from batchmaker.server.rpc.stream import InferStream, StreamAnswers
from batchmaker.server.service.site import CallAccess

_WATCHERS_S: Final = 0.2
_ONLY_IDENTITY: Final = 1
_WINDOW_BYTES: Final = 1 << 16
"""What a client may send before anybody reads; a message that is read may be sent as fast as the network allows."""

_OPEN: Final = frozenset({"ServerLive", "ServerReady"})
"""Probes need no key."""


@final
class RpcServer:
    """gRPC beside HTTP: the same models, keys, limits and certificate. Used from one event loop."""

    def __init__(
        self,
        config: Config,
        access: CallAccess,
        spans: Spans,
        connections: Connections,
        unary: Mapping[str, Answer],
        streamed: StreamAnswers,
        ready: Callable[[], bool],
    ) -> None:
        """Bind to the address. OptionError if it is not available.

        connections: counts those of HTTP and gRPC together. unary: the functions of the methods with one message, by
        name. streamed: of ModelStreamInfer. ready: whether requests are taken, for health checks.
        """
        self._access = access
        self._streamed = streamed
        self._listener = RpcListener(config, connections, access.bodies)
        limits, log_access = config.limits, config.log.access
        calls = Connections(limits.max_connections, limits.max_client_connections, "calls")
        service, stream_of = RpcService(SERVICE, MESSAGES, _OPEN, calls), self._listener.stream_of
        self._handlers = RpcHandlers(service, access, spans, stream_of, log_access=log_access)
        health = RpcHandlers(health_service(limits), access, spans, stream_of, log_access=log_access)
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = aio.server(options=rpc_options(config))
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(SERVICE, self._methods(unary)),
                grpc.method_handlers_generic_handler(health.service.name, health_methods(health, ready, limits)),
            )
        )
        self._server.add_insecure_port(self._listener.core)
        self.address = self._listener.address

    def _methods(self, unary: Mapping[str, Answer]) -> dict[str, Any]:
        async def infer(call: RpcCall) -> None:
            await InferStream(self._access, self._streamed, call, self._stop).run()

        methods = {name: self._handlers.unary(name, answer) for name, answer in unary.items()}
        return {**methods, "ModelStreamInfer": self._handlers.stream("ModelStreamInfer", infer)}

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The context with the certificate, None without TLS. Connections that are made from now on see its changes."""
        return self._listener.tls

    async def start(self) -> None:
        """Begin to take calls."""
        await self._server.start()
        self._listener.start()

    def hang_up(self) -> None:
        """Read no further request of any stream; those that were read are answered."""
        if not self._stop.done():
            self._stop.set_result(None)

    async def close(self, within_s: float) -> None:
        """Refuse new calls, let running ones end, for `within_s` at most, and end."""
        self.hang_up()
        end = time.monotonic() + within_s
        while self._handlers.num_active and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await self._server.stop(_WATCHERS_S)
        await self._listener.close()


def rpc_options(config: Config) -> list[tuple[str, Any]]:
    """Return the limits as gRPC's own settings."""
    limits, pings = config.limits, config.grpc
    return [
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_head_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_head_bytes),
        ("grpc.max_concurrent_streams", 2 * limits.max_client_connections),  # all calls and all health checks of one
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),  # the window would grow to what a fast client can send
        ("grpc.keepalive_time_ms", pings.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", pings.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", int(pings.keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", pings.http2_max_pings_without_data),
        ("grpc.http2.min_ping_interval_without_data_ms", pings.http2_min_recv_ping_interval_without_data_ms),
        ("grpc.http2.max_ping_strikes", pings.http2_max_ping_strikes),
        ("grpc.compression_enabled_algorithms_bitset", _ONLY_IDENTITY),  # a small message could become a huge one
    ]
