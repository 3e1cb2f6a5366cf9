"""The engine's own thread: it takes what other threads send, turns a driver, and delivers answers. Engine owns one."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

from batchmaker.clock import Clock
from batchmaker.engine.driver import Driver
from batchmaker.engine.heartbeat import Heartbeat, Watchdog, stack_of
from batchmaker.engine.request import Outbox, Settled, Ticket
from batchmaker.errors import BatchmakerError, CancelledError, DeadlineError, StoppedError, said_by
from batchmaker.policies.line import WaitingLine
from batchmaker.scheduler.events import RequestId

FEWEST_ARRIVALS: Final = 64
MOST_ARRIVALS: Final = 256
SOON_S: Final = 20e-3
"""How many requests are taken before the loop looks at finished work again: as many as take about SOON_S seconds, and a
number between the other two. More requests together make larger batches, and cost less each. But requests in flight
wait meanwhile."""

STOP_PATIENCE_S: Final = 60.0
"""Seconds. If one turn takes longer than this, `stop` without `within_s` waits no longer."""

_LOG = logging.getLogger("batchmaker.engine")

Item = list[Ticket] | Callable[[], None]
"""An entry of the inbox: requests that came together, or a function to call."""


@final
class Loop:
    """Turns a driver in a thread of its own until it is stopped and every request is answered.

    on_settled: called in that thread with each settled ticket and its error, if any; it must not raise. give_up_late:
    whether requests fail at their deadlines; then they also do so while a turn takes long. left: called before a
    request that has a place (see Room) is answered, by the thread that answers.
    """

    def __init__(
        self,
        driver: Driver,
        clock: Clock,
        on_settled: Callable[[Ticket, BaseException | None], None],
        *,
        give_up_late: bool = True,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._on_settled = on_settled
        self._give_up_late = give_up_late
        self._left = left
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._held: list[Ticket] = []
        self._backlog: WaitingLine[Ticket] = WaitingLine()
        self._most_arrivals = FEWEST_ARRIVALS
        self._num_urgent = 0  # how many requests of the backlog have a deadline or a priority
        self._woken = False  # whether `_wake` is in the inbox
        self._work_waits = False
        self._draining = False
        self._outbox = Outbox()
        # Requests that were accepted and are not answered. The thread that takes a request out of here answers it. That
        # is the engine's thread, or another one while the engine's thread hangs. Race: if both try, `dict.pop` gives
        # the request to one of them, and the other finds nothing.
        self._unanswered: dict[RequestId, Ticket] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._crash: BaseException | None = None
        self._doing = "starting"
        self._waits = False
        self._since_s = 0.0  # when the present turn began; while the thread waits, the last one
        self._watchdog = Watchdog(clock.now_s, self.heartbeat, self._thread_id, self._answer_late)

    # --- from any thread -------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started."""
        return self._thread is not None

    @property
    def has_ended(self) -> bool:
        """Whether the thread was started and has ended."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in the loop's thread, as a callback does."""
        return threading.current_thread() is self._thread

    def heartbeat(self) -> Heartbeat:
        """Return what the thread does now. Any thread may ask; each value was true a moment ago."""
        alive = self._thread is not None and self._thread.is_alive()
        waits, since_s, doing = self._waits, self._since_s, self._doing
        age_s = max(0.0, self._clock.now_s() - since_s) if alive else 0.0
        return Heartbeat(alive, "waiting" if waits else doing, age_s, 0.0 if waits else age_s)

    def start(self) -> bool:
        """Start driver and thread. False if that was done before. Raises StoppedError after `stop`."""
        with self._lock:
            if self._stopping:
                raise StoppedError("the engine has been stopped; make a new one")
            if self._thread is not None:
                return False
            self._driver.start(self._notify, self._settle)
            self._since_s = self._clock.now_s()
            self._thread = threading.Thread(target=self._run, name="batchmaker-engine", daemon=True)
            self._thread.start()
            self._watchdog.start()
            return True

    def stop(self, *, drain: bool, within_s: float | None = None) -> bool:
        """Take no more requests, finish the accepted ones, and end the thread. drain=False: cancel them instead.

        Returns whether the thread has ended. If it is called in that thread, such as in a callback, it returns at once.
        It waits for `within_s` seconds; by default for as long as no turn takes STOP_PATIENCE_S. If the thread has not
        ended then, every unanswered request fails with StoppedError, and the thread ends when its present turn does.
        """
        with self._lock:
            self._put_held()
            self._stopping = True
            thread = self._thread
        if thread is None:
            return True
        self._inbox.put(partial(self._begin_stop, drain=drain))
        if thread is threading.current_thread():
            return False
        if within_s is not None:
            thread.join(within_s)
        while within_s is None and thread.is_alive() and self.heartbeat().busy_for_s < STOP_PATIENCE_S:
            thread.join(1.0)
        if thread.is_alive():
            self._leave_behind()
        return not thread.is_alive()

    def send(self, item: Item) -> None:
        """Accept requests that come together, or a function for the loop's thread. Raises StoppedError after `stop`."""
        self._send(item, hold=False)

    def hold(self, tickets: list[Ticket]) -> None:
        """Accept requests, but hand them over later: with the next `send`, or at `release`. StoppedError as `send`."""
        self._send(tickets, hold=True)

    def release(self) -> None:
        """Hand over all held requests together."""
        with self._lock:
            self._put_held()

    def _put_held(self) -> None:
        if self._held:
            self._inbox.put(self._held)
            self._held = []

    def _send(self, item: Item, *, hold: bool) -> None:
        with self._lock:
            if self._stopping:
                raise StoppedError("the engine has been stopped and takes no more requests") from self._crash
            if isinstance(item, list):
                for ticket in item:
                    self._unanswered[ticket.request_id] = ticket
                    if ticket.deadline_s is not None:
                        self._watchdog.expect(ticket.deadline_s)
                if hold:
                    self._held += item
                    return
            self._put_held()
            self._inbox.put(item)

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up, if it is not answered yet."""
        self._inbox.put(partial(self._cancel, request_id))

    def call_soon(self, action: Callable[[], None]) -> None:
        """Call a function in the loop's thread, before the driver handles the next work."""
        self._inbox.put(action)

    def _notify(self) -> None:
        """Wake the loop. Coalesces wake-ups: `_woken` says that one is in the inbox already.

        Race: two workers may both find `_woken` unset and both send one. The second wake-up does nothing.
        """
        if threading.current_thread() is self._thread:  # the loop itself has computed a step
            self._work_waits = True
        elif not self._woken:
            self._woken = True
            self._inbox.put(self._wake)

    # --- in another thread, while the engine's thread hangs --------------------------------------------------------

    def _thread_id(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    def _answer_late(self, beat: Heartbeat) -> None:
        """Answer the requests whose deadlines have passed. They stay in flight until the engine's thread goes on."""
        if not self._give_up_late:
            return
        now_s = self._clock.now_s()
        late = [t for t in list(self._unanswered.values()) if t.deadline_s is not None and t.deadline_s <= now_s]
        self._answer_instead(
            late, lambda ticket: DeadlineError(
                f"request {ticket.request_id}: not done by its deadline, {ticket.due_after_s:.3f} s after it arrived; "
                f"the engine's thread has been busy with one turn for {beat.busy_for_s:.1f} s ({beat.doing})"
            )
        )  # fmt: skip

    def _leave_behind(self) -> None:
        """Answer every request, since the thread has not ended in time. If it goes on, it cancels its work and ends."""
        beat = self.heartbeat()
        _LOG.error(
            "the engine's thread has not ended and is left behind; it has been busy with one turn for %.1f s (%s). Its "
            "stack:\n%s",
            beat.busy_for_s,
            beat.doing,
            stack_of(self._thread_id()),
        )
        self._inbox.put(partial(self._begin_stop, drain=False))
        said = "the engine was stopped, and its thread did not end in time"
        self._answer_instead(list(self._unanswered.values()), lambda _: StoppedError(said))

    def _answer_instead(self, tickets: list[Ticket], failure: Callable[[Ticket], BatchmakerError]) -> None:
        """Answer in place of the engine's thread, which counts the requests and clears their state when it goes on."""
        outbox = Outbox()
        for ticket in tickets:
            ticket.error = error = failure(ticket)  # before the pop; the engine's thread reads it after
            if self._unanswered.pop(ticket.request_id, None) is not None:
                if ticket.has_place:
                    self._left()
                outbox.deliver(ticket, None, ticket.claim(error))
        outbox.flush()

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
            self._doing = "stopping"
            self._driver.finish()
        except BaseException as error:  # a defect of the engine: every caller that waits must get it
            _LOG.critical("the engine has failed: %s", said_by(error), exc_info=error)
            self._fail_all(error)
        finally:
            self._driver.stop()
            self._watchdog.stop()

    def _turn(self) -> bool:
        """One turn of the engine: receive, poll, handle, carry out, deliver. True if it was the last one.

        Handling and carrying out are `CellDriver.advance`: events go to the scheduler, its commands come back.
        """
        self._receive()
        self._doing = "collecting or computing steps"
        self._driver.poll()
        self._take_inbox()  # requests that came meanwhile join the next task
        self._doing = "unfolding and scheduling"
        self._advance(self._arrivals() if self._should_accept() else [])
        self._doing = "answering"
        self._outbox.flush()
        return self._draining and not len(self._backlog) and not self._driver.num_in_flight and self._inbox.empty()

    def _receive(self) -> None:
        """Take what other threads have sent. Waits if there is nothing else to do."""
        if self._work_waits or self._should_accept():
            self._since_s = self._clock.now_s()
            self._take_inbox()
        else:
            self._take_inbox(self._wait())
        # Race: a worker that calls `_notify` between the line above and the line below finds `_woken` still set and
        # sends nothing. Its result is not missed, because this turn polls the driver after both.
        self._work_waits = self._woken = False

    def _should_accept(self) -> bool:
        """Whether to take requests from the backlog now.

        If none is urgent and the workers have enough work, the requests stay in the backlog until there are
        `_most_arrivals` of them: requests that are taken together cost less each.
        """
        if not len(self._backlog):
            return False
        urgent = self._num_urgent > 0 or self._driver.wants_requests
        return urgent or len(self._backlog) >= self._most_arrivals

    def _advance(self, arrivals: list[Ticket]) -> None:
        """Advance the driver, and choose how many requests may be taken next, by the time that these took."""
        began_s = self._clock.now_s()
        self._driver.advance(arrivals)
        took_s = self._clock.now_s() - began_s
        if len(arrivals) == self._most_arrivals or (len(arrivals) >= FEWEST_ARRIVALS and took_s > SOON_S):
            fit = len(arrivals) * SOON_S / max(took_s, 1e-9)
            self._most_arrivals = int(min(max(fit, FEWEST_ARRIVALS), MOST_ARRIVALS))

    def _arrivals(self) -> list[Ticket]:
        """Take the first requests out of the backlog."""
        tickets = self._backlog.take(self._most_arrivals)
        self._num_urgent -= sum([ticket.is_urgent for ticket in tickets])
        return tickets

    def _take_inbox(self, item: Item | None = None) -> None:
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

    def _accept(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.chunk is not None:
                ticket.chunk.sequence.accept(ticket, ticket.chunk)
            self._backlog.join(ticket.request_id, ticket, ticket.priority)
        self._num_urgent += sum([ticket.is_urgent for ticket in tickets])

    def _wait(self) -> Item | None:
        """Wait for one item, or until the driver wants a turn; the turn begins when the wait ends. Return the item."""
        wakeup_s = self._driver.next_wakeup_s()
        patience_s = None if wakeup_s is None else max(0.0, wakeup_s - self._clock.now_s())
        self._waits = True
        item: Item | None = None
        with suppress(queue.Empty):
            item = self._inbox.get(timeout=patience_s)
        # Race: `heartbeat` reads `_waits` first and `_since_s` second. In this order a reader that sees the end of the
        # wait also sees when the turn began, so it never reports the time of the wait as time of work.
        self._since_s = self._clock.now_s()
        self._waits = False
        return item

    def _wake(self) -> None:
        self._work_waits = True

    def _cancel(self, request_id: RequestId) -> None:
        if request_id not in self._backlog:
            self._driver.cancel(request_id)
            return
        ticket = self._backlog.leave(request_id)
        self._num_urgent -= ticket.is_urgent
        self._settle([(ticket, None, CancelledError(f"request {request_id}: cancelled by the caller"))])

    def _begin_stop(self, *, drain: bool) -> None:
        self._draining = True
        if drain:
            return
        waiting, self._num_urgent = self._backlog.take(len(self._backlog)), 0
        self._settle([(t, None, StoppedError("the engine was stopped before the request began")) for t in waiting])
        self._driver.cancel_all()

    def _settle(self, outcomes: Sequence[Settled]) -> None:
        """Answer requests. If one is a chunk, its sequence goes on with the next.

        Race: until a request is claimed, callers cancel and another thread may answer. So the state of a sequence is
        decided after the claim, and before the caller gets the answer.
        """
        now_s = self._clock.now_s()
        chunks = [(ticket, ticket.chunk, error) for ticket, _, error in outcomes if ticket.chunk is not None]
        claims = {ticket.request_id: self._claim(ticket, error, now_s) for ticket, _, error in chunks}
        if chunks:
            chunks[0][1].sequence.sequences.decide([(chunk, claims[t.request_id][0]) for t, chunk, _ in chunks])
        for ticket, result, wanted in outcomes:
            error, is_ours = claims.get(ticket.request_id) or self._claim(ticket, wanted, now_s)
            self._on_settled(ticket, error)  # before the delivery: the caller may read the counts at once
            if is_ours:
                self._outbox.deliver(ticket, result, error)
            if ticket.chunk is not None:
                ticket.chunk.sequence.sequences.settled(ticket, ticket.chunk, error)

    def _claim(self, ticket: Ticket, error: BaseException | None, now_s: float) -> tuple[BaseException | None, bool]:
        """Take the right to answer; return the error that the caller gets, and whether it gets it from here."""
        ticket.finished_s = now_s
        if self._unanswered.pop(ticket.request_id, None) is None:  # another thread has answered
            return ticket.error, False
        if ticket.has_place:
            self._left()
        return (error if ticket.answer is None else ticket.claim(error)), True

    def _fail_all(self, error: BaseException) -> None:
        """Answer every request with StoppedError, because the engine has failed, and take no more."""
        with self._lock:
            self._stopping = True
            self._crash = error
        for ticket in list(self._unanswered.values()):
            failure = StoppedError(f"the engine failed: {said_by(error)}")
            failure.__cause__ = error
            given, is_ours = self._claim(ticket, failure, self._clock.now_s())
            self._on_settled(ticket, given)
            if is_ours:
                self._outbox.deliver(ticket, None, given)
        self._outbox.flush()
