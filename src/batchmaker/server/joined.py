"""Writes to one connection that follow each other at once leave together: an answer's head with its body."""

from __future__ import annotations

import asyncio
from typing import Any, Final, final

_FLUSH_BYTES: Final = 65_536
"""More than this is not kept back, so that the transport can say when the client does not keep up."""


@final
class JoinedWrites:
    """A transport that hands on what is written in one turn of the event loop as one write; otherwise the transport.

    Two small writes would be two packets, and the second may wait for the first to be acknowledged.
    """

    __slots__ = ("_loop", "_parts", "_size", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Write at the end of this turn, or now if much is waiting."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > _FLUSH_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what waits and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            self._transport.writelines(self._parts)
        self._parts = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
