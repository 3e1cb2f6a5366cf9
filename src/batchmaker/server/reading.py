"""Reading what a client sends, within limits, and noticing that it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar, final

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from batchmaker.server.faults import FaultKind, ServiceError, invalid
from batchmaker.server.limits import Limits

_Result = TypeVar("_Result")


@final
class BodyBudget:
    """The bytes of all bodies that are held at once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held = 0

    @contextmanager
    def holding(self) -> Iterator[HeldBytes]:
        """Count what is read in the block as held until its end."""
        held = HeldBytes(self)
        try:
            yield held
        finally:
            self.held -= held.size

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
        limits = self._budget.limits
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ServiceError(
                FaultKind.ENCODING, f"Content-Encoding {encoding[:32]!r} is not supported; send it as it is"
            )
        length = request.headers.get("content-length", "0")
        if not length.isdigit():
            raise invalid("Content-Length is not a number")
        self._check(int(length))
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(limits.body_seconds):
                async for chunk in request.stream():
                    self.add(len(chunk))
                    chunks.append(chunk)
        except TimeoutError:
            raise ServiceError(
                FaultKind.TOO_SLOW, f"the body did not arrive within {limits.body_seconds:g} seconds; send it faster"
            ) from None
        except ClientDisconnect:
            raise _gone() from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def add(self, count: int) -> None:
        """Count bytes that have arrived. Raises ServiceError if it is too much for one request, or with all others."""
        self.size += count
        self._budget.held += count
        self._check(self.size)
        if self._budget.held > self._budget.limits.max_total_body_bytes:
            raise ServiceError(
                FaultKind.UNAVAILABLE, "the server holds as many bytes of requests as it may; try again", 1.0
            )

    def _check(self, size: int) -> None:
        limit = self._budget.limits.max_body_bytes
        if size > limit:
            raise ServiceError(FaultKind.TOO_LARGE, f"the body has {size} bytes or more; at most {limit} are taken")


def _gone() -> ServiceError:
    return ServiceError(FaultKind.CANCELLED, "the client has gone")


async def unless_gone(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """Return what `work` does. If the client leaves first, the work is cancelled and CANCELLED is raised.

    Call it once the body has been read.
    """
    task = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if task is not None:
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone or task is None:
            raise
        task.uncancel()
        raise _gone() from None
    finally:
        watcher.cancel()
