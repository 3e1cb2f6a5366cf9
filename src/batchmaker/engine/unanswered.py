"""The requests that an engine has accepted and not answered: each gets exactly one answer. Used by Worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from batchmaker.core.events import RequestId
from batchmaker.engine.request import Outbox, Settled, Ticket
from batchmaker.errors import BatchmakerError, CancelledError


@final
class Unanswered:
    """Accepted requests by number. The thread that takes a request out of here answers it.

    That is the engine's thread, or another one while the engine's thread hangs. Race: if both try, `dict.pop` gives the
    request to one of them, and the other finds nothing.

    on_settled: called in the engine's thread with the requests that are answered together. on_leave: called before
    requests that have places (see Room) are answered, with their number, by the thread that answers.
    """

    def __init__(self, on_settled: Callable[[Sequence[Settled]], None], on_leave: Callable[[int], None]) -> None:
        self._on_settled = on_settled
        self._on_leave = on_leave
        self._tickets: dict[RequestId, Ticket] = {}
        self._outbox = Outbox()
        self._claimed: dict[RequestId, Ticket] = {}  # those that the engine's thread has taken out and not delivered
        self._instead: dict[RequestId, Ticket] = {}  # those that another thread has answered, until they are counted
        # The work that came, and the work that left. Each is written by one thread at a time: by those that send, who
        # have the lock of Worker; by the engine's thread; and by the thread that answers in its place.
        self._came = self._left_here = self._left_instead = 0

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def work(self) -> int:
        """The work of the accepted requests (see Ticket). Any thread may ask."""
        return self._came - self._left_here - self._left_instead

    def add(self, tickets: Iterable[Ticket]) -> float | None:
        """Accept requests. Return the last of their deadlines, if any. Only one thread at a time may call this."""
        last_s: float | None = None
        for ticket in tickets:
            self._tickets[ticket.request_id] = ticket
            self._came += ticket.work
            due_s = ticket.deadline_s
            if due_s is not None and (last_s is None or due_s > last_s):
                last_s = due_s
        return last_s

    def tickets(self) -> list[Ticket]:
        """Return the requests, in the order in which they were accepted."""
        return list(self._tickets.values())

    def unsettled(self) -> list[Ticket]:
        """Return the requests that are not counted: those of `tickets`, and those that are claimed or answered."""
        tickets = self._tickets.copy()  # first: a request moves from here to the others
        tickets.update(self._claimed)
        tickets.update(self._instead)
        return list(tickets.values())

    # --- in the engine's thread --------------------------------------------------------------------------------------

    def claim(self, outcomes: Sequence[Settled], now_s: float) -> list[Settled]:
        """Take the right to answer; return what the callers get, which may be another error than that of `outcomes`.

        It is CancelledError if a caller was faster, and what `on_value` raised where there is no other. `deliver`
        follows. If a failure of the engine comes between them, the requests are claimed again, with that error.
        """
        ours: list[Settled] = []
        others: list[Settled] = []
        num_places = 0
        for outcome in outcomes:
            ticket = outcome[0]
            ticket.finished_s = now_s
            request_id = ticket.request_id
            is_ours = request_id in self._claimed
            self._claimed[request_id] = ticket  # before the pop, for a fork by another thread
            if self._tickets.pop(request_id, None) is not None:
                num_places += ticket.num_places
                self._left_here += ticket.work
            elif not is_ours:  # another thread has answered
                del self._claimed[request_id]
                others.append((ticket, None, ticket.error))
                continue
            ours.append(outcome)
        if num_places:
            self._on_leave(num_places)
        return _claimed(ours) + others

    def hand_over(self, tickets: Iterable[Ticket]) -> list[Ticket]:
        """Accept these requests no longer: another engine's thread answers them. Without those that are answered."""
        ours = [ticket for ticket in tickets if self._tickets.pop(ticket.request_id, None) is not None]
        self._left_here += sum([ticket.work for ticket in ours])
        return ours

    def deliver(self, outcomes: Sequence[Settled]) -> None:
        """Count requests, and give the callers what `claim` has said, unless another thread has answered."""
        self._on_settled(outcomes)  # before the delivery: the callers may read the counts at once
        self._outbox.deliver([outcome for outcome in outcomes if outcome[0].request_id in self._claimed])
        for ticket, _, _ in outcomes:
            self._claimed.pop(ticket.request_id, None)
            self._instead.pop(ticket.request_id, None)

    def flush(self) -> None:
        """Wake the callers whose answers were collected for the end of a turn."""
        if self._outbox.has_news:
            self._outbox.flush()

    # --- in another thread, while the engine's thread hangs ----------------------------------------------------------

    def answer_instead(self, tickets: Iterable[Ticket], failure: Callable[[Ticket], BatchmakerError]) -> None:
        """Answer in place of the engine's thread, which counts the requests and clears their state when it goes on."""
        ours: list[Settled] = []
        for ticket in tickets:
            ticket.error = error = failure(ticket)  # before the pop; the engine's thread reads it after
            self._instead[ticket.request_id] = ticket
            if self._tickets.pop(ticket.request_id, None) is None:  # the engine's thread was faster, and has counted it
                self._instead.pop(ticket.request_id, None)
                continue
            self._left_instead += ticket.work
            if ticket.num_places:
                self._on_leave(ticket.num_places)
            ours.append((ticket, None, error))
        outbox = Outbox()
        outbox.deliver(_claimed(ours))
        outbox.flush()

    # --- in a forked process -----------------------------------------------------------------------------------------

    def abandon(self, error: BatchmakerError) -> None:
        """Give every request this error. Nobody waits, because no other thread exists: so nobody is called or woken."""
        for ticket in [*self._tickets.values(), *self._claimed.values(), *self._instead.values()]:
            if ticket.answer is not None:
                ticket.answer.abandon(error)
        self._tickets = {}
        self._outbox = Outbox()


def _claimed(outcomes: Iterable[Settled]) -> list[Settled]:
    """Take the right to answer from callers, who may cancel until now; see Answer. Return what the callers get."""
    claimed: list[Settled] = []
    for outcome in outcomes:
        ticket, _, wanted = outcome
        error = wanted or ticket.fault
        if ticket.answer is not None:
            verdicts = ticket.answer.verdicts
            verdicts.append(None)
            if verdicts[0] is not None:
                error = CancelledError(f"request {ticket.request_id}: cancelled by the caller")
        claimed.append(outcome if error is wanted else (ticket, None, error))
    return claimed
