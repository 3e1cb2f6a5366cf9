"""Sockets that listen, for the server and for the front of a fleet."""

from __future__ import annotations

import socket
from typing import Final

from batchmaker.errors import OptionError
from batchmaker.server.config import Config

LAST_WRITES_S: Final = 5
"""Seconds for answers that are being written when a server ends."""

LAST_ANSWERS_S: Final = 1.0
"""Seconds for the answers to what was read of conversations that are ended."""

LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


def bind(config: Config, port: int, option: str = "--port") -> socket.socket:
    """Return a socket bound to the server's address, not listening yet. OptionError if it is not available.

    option: what names the port.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # clients inherit both: one that has vanished
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # silently, or reads nothing, is noticed
            milliseconds = int(1e3 * config.limits.write_seconds)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        listener.bind((config.host, port))
    except OSError as error:
        listener.close()
        raise OptionError(
            f"{config.host}:{port} cannot be used ({error.strerror or error}). Give another {option} or --host; "
            "port 0 takes any that is free."
        ) from None
    return listener


def address_of(config: Config, listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.tls.cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
