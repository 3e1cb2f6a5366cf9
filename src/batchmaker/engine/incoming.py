"""What is sent to the engine's thread: requests that have not begun, and functions to call. Used by Worker."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final, final

from batchmaker.core.events import RequestId
from batchmaker.engine.request import SequenceEntry, Ticket, apart
from batchmaker.policies.ageing import AGED_EVERY
from batchmaker.policies.line import WaitingLine

FEWEST_ARRIVALS: Final = 64
MOST_ARRIVALS: Final = 256
SOON_S: Final = 20e-3
"""How many requests are taken before the loop looks at finished work again: as many as take about SOON_S seconds, and a
number between the other two. More requests together make larger batches, and cost less each. But requests in flight
wait meanwhile. If none is, all come together that begin together (see `CellPolicy.begins_together`)."""

BESIDE_S: Final = 1e-3
"""While live streams are served, so many other requests begin together that a turn takes about so long: their frames
wait meanwhile, too."""

MOST_MORE: Final = 1024
"""Entries of the inbox that are taken beside those that were there at first."""

Item = list[Ticket] | Callable[[], None]
"""An entry of the inbox: requests that came together, or a function to call."""


@final
class Incoming:
    """An inbox for all threads, and a backlog of requests, which belongs to the engine's thread.

    aged_every: see WaitingLine. inbox: requests that come together, and functions to call; not taken yet. held: kept
    until the next `put_held`. num_waiting, num_chunks: requests in the backlog, and chunks of sequences among them.
    urgent: others that begin at once. next_begin_s: engine time before which no others begin while the engine's thread
    has tasks: these wait while requests begin, so afterwards they compute for as long. bulks_came: whether a bulk
    ticket has ever come.

    Any thread may put into the inbox. `held`, `put_held` and `start_over` need the lock under which callers send.
    Everything else is for the engine's thread.
    """

    def __init__(self, aged_every: int | None = AGED_EVERY) -> None:
        self._aged_every = aged_every
        self.inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.held: list[Ticket] = []
        self.num_waiting = 0
        self._backlog: WaitingLine[Ticket] = WaitingLine(aged_every)
        self._most_arrivals = FEWEST_ARRIVALS
        self.next_begin_s = 0.0
        self._most_beside = 8  # how many others begin together with chunks of live streams
        self.urgent: dict[RequestId, None] = {}  # of the backlog, but for chunks
        self.num_chunks = 0  # of sequences, in the backlog
        self._num_bulks = 0  # bulk tickets, in the backlog
        self.bulks_came = False

    # --- for those who send --------------------------------------------------------------------------------------

    def put_held(self) -> None:
        """Send all requests that are held, together."""
        held, self.held = self.held, []
        if held:
            self.inbox.put(held)

    # --- in the engine's thread ----------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been sent that was not taken."""
        return not self.num_waiting and self.inbox.empty()

    def wait(self, patience_s: float | None) -> Item | None:
        """Return the next entry of the inbox, for `take`; None if there is none within so many seconds."""
        with suppress(queue.Empty):
            return self.inbox.get(timeout=patience_s)
        return None

    def take(self, item: Item | None = None) -> None:
        """Take `item` and all that are in the inbox now: put requests into the backlog, call what is to be called.

        What they put there is taken as well; but no more than MOST_MORE that come meanwhile: it ends, whoever sends.
        """
        tickets, left = list[Ticket](), self.inbox.qsize() + MOST_MORE
        while left and (item is not None or not self.inbox.empty()):  # nobody else takes items out
            left -= 1
            item = self.inbox.get_nowait() if item is None else item
            if isinstance(item, list):
                tickets += item
            else:
                if tickets:
                    self._accept(tickets)  # a function may be about a request that came before it
                    tickets = []
                item()
            item = None
        if tickets:
            self._accept(tickets)

    @property
    def are_many(self) -> bool:
        """Whether there are so many in the backlog that they begin although the workers have enough work: requests that
        are taken together cost less each."""
        return self.num_waiting >= self._most_arrivals

    def first(
        self, limit: int | None = None, *, together: int = 0, among: list[RequestId] | None = None
    ) -> list[Ticket]:
        """Take the first `limit` requests out of the backlog; by default, `_most_arrivals`, or `together` if these are
        more. among: these alone, all of them."""
        if among is None:
            most = max(self._most_arrivals, together) if limit is None else limit
            tickets = self._take_bulks(most) if self._num_bulks else self._backlog.take(most)
        else:
            tickets = self._backlog.begin(among)
        for ticket in tickets:
            self.num_waiting -= ticket.num_requests
            self._num_bulks -= ticket.bulk is not None
        if self.urgent:
            for ticket in tickets:
                self.urgent.pop(ticket.request_id, None)
        if self.num_chunks:
            self.num_chunks -= sum([ticket.chunk is not None for ticket in tickets])
        return tickets

    def _take_bulks(self, limit: int) -> list[Ticket]:
        """Take tickets of so many requests out of the backlog; the last may be of more."""
        tickets, count = list[Ticket](), 0
        while count < limit and (one := self._backlog.take(1)):
            tickets += one
            count += one[0].num_requests
        return tickets

    def separate_bulks(self) -> None:
        """Give each waiting request of a bulk a ticket of its own, so that it can begin without the others."""
        if not self._num_bulks:
            return
        waiting, self._num_bulks, self.num_waiting = self._backlog.take(len(self._backlog)), 0, 0
        self._backlog = WaitingLine(self._aged_every)
        self.num_chunks = 0
        self.urgent.clear()
        self._accept(apart(waiting))

    def first_beside(self, *, wanted: bool) -> list[Ticket]:
        """Take chunks, as many as may begin together at all, and a few others: urgent ones alone if none is wanted."""
        num_chunks = min(self.num_chunks, MOST_ARRIVALS)
        if wanted:
            return self.first(num_chunks + self._most_beside)
        tickets = self.first(num_chunks)
        if self.urgent:
            tickets += self.first(among=list(islice(self.urgent, self._most_beside)))
        return tickets

    def began(self, tickets: list[Ticket], began_s: float, ended_s: float) -> None:
        """Choose how many requests may begin together next, and when, by the time that the last ones took."""
        count, took_s = 0, ended_s - began_s
        self.next_begin_s = ended_s + min(took_s, SOON_S)
        for ticket in tickets:
            count += ticket.num_requests
        if count >= self._most_arrivals or (count >= FEWEST_ARRIVALS and took_s > SOON_S):
            fit = count * SOON_S / max(took_s, 1e-9)
            self._most_arrivals = int(min(max(fit, FEWEST_ARRIVALS), MOST_ARRIVALS))

    def began_beside(self, tickets: list[Ticket], began_s: float, ended_s: float) -> None:
        """Choose how many others may begin together with chunks next, by the time that the last turn took."""
        took_s = ended_s - began_s
        if took_s > 2 * BESIDE_S:
            self._most_beside = max(1, self._most_beside // 2)
        elif took_s < BESIDE_S and any(ticket.chunk is None for ticket in tickets):
            self._most_beside = min(FEWEST_ARRIVALS, self._most_beside + 1)

    def leave(self, request_id: RequestId) -> Ticket | None:
        """Take one request out of the backlog; None if it is not there."""
        if request_id not in self._backlog:
            return None
        ticket = self._backlog.leave(request_id)
        self.num_waiting -= ticket.num_requests
        self._num_bulks -= ticket.bulk is not None
        self.urgent.pop(request_id, None)
        self.num_chunks -= ticket.chunk is not None
        return ticket

    @property
    def num_tickets(self) -> int:
        """How many tickets are in the backlog."""
        return len(self._backlog)

    def spare(self, most: int) -> list[Ticket]:
        """Take half of the tickets out of the backlog that another worker may run, those that came last; `most` at
        most."""
        spared = [ticket for ticket in reversed(self._backlog) if ticket.worker is None]
        spared = spared[: min(most, (len(spared) + 1) // 2)]
        for ticket in spared:
            self.leave(ticket.request_id)
        return spared

    def start_over(self) -> set[RequestId]:
        """Put all requests that were sent into a new backlog, whatever became of the old one. Return their numbers.

        Those that are held are among them. Functions stay in the inbox.
        """
        tickets, calls = self._backlog.take(len(self._backlog)), list[Callable[[], None]]()
        tickets = [ticket for ticket in tickets if ticket.member_of is None]  # others of their bulks have begun
        self._backlog = WaitingLine(self._aged_every)
        self.num_chunks = self._num_bulks = self.num_waiting = 0
        self.urgent.clear()
        self._accept(tickets)
        while not self.inbox.empty():
            item = self.inbox.get_nowait()
            if isinstance(item, list):
                self._accept(item)
                tickets += item
            else:
                calls.append(item)
        for call in calls:  # still after the requests that they are about
            self.inbox.put(call)
        return {ticket.request_id for ticket in (*tickets, *self.held)}

    def _accept(self, tickets: list[Ticket]) -> None:
        self._backlog.join_all([(ticket.request_id, ticket, ticket.precedence) for ticket in tickets])
        for ticket in tickets:
            self.num_waiting += ticket.num_requests
            if ticket.bulk is not None:
                self._num_bulks += 1
                self.bulks_came = True
            elif ticket.chunk is not None:
                self.num_chunks += 1
            if ticket.is_urgent and ticket.chunk is None:
                self.urgent[ticket.request_id] = None
        if self.num_chunks:
            SequenceEntry.accept(tickets)
