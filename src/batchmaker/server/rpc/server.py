"""The server of gRPC, from its port to its last answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import grpc
from grpc import aio

from batchmaker.errors import OptionError
from batchmaker.server.config import Config
from batchmaker.server.parts import CallAccess
from batchmaker.server.rpc.gate import Answer, RpcCall, RpcGate
from batchmaker.server.rpc.schema import SERVICE
from batchmaker.server.rpc.stream import InferStream, StreamAnswers
from batchmaker.server.spans import Spans

_WATCHERS_S: Final = 0.2
_ONLY_IDENTITY: Final = 1


@final
class RpcServer:
    """gRPC beside HTTP: the same models, keys, limits and certificate. Used from one event loop."""

    def __init__(
        self,
        config: Config,
        access: CallAccess,
        spans: Spans,
        unary: Mapping[str, Answer],
        streamed: StreamAnswers,
        health: Any,
    ) -> None:
        """Bind to the address. OptionError if it is not available.

        unary: the functions of the methods with one message, by name. streamed: of ModelStreamInfer. health: the
        handlers of grpc.health.v1.
        """
        self._access = access
        self._streamed = streamed
        self._gate = RpcGate(access, spans, log_access=config.log.access)
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._server = aio.server(options=_options(config), maximum_concurrent_rpcs=config.limits.max_connections)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers(unary)),))
        self._server.add_generic_rpc_handlers((health,))
        self._certificates: deque[Any] = deque(maxlen=1)
        self.address = self._bind(config)

    def _handlers(self, unary: Mapping[str, Answer]) -> dict[str, Any]:
        async def infer(call: RpcCall) -> None:
            await InferStream(self._access, self._streamed, call, self._stop).run()

        handlers = {name: self._gate.unary(name, answer) for name, answer in unary.items()}
        return {**handlers, "ModelStreamInfer": self._gate.stream("ModelStreamInfer", infer)}

    def _bind(self, config: Config) -> str:
        host = f"[{config.host}]" if ":" in config.host else config.host
        wanted = f"{host}:{config.grpc_port}"
        try:
            if config.tls.cert is None or config.tls.key is None:
                scheme, port = "grpc", self._server.add_insecure_port(wanted)
            else:
                credentials = grpc.dynamic_ssl_server_credentials(_certificate(config), self._next_certificate)
                scheme, port = "grpcs", self._server.add_secure_port(wanted, credentials)
        except OSError as error:
            raise OptionError(f"the TLS certificate or key cannot be used: {error}") from None
        except RuntimeError:
            raise OptionError(
                f"{wanted} cannot be used for gRPC. Give another --grpc-port or --host; port 0 takes any that is free."
            ) from None
        return f"{scheme}://{host}:{port}"

    def take_over_certificate(self, config: Config) -> None:
        """Have the certificate read anew; connections that are made from then on see it. Raises OSError."""
        self._certificates.append(_certificate(config))

    def _next_certificate(self) -> Any:
        """Return what has been read since the last call, None for no change.

        Called in a thread of gRPC's, for each new connection. The event loop may append meanwhile: both are one step of
        the interpreter, so what is appended after the `pop` is there for the next connection.
        """
        try:
            return self._certificates.pop()
        except IndexError:
            return None

    async def start(self) -> None:
        """Begin to take calls."""
        await self._server.start()

    def hang_up(self) -> None:
        """Read no further request of any stream; those that were read are answered."""
        if not self._stop.done():
            self._stop.set_result(None)

    async def close(self, within_s: float) -> None:
        """Refuse new calls, let running ones end, for `within_s` at most, and end."""
        self.hang_up()
        end = time.monotonic() + within_s
        while self._gate.num_active and time.monotonic() < end:
            await asyncio.sleep(0.02)
        await self._server.stop(_WATCHERS_S)


def _certificate(config: Config) -> Any:
    """Return the certificate and its key as gRPC takes them, read now. Raises OSError."""
    assert config.tls.cert is not None
    assert config.tls.key is not None
    return grpc.ssl_server_certificate_configuration(
        [(Path(config.tls.key).read_bytes(), Path(config.tls.cert).read_bytes())]
    )


def _options(config: Config) -> list[tuple[str, Any]]:
    """Return the limits as gRPC's own settings."""
    limits = config.limits
    patience_ms = int(1e3 * limits.write_seconds)
    return [
        ("grpc.max_receive_message_length", limits.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_head_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_head_bytes),
        ("grpc.max_concurrent_streams", limits.max_connections),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.keepalive_time_ms", patience_ms),  # to notice clients that have vanished silently
        ("grpc.keepalive_timeout_ms", patience_ms),
        ("grpc.compression_enabled_algorithms_bitset", _ONLY_IDENTITY),  # a small message could become a huge one
        ("grpc.so_reuseport", 0),  # a second server on the same port is an error
    ]
