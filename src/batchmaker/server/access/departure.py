"""Clients that have gone: the work for them is cancelled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, final

from starlette.types import Scope

from batchmaker.server.faults import FaultKind, ServiceError

DEPARTURE: Final = "batchmaker.departure"
"""Extension of ASGI, in a call's scope: the Departure of its client."""

_CONNECTIONS: Final = itertools.count()
_Result = TypeVar("_Result")


def gone() -> ServiceError:
    """Return the fault of a call whose client has gone."""
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
            raise gone() from None
        finally:
            self._task = None


def unless_gone(scope: Scope, work: Awaitable[_Result]) -> Awaitable[_Result]:
    """Await the result of `work`. If the client leaves first, the work is cancelled and CANCELLED is raised.

    Call it once the body has been read.
    """
    departure: Departure = scope["extensions"][DEPARTURE]
    return departure.ends(work)
