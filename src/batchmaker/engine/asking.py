"""The three ways in which callers wait for an answer: as a coroutine, as a future, as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, final

from batchmaker.engine.ticket import RequestFuture, Stream, Ticket
from batchmaker.scheduler.events import RequestId


@final
class Asking:
    """Hands tickets to an engine. send: accepts one. cancel: gives one up."""

    __slots__ = ("_cancel", "_send")

    def __init__(self, send: Callable[[Ticket], None], cancel: Callable[[RequestId], None]) -> None:
        self._send = send
        self._cancel = cancel

    async def answer(self, ticket: Ticket) -> Any:
        """Return the result. Cancelling the task that awaits it gives the request up."""
        ticket.loop = asyncio.get_running_loop()
        ticket.future = ticket.loop.create_future()
        self._send(ticket)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._cancel(ticket.request_id)
            raise

    def future(self, ticket: Ticket) -> Future[Any]:
        """Return a concurrent future at once. Cancelling it gives the request up."""
        ticket.future = future = RequestFuture(partial(self._cancel, ticket.request_id))
        self._send(ticket)
        return future

    def stream(self, ticket: Ticket) -> AsyncIterator[Any] | Iterator[Any]:
        """Return the values as they come, for `async for` or `for`. Leaving early gives the request up."""
        stream = Stream(lambda: self._cancel(ticket.request_id))
        future = RequestFuture(partial(self._cancel, ticket.request_id))
        future.add_done_callback(lambda done: stream.end(done.exception()))
        ticket.future = future
        ticket.on_value = stream.put
        self._send(ticket)
        return stream  # type: ignore[return-value]
