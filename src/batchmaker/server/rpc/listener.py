"""The port of gRPC: clients' connections are accepted and counted here, and passed on to gRPC's core."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import ssl
from typing import Any, Final, final

from batchmaker.errors import OptionError
from batchmaker.server.access.connections import Connections
from batchmaker.server.access.request_body import BodyBudget
from batchmaker.server.config import Config
from batchmaker.server.listening import bind
from batchmaker.server.reload import use_certificate
from batchmaker.server.rpc import frames
from batchmaker.server.rpc.connection import CoreEnd, RpcConnection, RpcStream

_LOG = logging.getLogger("batchmaker.server")
_BACKLOG: Final = 2048
_NO_ROOM: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""Errors that are not those of one client, who may have gone before he was accepted."""

_AGAIN_S: Final = 1.0
"""Seconds until connections are accepted again after such an error."""


@final
class RpcListener:
    """Accepts connections within the limits of HTTP, and passes on what they carry. Used from one event loop.

    core: the address of gRPC's core, for `add_insecure_port`. It is known to this process only, and a call that does
    not come by this way finds no RpcStream.
    """

    def __init__(self, config: Config, connections: Connections, bodies: BodyBudget) -> None:
        """Bind to the address. OptionError if it is not available, or for a certificate without use."""
        self._connections = connections
        self._bodies = bodies
        self._name = f"batchmaker-{secrets.token_hex(16)}"
        self.core = f"unix-abstract:{self._name}"
        self.tls = _tls(config)
        assert config.grpc_port is not None
        self._socket = bind(config, config.grpc_port, "--grpc-port")
        port = self._socket.getsockname()[1]
        scheme = "grpc" if self.tls is None else "grpcs"
        self.address = f"{scheme}://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"
        self._open: dict[str, RpcConnection] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def stream_of(self, named: str | None) -> RpcStream | None:
        """Return the stream of a call by its header STREAM, None if it is over."""
        token, _, number = (named or "").partition(".")
        connection = self._open.get(token)
        return None if connection is None else connection.streams.get(int(number))

    def start(self) -> None:
        """Begin to accept connections."""
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._run(self._accept_all())

    async def close(self) -> None:
        """Accept no more, and close what is open, after what was written has been sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        for connection in tuple(self._open.values()):
            connection.close()

    def _run(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    _LOG.error("connections cannot be accepted", extra={"error": str(error)})
                    await asyncio.sleep(_AGAIN_S)
                continue
            connection = RpcConnection(address[0], self._connections, self._bodies, self._dial)
            refused = self._connections.opened(connection, address[0])
            if refused is None:
                self._open[connection.token] = connection
                self._run(self._begin(accepted, connection))
            else:
                _refuse(accepted, "" if self.tls else refused)

    async def _begin(self, accepted: socket.socket, connection: RpcConnection) -> None:
        """Hand an accepted socket over to its connection, after the handshake of TLS."""

        def lost() -> None:
            self._open.pop(connection.token, None)

        connection.on_lost = lost
        limits = {} if self.tls is None else {"ssl_handshake_timeout": self._bodies.limits.body_seconds}
        handing = asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection, accepted, ssl=self.tls, **limits
        )
        connection.handshake = asyncio.current_task()
        try:
            await handing
        except (OSError, asyncio.CancelledError):  # it speaks no TLS, has gone, or was closed to make room
            accepted.close()
            connection.connection_lost(None)
        finally:
            connection.handshake = None

    def _dial(self, end: CoreEnd) -> asyncio.Task[Any]:
        return self._run(self._connect(end))

    async def _connect(self, end: CoreEnd) -> None:
        """Connect to gRPC's core."""
        loop = asyncio.get_running_loop()
        to_core = socket.socket(socket.AF_UNIX)
        to_core.setblocking(False)
        try:
            to_core.connect(f"\0{self._name}")  # never waits: either there is room in the core's queue, or an error
            await loop.create_unix_connection(lambda: end, sock=to_core)
        except (OSError, asyncio.CancelledError):
            to_core.close()
            end.connection_lost(None)


def _tls(config: Config) -> ssl.SSLContext | None:
    if config.tls.cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    try:
        use_certificate(context, config)
    except OSError as error:
        raise OptionError(f"the TLS certificate or key cannot be used: {error}") from None
    return context


def _refuse(accepted: socket.socket, reason: str) -> None:
    """Close a connection, with the reason if it can be said."""
    with contextlib.suppress(OSError), accepted:
        if reason:
            accepted.setblocking(False)
            accepted.send(frames.frame(frames.SETTINGS, 0, 0) + frames.goaway(0, frames.ENHANCE_YOUR_CALM, reason))
