"""Reads clients' data within limits: how many bytes each may hold, and all together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, final

from starlette.requests import Request

from batchmaker.server.access.departure import gone
from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.formats.pieces import PieceQueue
from batchmaker.server.limits import Limits

WHOLE: Final = "batchmaker.whole"
"""Extension of ASGI: whether the whole body has arrived, so that reading it needs no time limit."""


@final
class BodyBudget:
    """The bytes of all bodies in memory and whose they are, and the pieces in which bodies are read.

    A client is an API key's holder, or an address where there are no keys. It may hold as many bytes as are free beside
    it: alone half of all, beside another greedy one a third, and so on (Choudhury and Hahne, "Dynamic queue length
    thresholds for shared-memory packet switches", 1998). So there is always room for one who comes later. One body may
    always be held if there is room for it.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._of_client: Counter[str] = Counter()
        self.held = 0
        self.pieces = PieceQueue()

    @contextmanager
    def holding(self, client: str) -> Iterator[HeldBytes]:
        """Count the bytes that are read in the block as held by this client until its end."""
        held = HeldBytes(self, client)
        try:
            yield held
        finally:
            held.release()

    def count(self, client: str, change: int) -> None:
        """Count bytes that have come, or, below 0, gone."""
        if change:
            self.held += change
            self._of_client[client] += change
            if not self._of_client[client]:
                del self._of_client[client]

    def held_by(self, client: str) -> int:
        """Return the bytes that a client holds."""
        return self._of_client[client]

    def check(self, client: str, count: int = 0) -> None:
        """Raise UNAVAILABLE if all together, or this client, hold more than they may. count: of bytes more."""
        if self.held + count > self.limits.max_total_body_bytes:
            raise _full("the server holds")
        if not self.fits(client, count):
            raise _full("the server holds for you")

    @property
    def is_scarce(self) -> bool:
        """Whether more than half of what may be held is in use."""
        return self.held > self.limits.max_total_body_bytes // 2

    def fits(self, client: str, count: int) -> bool:
        """Whether a client may hold so many bytes more."""
        free = self.limits.max_total_body_bytes - self.held - count
        return free >= 0 and self._of_client[client] + count <= max(free, self.limits.max_body_bytes)


def _full(who: str) -> ServiceError:
    return ServiceError(FaultKind.UNAVAILABLE, f"{who} as many bytes of requests as it may; try again", 1.0)


@final
class HeldBytes:
    """One request's share of the budget. client: whose it is."""

    __slots__ = ("_budget", "client", "size")

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self.client = client
        self.size = 0

    async def read(self, request: Request) -> bytes:
        """Return the whole body. Raises ServiceError if it is too large, too slow or encoded, or the client leaves."""
        for name, value in request.scope["headers"]:
            if name == b"content-encoding" and value.strip().lower() not in (b"identity", b""):
                encoding = value[:32].decode("latin-1")
                raise ServiceError(
                    FaultKind.ENCODING, f"Content-Encoding {encoding!r} is not supported; send it as it is"
                )
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                coding = value[:32].decode("latin-1")
                raise ServiceError(
                    FaultKind.UNSUPPORTED,
                    f"Transfer-Encoding {coding!r} is not supported; send it as it is, or chunked",
                )
            if name == b"content-length":
                if not value.isdigit():
                    raise invalid("Content-Length is not a number")
                self._check(int(value))
        seconds = self._budget.limits.body_seconds
        try:
            async with nullcontext() if request.scope["extensions"][WHOLE] else asyncio.timeout(seconds):
                return await self._read_parts(request)
        except TimeoutError:
            raise ServiceError(
                FaultKind.TOO_SLOW, f"the body did not arrive within {seconds:g} seconds; send it faster"
            ) from None

    async def _read_parts(self, request: Request) -> bytes:
        parts: list[bytes] = []
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise gone()
            part: bytes = message["body"]
            self.add(len(part))
            parts.append(part)
            if not message["more_body"]:
                return part if len(parts) == 1 else b"".join(parts)

    def add(self, count: int) -> None:
        """Count arrived bytes. Raises ServiceError if they are too many for one request, or for all together."""
        self.resize(self.size + count)
        self._check(self.size)
        self.check_room()

    def check_room(self) -> None:
        """Raise UNAVAILABLE if the client, or all together, hold too much."""
        self._budget.check(self.client)

    def resize(self, size: int) -> None:
        """Have the share be of this size, whether there is room or not."""
        self._budget.count(self.client, size - self.size)
        self.size = size

    def belongs_to(self, client: str) -> None:
        """Have the share be another client's from now on: the caller is known."""
        size = self.size
        self.resize(0)
        self.client = client
        self.resize(size)

    def part(self, size: int) -> HeldBytes:
        """Return a share of its own for `size` of these bytes."""
        share = HeldBytes(self._budget, self.client)
        self.resize(self.size - size)
        share.resize(size)
        return share

    def release(self) -> None:
        """Give the share back. Bytes of it that come later count anew."""
        self.resize(0)

    def _check(self, size: int) -> None:
        limit = self._budget.limits.max_body_bytes
        if size > limit:
            raise ServiceError(FaultKind.TOO_LARGE, f"the body has {size} bytes or more; at most {limit} are taken")
