"""The requests that an engine has accepted and not answered: each gets exactly one answer. Used by Loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from batchmaker.engine.request import Outbox, Ticket
from batchmaker.errors import BatchmakerError
from batchmaker.scheduler.events import RequestId


@final
class Unanswered:
    """Accepted requests by number. The thread that takes a request out of here answers it.

    That is the engine's thread, or another one while the engine's thread hangs. Race: if both try, `dict.pop` gives the
    request to one of them, and the other finds nothing.

    on_settled: called in the engine's thread with each ticket and its error, if any. left: called before a request that
    has a place (see Room) is answered, by the thread that answers.
    """

    def __init__(self, on_settled: Callable[[Ticket, BaseException | None], None], left: Callable[[], None]) -> None:
        self._on_settled = on_settled
        self._left = left
        self._tickets: dict[RequestId, Ticket] = {}
        self._outbox = Outbox()
        self._claimed: dict[RequestId, Ticket] = {}  # those that the engine's thread has taken out and not delivered
        self._instead: dict[RequestId, Ticket] = {}  # those that another thread has answered, until they are counted

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Accept a request. Any thread may call this, but only one at a time."""
        self._tickets[ticket.request_id] = ticket

    def tickets(self) -> list[Ticket]:
        """Return the requests, in the order in which they were accepted."""
        return list(self._tickets.values())

    def unsettled(self) -> list[Ticket]:
        """Return the requests that are not counted: those of `tickets`, and those that are claimed or answered."""
        found = self._tickets.copy()  # first: a request moves from here to the others
        found.update(self._claimed)
        found.update(self._instead)
        return list(found.values())

    # --- in the engine's thread --------------------------------------------------------------------------------------

    def claim(self, ticket: Ticket, error: BaseException | None) -> BaseException | None:
        """Take the right to answer; return the error that the caller gets, which may be another one.

        `deliver` follows. If a failure of the engine comes between them, the request is claimed again, with that error.
        """
        request_id = ticket.request_id
        is_ours = request_id in self._claimed
        self._claimed[request_id] = ticket  # before the pop, for a fork by another thread
        if self._tickets.pop(request_id, None) is not None:
            if ticket.has_place:
                self._left()
        elif not is_ours:  # another thread has answered
            del self._claimed[request_id]
            return ticket.error
        return error if ticket.answer is None else ticket.claim(error)

    def deliver(self, ticket: Ticket, result: Any, error: BaseException | None) -> None:
        """Count a request, and give the caller what `claim` has said, unless another thread has answered."""
        self._on_settled(ticket, error)  # before the delivery: the caller may read the counts at once
        if ticket.request_id in self._claimed:
            self._outbox.deliver(ticket, result, error)
            del self._claimed[ticket.request_id]
        self._instead.pop(ticket.request_id, None)

    def flush(self) -> None:
        """Wake the callers whose answers were collected for the end of a turn."""
        self._outbox.flush()

    # --- in another thread, while the engine's thread hangs ----------------------------------------------------------

    def answer_instead(self, tickets: Iterable[Ticket], failure: Callable[[Ticket], BatchmakerError]) -> None:
        """Answer in place of the engine's thread, which counts the requests and clears their state when it goes on."""
        outbox = Outbox()
        for ticket in tickets:
            ticket.error = error = failure(ticket)  # before the pop; the engine's thread reads it after
            self._instead[ticket.request_id] = ticket
            if self._tickets.pop(ticket.request_id, None) is None:  # the engine's thread was faster, and has counted it
                del self._instead[ticket.request_id]
                continue
            if ticket.has_place:
                self._left()
            outbox.deliver(ticket, None, ticket.claim(error))
        outbox.flush()

    # --- in a forked process -----------------------------------------------------------------------------------------

    def abandon(self, error: BatchmakerError) -> None:
        """Give every request this error. Nobody waits, because no other thread exists: so nobody is called or woken."""
        for ticket in [*self._tickets.values(), *self._claimed.values(), *self._instead.values()]:
            if ticket.answer is not None:
                ticket.answer.abandon(error)
        self._tickets = {}
        self._outbox = Outbox()
