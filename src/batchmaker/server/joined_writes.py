"""Joins consecutive writes to one connection: the head of an answer leaves with its body."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final, final

_FLUSH_BYTES: Final = 65_536
"""Larger amounts are not held back, so the transport can notice a slow client."""


@final
class JoinedWrites:
    """A transport that joins the writes of one turn of the event loop into one.

    Two small writes would be two packets, and the second may wait for the acknowledgement of the first.
    """

    __slots__ = ("_file", "_handed_on", "_loop", "_parts", "_size", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._handed_on = False  # in this turn: uvloop has it, and does not count it yet
        self._file: int | None = None  # of a plain connection
        if (
            transport.get_extra_info("sslcontext") is None
            and (socket := transport.get_extra_info("socket")) is not None
        ):
            self._file = socket.fileno()
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

    def send_now(self) -> None:
        """Send what waits: an answer is complete.

        uvloop sends all at the end of its turn. Whoever waits for the first of many answers would wait for all of them.
        """
        transport = self._transport
        if self._file is None or self._handed_on or not self._parts or transport.is_closing():
            return
        if transport.get_write_buffer_size():
            return
        data = b"".join(self._parts)
        self._parts = []
        self._size = 0
        try:
            sent = os.write(self._file, data)
        except OSError:  # it is full, or broken, which the transport finds out as ever
            sent = 0
        if sent < len(data):
            self._hand_on([data[sent:]])

    def close(self) -> None:
        """Write the waiting data and close."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._parts and not self._transport.is_closing():
            self._hand_on(self._parts)
        self._parts = []
        self._size = 0

    def _hand_on(self, parts: list[bytes]) -> None:
        self._transport.writelines(parts)
        if not self._handed_on:
            self._handed_on = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._handed_on = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
