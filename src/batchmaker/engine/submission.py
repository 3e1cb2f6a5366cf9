"""How requests get their tickets and are handed to an engine: one by one, all of one event loop turn, or many.

Also the limit of unanswered requests (`max_queue`). Used by Engine and Sequence.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from asyncio.events import _get_running_loop
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol, cast, final

from batchmaker.clock import Clock
from batchmaker.core.events import RequestId
from batchmaker.engine import forks
from batchmaker.engine.answer import Answer, Handover, Values, waits_for_itself
from batchmaker.engine.catalogue import CatalogueEntry
from batchmaker.engine.request import Answers, Bulk, Ticket
from batchmaker.errors import QueueFullError

_SENT_TOGETHER: Final = 256
"""The most requests that `map` sends at once."""


@contextmanager
def _counted(total: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a progress bar of answered requests. Gives a function to call with the number of new answers."""
    if not shown:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # only here

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        yield partial(bar.advance, bar.add_task("requests", total=total))


@final
class Room:
    """Places for requests that are accepted and not answered. waits: whether a caller waits if no place is free.

    Callers take places. The thread that answers gives a place back before the caller gets the answer. So a caller that
    then submits its next request finds the place free. One lock protects the count.
    """

    __slots__ = ("__weakref__", "_freed", "_most", "_num_free", "waits")

    def __init__(self, most: int, *, waits: bool) -> None:
        self._most = most
        self._num_free = most
        self._freed = threading.Condition()
        self.waits = waits
        forks.register(self)

    def after_fork(self) -> None:
        """See forks. Those who wait are threads of the parent."""
        self._freed = threading.Condition()

    def take(self, wanted: int) -> int:
        """Take as many places as are free, up to `wanted`. Returns how many; never blocks."""
        with self._freed:
            count = min(wanted, self._num_free)
            self._num_free -= count
            return count

    def take_later(self, wanted: int) -> int:
        """As `take`, but block until there is at least one place.

        This ends also if the engine stops: then it answers every request, which frees places. The caller gets
        StoppedError when it sends its requests.
        """
        with self._freed:
            while not self._num_free:  # a loop: another caller may take the place before this one wakes
                self._freed.wait()
            count = min(wanted, self._num_free)
            self._num_free -= count
            if self._num_free:
                self._freed.notify()
            return count

    def leave(self, count: int = 1) -> None:
        """Give places back. Any thread may call this."""
        with self._freed:
            self._num_free += count
            self._freed.notify()

    def full(self) -> QueueFullError:
        """Return the error for a caller that finds no place."""
        to_do = "wait for one of them (result(), await), submit fewer at a time, or raise Engine(max_queue=...)"
        if self.waits:
            to_do = (
                "when_full='wait' blocks a thread, which must not be that of an event loop, nor the engine's own. In "
                "asyncio, bound your tasks with an asyncio.Semaphore, or submit with asyncio.to_thread"
            )
        return QueueFullError(
            f"{self._most} requests are accepted and not answered, the most that this engine takes; {to_do}"
        )


@final
class Tickets:
    """Makes tickets. Any thread may call it.

    served: the model that the requests are for. deadline_ms: from now; None for the model's, math.inf for none. Raises
    OptionError if it is not a number. priority: from `checked_priority`. A ticket holds its request, not a copy.
    """

    __slots__ = ("_ids", "clock")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._ids = cast(Iterator[RequestId], itertools.count())

    def one(
        self, served: CatalogueEntry, request: Any, deadline_ms: float | None, priority: int, now_s: float | None = None
    ) -> Ticket:
        """Return the ticket of a request. now_s: if the clock was read just now, what it said."""
        now_s = self.clock.now_s() if now_s is None else now_s
        has_deadline = deadline_ms is not None or served.deadline_ms is not None
        due_s = served.due_s(now_s, deadline_ms) if has_deadline else None
        return Ticket(
            next(self._ids), request, now_s, due_s, model=served.model, model_id=served.model_id, priority=priority
        )

    def many(
        self, served: CatalogueEntry, requests: Iterable[Any], deadline_ms: float | None, priority: int
    ) -> list[Ticket]:
        """Return the tickets of requests that come together."""
        now_s = self.clock.now_s()
        due_s = served.due_s(now_s, deadline_ms)
        return [
            Ticket(number, request, now_s, due_s, model=served.model, model_id=served.model_id, priority=priority)
            for request, number in zip(requests, self._ids, strict=False)
        ]

    def bulks(self, served: CatalogueEntry, requests: Sequence[Any], priority: int, most: int) -> list[Ticket]:
        """Return bulk tickets for requests that come together and have no deadline. most: requests of a ticket."""
        now_s, tickets = self.clock.now_s(), list[Ticket]()
        for first in range(0, len(requests), most):
            mine = requests[first : first + most]
            number, *ids = islice(self._ids, len(mine) + 1)
            ticket = Ticket(number, mine, now_s, None, model=served.model, model_id=served.model_id, priority=priority)
            ticket.bulk, ticket.num_requests, ticket.work = Bulk(ticket, mine, ids), len(mine), len(mine)
            tickets.append(ticket)
        return tickets


class Sending(Handover, Protocol):
    """The part of the engine that takes requests; see `batchmaker.engine.worker.Worker`."""

    is_running: bool

    def send(self, item: list[Ticket]) -> None:
        """Accept requests that come together."""
        ...

    def hold(self, tickets: list[Ticket]) -> None:
        """Accept requests, and keep them until `release`."""
        ...


@final
class Submitter:
    """Hands tickets to an engine.

    entrance: takes them. start: starts it. room: the limit, None for no limit.

    The requests of one turn of an event loop are handed over together, at the end of the turn. If each were handed over
    alone, each would wake the engine's thread. Then this thread would run small batches, and would compete with the
    event loop for the interpreter.
    """

    __slots__ = ("_entrance", "_releasing", "_room", "_start")

    def __init__(self, entrance: Sending, start: Callable[[], object], room: Room | None) -> None:
        self._entrance = entrance
        self._start = start
        self._room = room
        self._releasing: asyncio.AbstractEventLoop | None = None  # the event loop that scheduled the last release

    def submit(self, ticket: Ticket, *, stream: bool) -> Answer:
        """Submit a request and return its answer. stream: the values are wanted as they come.

        Raises QueueFullError if there is no room, StoppedError if the engine has stopped.
        """
        values = Values() if stream else None
        ticket.answer = answer = Answer(ticket.request_id, self._entrance, values)
        if values is not None:
            ticket.on_value = values.put
        self._submit([ticket])
        return answer

    def submit_many(self, tickets: list[Ticket]) -> list[Answer]:
        """Submit requests together and return their answers. Raises as `submit` does; then none is accepted.

        If it waits for room, those that have found room may have been accepted.
        """
        answers: list[Answer] = []
        for ticket in tickets:
            ticket.answer = answer = Answer(ticket.request_id, self._entrance)
            answers.append(answer)
        while tickets:
            tickets = self._submit(tickets)
        return answers

    def send(self, tickets: list[Ticket]) -> None:
        """Submit requests together, now, whose answers go to `Ticket.answers`. Raises as `submit` does; then none is.

        Unlike the others it does not wait for the end of an event loop's turn: its caller has gathered them.
        """
        if self._room is not None and (num_places := self._room.take(len(tickets))) < len(tickets):
            self._room.leave(num_places)
            raise self._room.full()
        self._send(tickets)

    def _send(self, tickets: list[Ticket]) -> None:
        """Send requests that have room."""
        try:
            for ticket in tickets:
                ticket.num_places = ticket.num_requests if self._room is not None else 0
            if not self._entrance.is_running:
                self._start()
            self._entrance.send(tickets)
        except BaseException:
            if self._room is not None:
                self._room.leave(sum([ticket.num_requests for ticket in tickets]))
            raise

    def _submit(self, tickets: list[Ticket]) -> list[Ticket]:
        """Submit as many of these requests as have room, at least one. Return the others."""
        running = _get_running_loop()
        others: list[Ticket] = []
        if self._room is not None:
            count = self._places(self._room, len(tickets), in_event_loop=running is not None)
            tickets, others = tickets[:count], tickets[count:]
            for ticket in tickets:
                ticket.num_places = 1
        try:
            if not self._entrance.is_running:
                self._start()
            if running is None:
                self._entrance.send(tickets)
                return others
            self._entrance.hold(tickets)
        except BaseException:  # the engine has stopped or could not start: it has no request
            if self._room is not None:
                self._room.leave(len(tickets))
            raise
        # Race: several event loops may submit here, each in its own thread. Only a loop's own thread sets `_releasing`
        # to this loop, and it then schedules a release. So a thread that reads its own loop here has a release ahead.
        # Another loop may overwrite `_releasing`, or clear it when it releases. Then this loop schedules a second
        # release, which finds less to do.
        if self._releasing is not running:
            self._releasing = running
            running.call_soon(self._release_all)
        return others

    def _release_all(self) -> None:
        self._releasing = None  # before the release: requests after this line schedule a release of their own
        self._entrance.release()

    def _places(self, room: Room, wanted: int, *, in_event_loop: bool) -> int:
        """Take places for requests: for all, or for some if this caller may wait for the others."""
        num_places = room.take(wanted)
        if num_places == wanted:
            return num_places
        if not room.waits or in_event_loop or self._entrance.is_own_thread:
            if num_places:
                room.leave(num_places)
            raise room.full()
        if num_places:
            return num_places
        self._entrance.release()  # held requests have places, and are answered only after this
        return room.take_later(wanted)

    def map(
        self,
        requests: Sequence[Any],
        make: Callable[[Sequence[Any]], list[Ticket]],
        *,
        max_in_flight: int,
        progress: bool,
    ) -> list[Any]:
        """Return the results of many requests in order; see Engine.map. make: gives requests their tickets."""
        if self._entrance.is_own_thread:
            raise waits_for_itself()
        results: list[Any] = [None] * len(requests)
        errors: list[BaseException] = []
        answers, num_sent, num_answered = Answers(), 0, 0
        with _counted(len(requests), shown=progress) as count:
            while num_answered < len(requests):
                wanted = min(len(requests) - num_sent, max_in_flight - (num_sent - num_answered), _SENT_TOGETHER)
                num_places = self._take_places(wanted, can_wait=num_sent == num_answered)
                if num_places:
                    self._send_together(make, requests[num_sent : num_sent + num_places], answers, num_sent)
                    num_sent += num_places
                    continue
                block = answers.take()
                num_here = 0
                for ticket, result, error in block:
                    if ticket.bulk is None:
                        results[ticket.place] = result
                    else:
                        results[ticket.place : ticket.place + ticket.num_requests] = ticket.bulk.results
                        errors += [one for _, one in sorted(ticket.bulk.errors.items())]
                        if error is None:  # otherwise the engine's thread may have something to do with it still
                            ticket.bulk = None  # so that no cycle keeps the results
                    if error is not None:
                        errors.append(error)
                    num_here += ticket.num_requests
                num_answered += num_here
                count(num_here)
        if errors:
            raise errors[0]
        return results

    def _take_places(self, wanted: int, *, can_wait: bool) -> int:
        """Return how many requests may be sent now, at most `wanted`; 0 if the caller must wait for answers first.

        can_wait: nothing of this caller is in flight, so no answer will come to make room. Then wait for a place here.
        """
        if self._room is None or wanted <= 0:
            return max(0, wanted)
        num_places = self._room.take(wanted)
        if num_places or not can_wait:
            return num_places
        if self._entrance.is_own_thread:
            raise self._room.full()
        self._entrance.release()
        return self._room.take_later(wanted)

    def _send_together(
        self, make: Callable[[Sequence[Any]], list[Ticket]], requests: Sequence[Any], answers: Answers, first: int
    ) -> None:
        """Send requests that have room. first: the number of the first one among all requests of this `map`."""
        try:
            tickets = make(requests)
        except BaseException:
            if self._room is not None:
                self._room.leave(len(requests))
            raise
        for ticket in tickets:
            ticket.answers, ticket.place = answers, first
            first += ticket.num_requests
        self._send(tickets)
