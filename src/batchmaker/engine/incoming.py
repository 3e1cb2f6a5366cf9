"""What is sent to the engine's thread: requests that have not begun, and functions to call. Used by Loop."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

from batchmaker.engine.request import Ticket
from batchmaker.policies.ageing import AGED_EVERY
from batchmaker.policies.line import WaitingLine
from batchmaker.scheduler.events import RequestId

FEWEST_ARRIVALS: Final = 64
MOST_ARRIVALS: Final = 256
SOON_S: Final = 20e-3
"""How many requests are taken before the loop looks at finished work again: as many as take about SOON_S seconds, and a
number between the other two. More requests together make larger batches, and cost less each. But requests in flight
wait meanwhile."""

Item = list[Ticket] | Callable[[], None]
"""An entry of the inbox: requests that came together, or a function to call."""


@final
class Incoming:
    """An inbox for all threads, and a backlog of requests, which belongs to the engine's thread.

    aged_every: see WaitingLine. Any thread may call `put`. `hold`, `put_held` and `start_over` need the lock under
    which callers send. Everything else is for the engine's thread.
    """

    def __init__(self, aged_every: int | None = AGED_EVERY) -> None:
        self._aged_every = aged_every
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._held: list[Ticket] = []
        self._backlog: WaitingLine[Ticket] = WaitingLine(aged_every)
        self._most_arrivals = FEWEST_ARRIVALS
        self._num_urgent = 0  # how many requests of the backlog have a deadline or a priority

    # --- for those who send --------------------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        """Send requests that come together, or a function to call."""
        self._inbox.put(item)

    def hold(self, tickets: list[Ticket]) -> None:
        """Keep requests until the next `put_held`."""
        self._held += tickets

    def put_held(self) -> None:
        """Send all requests that are held, together."""
        if self._held:
            self._inbox.put(self._held)
            self._held = []

    # --- in the engine's thread ----------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been sent that was not taken."""
        return not len(self._backlog) and self._inbox.empty()

    def wait(self, patience_s: float | None) -> Item | None:
        """Return the next entry of the inbox, for `take`; None if there is none within so many seconds."""
        with suppress(queue.Empty):
            return self._inbox.get(timeout=patience_s)
        return None

    def take(self, item: Item | None = None) -> None:
        """Take `item` and all that are in the inbox now: put requests into the backlog, call what is to be called."""
        tickets: list[Ticket] = []
        while item is not None or not self._inbox.empty():  # nobody else takes items out
            item = self._inbox.get_nowait() if item is None else item
            if isinstance(item, list):
                tickets += item
            else:
                self._accept(tickets)  # a function may be about a request that came before it
                tickets = []
                item()
            item = None
        self._accept(tickets)

    def should_begin(self, wanted: Callable[[], bool]) -> bool:
        """Whether to take requests from the backlog now. wanted: whether the workers have too little work.

        If none is urgent and the workers have enough work, the requests stay in the backlog until there are
        `_most_arrivals` of them: requests that are taken together cost less each.
        """
        if not len(self._backlog):
            return False
        return self._num_urgent > 0 or wanted() or len(self._backlog) >= self._most_arrivals

    def first(self) -> list[Ticket]:
        """Take the first requests out of the backlog, as many as may begin together."""
        return self._taken(self._most_arrivals)

    def all(self) -> list[Ticket]:
        """Take all requests out of the backlog."""
        return self._taken(len(self._backlog))

    def began(self, count: int, took_s: float) -> None:
        """Choose how many requests may begin together next, by the time that the last ones took."""
        if count == self._most_arrivals or (count >= FEWEST_ARRIVALS and took_s > SOON_S):
            fit = count * SOON_S / max(took_s, 1e-9)
            self._most_arrivals = int(min(max(fit, FEWEST_ARRIVALS), MOST_ARRIVALS))

    def leave(self, request_id: RequestId) -> Ticket | None:
        """Take one request out of the backlog; None if it is not there."""
        if request_id not in self._backlog:
            return None
        ticket = self._backlog.leave(request_id)
        self._num_urgent -= ticket.is_urgent
        return ticket

    def start_over(self) -> set[RequestId]:
        """Put all requests that were sent into a new backlog, whatever became of the old one. Return their numbers.

        Those that are held are among them. Functions stay in the inbox.
        """
        tickets, calls = self._backlog.take(len(self._backlog)), list[Callable[[], None]]()
        self._backlog, self._num_urgent = WaitingLine(self._aged_every), 0
        self._join(tickets)
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, list):
                self._accept(item)
                tickets += item
            else:
                calls.append(item)
        for call in calls:  # still after the requests that they are about
            self._inbox.put(call)
        return {ticket.request_id for ticket in (*tickets, *self._held)}

    def _taken(self, limit: int) -> list[Ticket]:
        tickets = self._backlog.take(limit)
        self._num_urgent -= sum([ticket.is_urgent for ticket in tickets])
        return tickets

    def _accept(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.chunk is not None:
                ticket.chunk.sequence.accept(ticket, ticket.chunk)
        self._join(tickets)

    def _join(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._backlog.join(ticket.request_id, ticket, ticket.priority)
        self._num_urgent += sum([ticket.is_urgent for ticket in tickets])
