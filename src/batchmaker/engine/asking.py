"""The ways in which callers wait for answers: as a coroutine, as a future, as a stream; and for many together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

from batchmaker.engine.ticket import Answers, RequestFuture, Stream, Ticket
from batchmaker.scheduler.events import RequestId

_SENT_TOGETHER: Final = 256
"""Requests that `map` offers in one go."""


@contextmanager
def _counted(total: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show how many of the requests are answered; give what is told of some more."""
    if not shown:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # for this alone

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        yield partial(bar.advance, bar.add_task("requests", total=total))


@final
class Asking:
    """Hands tickets to an engine. send: accepts some. hold: accepts some that wait for `release`. cancel: gives one up.

    The requests of one turn of an event loop are handed over together, at its end: each alone would wake the engine's
    thread, which would run them in small batches, and take turns with the event loop for Python's lock meanwhile.
    """

    __slots__ = ("_cancel", "_hold", "_release", "_releasing", "_send")

    def __init__(
        self,
        send: Callable[[list[Ticket]], None],
        hold: Callable[[list[Ticket]], None],
        release: Callable[[], None],
        cancel: Callable[[RequestId], None],
    ) -> None:
        self._send = send
        self._hold = hold
        self._release = release
        self._cancel = cancel
        self._releasing: asyncio.AbstractEventLoop | None = None  # the last loop that is to release

    async def answer(self, ticket: Ticket) -> Any:
        """Return the result. Cancelling the task that awaits it gives the request up."""
        ticket.loop = loop = asyncio.get_running_loop()
        ticket.future = loop.create_future()
        self._hold([ticket])
        if self._releasing is not loop:
            self._releasing = loop
            loop.call_soon(self._release_all)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._cancel(ticket.request_id)
            raise

    def _release_all(self) -> None:
        self._releasing = None  # first: what comes from now on has its own
        self._release()

    def future(self, ticket: Ticket) -> Future[Any]:
        """Return a concurrent future at once. Cancelling it gives the request up."""
        ticket.future = future = RequestFuture(partial(self._cancel, ticket.request_id))
        self._send([ticket])
        return future

    def stream(self, ticket: Ticket) -> AsyncIterator[Any] | Iterator[Any]:
        """Return the values as they come, for `async for` or `for`. Leaving early gives the request up."""
        stream = Stream(lambda: self._cancel(ticket.request_id))
        future = RequestFuture(partial(self._cancel, ticket.request_id))
        future.add_done_callback(lambda done: stream.end(done.exception()))
        ticket.future = future
        ticket.on_value = stream.put
        self._send([ticket])
        return stream  # type: ignore[return-value]

    def map(
        self,
        requests: Sequence[Any],
        make: Callable[[Sequence[Any]], list[Ticket]],
        *,
        max_in_flight: int,
        progress: bool,
    ) -> list[Any]:
        """Return the results of many requests in order; see Engine.map. make: gives requests their tickets."""
        results: list[Any] = [None] * len(requests)
        errors: list[BaseException] = []
        answers, num_sent, num_answered = Answers(), 0, 0
        with _counted(len(requests), shown=progress) as count:
            while num_answered < len(requests):
                room = max_in_flight - (num_sent - num_answered)
                end = min(len(requests), num_sent + min(room, _SENT_TOGETHER))
                if end > num_sent:
                    tickets = make(requests[num_sent:end])
                    for place, ticket in enumerate(tickets, num_sent):
                        ticket.answers, ticket.place = answers, place
                    self._send(tickets)
                    num_sent = end
                    continue
                block = answers.take()
                for ticket, result, error in block:
                    results[ticket.place] = result
                    if error is not None:
                        errors.append(error)
                num_answered += len(block)
                count(len(block))
        if errors:
            raise errors[0]
        return results
