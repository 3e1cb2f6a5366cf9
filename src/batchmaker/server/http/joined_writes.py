"""Joins consecutive writes to one connection: the head of an answer leaves with its body."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, final

_FLUSH_BYTES: Final = 65_536
"""Larger amounts are not held back, so the transport can notice a slow client."""


@final
class JoinedWrites:
    """A transport that joins the writes of one turn of the event loop into one; a complete answer leaves at once.

    Two small writes would be two packets, and the second may wait for the acknowledgement of the first. most_parts: so
    many are not held back for more, so that the reader has work while the rest of a long turn is done.
    """

    __slots__ = ("_loop", "_parts", "_size", "_transport", "most_parts")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0
        self.most_parts = math.inf

    def write(self, data: bytes) -> None:
        """Write at the end of this turn, or now if much or many are waiting."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > _FLUSH_BYTES or len(self._parts) >= self.most_parts:
            self._flush()

    def send_now(self) -> None:
        """Write the waiting data: an answer is complete, and need not wait for the others of this turn."""
        self._flush()

    def plain(self) -> asyncio.Transport:
        """Write the waiting data and return the transport itself."""
        self._flush()
        return self._transport

    def close(self) -> None:
        """Write the waiting data and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            self._transport.writelines(self._parts)
        self._parts = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
