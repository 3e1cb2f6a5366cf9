"""uvicorn on a bound socket: for the server and for the front of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Final, final

import uvicorn
from starlette.types import ASGIApp

from batchmaker.errors import OptionError
from batchmaker.server.config import Config
from batchmaker.server.listening import LAST_WRITES_S

_KEEP_ALIVE_S: Final = 75


def http_listener(config: Config, app: ASGIApp, protocol: type[asyncio.Protocol]) -> HttpListener:
    """Return uvicorn with the server's settings, for a bound socket. OptionError for a certificate without use."""
    settings = uvicorn.Config(
        app,
        http=protocol,
        ws="none",  # see LimitedProtocol
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WRITES_S,
        ssl_certfile=config.tls.cert,
        ssl_keyfile=config.tls.key,
    )
    try:
        settings.load()
    except OSError as error:
        raise OptionError(f"the TLS certificate or key cannot be used: {error}") from None
    return HttpListener(settings)


@final
class HttpListener(uvicorn.Server):
    """uvicorn without its signal handlers, and with a call when it listens."""

    on_started: Callable[[], None] = staticmethod(lambda: None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()
