"""Reads clients' data within limits, and notices clients that have gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final, TypeVar, final

from starlette.requests import Request
from starlette.types import Scope

from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.limits import Limits
from batchmaker.server.pieces import PieceQueue

DEPARTURE: Final = "batchmaker.departure"
"""Extension of ASGI, in a call's scope: the Departure of its client."""

WHOLE: Final = "batchmaker.whole"
"""Extension of ASGI: whether the whole body has arrived, so that reading it needs no time limit."""

_CONNECTIONS: Final = itertools.count()
_Result = TypeVar("_Result")


@final
class BodyBudget:
    """The bytes of all bodies in memory, and the pieces in which they are read."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held = 0
        self.pieces = PieceQueue()

    @contextmanager
    def holding(self) -> Iterator[HeldBytes]:
        """Count the bytes that are read in the block as held until its end."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            held.release()

    @property
    def limits(self) -> Limits:
        return self._limits


@final
class HeldBytes:
    """One request's share of the budget."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0

    async def read(self, request: Request) -> bytes:
        """Return the whole body. Raises ServiceError if it is too large, too slow or encoded, or the client leaves."""
        for name, value in request.scope["headers"]:
            if name == b"content-encoding" and value != b"identity":
                encoding = value[:32].decode("latin-1")
                raise ServiceError(
                    FaultKind.ENCODING, f"Content-Encoding {encoding!r} is not supported; send it as it is"
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
                raise _gone()
            part: bytes = message["body"]
            self.add(len(part))
            parts.append(part)
            if not message["more_body"]:
                return part if len(parts) == 1 else b"".join(parts)

    def add(self, count: int) -> None:
        """Count arrived bytes. Raises ServiceError if they are too many for one request, or for all together."""
        self.size += count
        self._budget.held += count
        self._check(self.size)
        if self._budget.held > self._budget.limits.max_total_body_bytes:
            raise ServiceError(
                FaultKind.UNAVAILABLE, "the server holds as many bytes of requests as it may; try again", 1.0
            )

    def fits(self, count: int) -> bool:
        """Whether so many bytes may be added now, as far as all together are concerned."""
        return self._budget.held + count <= self._budget.limits.max_total_body_bytes

    def release(self) -> None:
        """Give the share back, once."""
        self._budget.held -= self.size
        self.size = 0

    def _check(self, size: int) -> None:
        limit = self._budget.limits.max_body_bytes
        if size > limit:
            raise ServiceError(FaultKind.TOO_LARGE, f"the body has {size} bytes or more; at most {limit} are taken")


def _gone() -> ServiceError:
    return ServiceError(FaultKind.CANCELLED, "the client has gone")


@final
class Departure:
    """Whether the client of a connection has gone, and the task to cancel then.

    A connection has one call at a time. connection: its number, which no other one of this process has. resume: lets
    the connection read; otherwise it would not notice.
    """

    __slots__ = ("_gone", "_resume", "_task", "connection")

    def __init__(self, resume: Callable[[], None]) -> None:
        self.connection = next(_CONNECTIONS)
        self._resume = resume
        self._gone = False
        self._task: asyncio.Task[object] | None = None

    @property
    def has_happened(self) -> bool:
        """Whether the client has gone."""
        return self._gone

    def happened(self) -> None:
        """The client has gone: cancel the work for it."""
        self._gone = True
        if self._task is not None:
            self._task.cancel()

    async def ends(self, work: Awaitable[_Result]) -> _Result:
        """Return the result of `work`; see `unless_gone`."""
        task = self._task = asyncio.current_task()
        if task is None:
            raise RuntimeError("calls are answered in tasks")
        if self._gone:
            task.cancel()
        self._resume()
        try:
            return await work
        except asyncio.CancelledError:
            if not self._gone:
                raise
            task.uncancel()
            raise _gone() from None
        finally:
            self._task = None


async def unless_gone(scope: Scope, work: Awaitable[_Result]) -> _Result:
    """Return the result of `work`. If the client leaves first, the work is cancelled and CANCELLED is raised.

    Call it once the body has been read.
    """
    departure: Departure = scope["extensions"][DEPARTURE]
    return await departure.ends(work)
