"""The engine's own thread: what comes from other threads goes in, answers go out, and a driver is turned."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, final

from batchmaker.clock import Clock
from batchmaker.engine.driver import Driver
from batchmaker.engine.ticket import Outbox, Ticket
from batchmaker.errors import CancelledError, StoppedError
from batchmaker.policies.line import WaitingLine
from batchmaker.scheduler.events import RequestId

MAX_ARRIVALS_PER_TURN = 64
"""Requests unfolded before finished work is looked at again."""


@final
class Loop:
    """Turns a driver in a thread of its own until it is stopped and nothing is left to answer.

    on_settled: called in that thread with each ticket that is settled, and its error if it has one.
    """

    def __init__(
        self, driver: Driver, clock: Clock, on_settled: Callable[[Ticket, BaseException | None], None]
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._on_settled = on_settled
        self._inbox: queue.SimpleQueue[Ticket | Callable[[], None]] = queue.SimpleQueue()
        self._backlog: WaitingLine[Ticket] = WaitingLine()
        self._num_urgent = 0  # of the backlog: those with a deadline or a priority
        self._woken = False  # whether `_wake` is in the inbox
        self._work_waits = False
        self._draining = False
        self._outbox = Outbox()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._crash: BaseException | None = None

    # --- from any thread -------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started."""
        return self._thread is not None

    @property
    def has_ended(self) -> bool:
        """Whether the thread was started and has ended."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self) -> bool:
        """Start driver and thread; False if that was done before. StoppedError once stopped."""
        with self._lock:
            if self._stopping:
                raise StoppedError("the engine has been stopped; make a new one")
            if self._thread is not None:
                return False
            self._driver.start(self._notify, self._settle)
            self._thread = threading.Thread(target=self._run, name="batchmaker-engine", daemon=True)
            self._thread.start()
            return True

    def stop(self, *, drain: bool) -> None:
        """Take no more requests, finish those accepted (or cancel them, without `drain`) and end the thread.

        Returns once it has ended; called in that thread, such as in a future's callback, at once.
        """
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is None:
            return
        self._inbox.put(partial(self._begin_stop, drain=drain))
        if thread is not threading.current_thread():
            thread.join()

    def send(self, item: Ticket | Callable[[], None]) -> None:
        """Accept a request, or something to do in the loop's thread. StoppedError once stopped."""
        with self._lock:
            if self._stopping:
                raise StoppedError("the engine has been stopped and takes no more requests") from self._crash
            self._inbox.put(item)

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up, if it is not answered yet."""
        self._inbox.put(partial(self._cancel, request_id))

    def call_soon(self, action: Callable[[], None]) -> None:
        """Run something in the loop's thread, between two turns."""
        self._inbox.put(action)

    def _notify(self) -> None:
        """Wake the loop; many calls before it looks make one wake-up, or two that race."""
        if threading.current_thread() is self._thread:  # a step that the loop has computed itself
            self._work_waits = True
        elif not self._woken:
            self._woken = True
            self._inbox.put(self._wake)

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._turn():
                pass
            self._driver.finish()
        except BaseException as error:  # a defect: whoever waits must hear of it
            self._fail_all(error)
            raise
        finally:
            self._driver.stop()

    def _turn(self) -> bool:
        """Look at what has come, then at finished work, and start more; True if that was the end."""
        self._take_inbox(wait=not self._work_waits and not self._should_accept())
        self._work_waits = False
        self._woken = False
        self._driver.collect()
        self._take_inbox(wait=False)  # who came meanwhile joins the next task
        self._driver.advance(self._arrivals() if self._should_accept() else [])
        self._outbox.flush()
        return self._draining and not len(self._backlog) and not self._driver.num_in_flight and self._inbox.empty()

    def _should_accept(self) -> bool:
        """Whether to take requests now. While more waits than the workers can use soon, many are taken together."""
        if not len(self._backlog):
            return False
        urgent = self._num_urgent > 0 or self._driver.wants_requests
        return urgent or len(self._backlog) >= MAX_ARRIVALS_PER_TURN

    def _arrivals(self) -> list[Ticket]:
        """Take the first requests out of the backlog."""
        return [self._leave_backlog(number) for number in self._backlog.first(MAX_ARRIVALS_PER_TURN).tolist()]

    def _leave_backlog(self, request_id: int) -> Ticket:
        ticket = self._backlog.leave(request_id)
        self._num_urgent -= ticket.is_urgent
        return ticket

    def _take_inbox(self, *, wait: bool) -> None:
        """Take requests into the backlog and do what else is asked for, after waiting for something if told to."""
        while True:
            try:
                item = self._inbox.get(timeout=self._patience_s()) if wait else self._inbox.get_nowait()
            except queue.Empty:
                return
            wait = False
            if isinstance(item, Ticket):
                if item.chunk is not None:
                    item.chunk.sequence.accept(item, item.chunk)
                self._backlog.join(item.request_id, item, item.priority)
                self._num_urgent += item.is_urgent
            else:
                item()

    def _patience_s(self) -> float | None:
        wakeup_s = self._driver.next_wakeup_s()
        return None if wakeup_s is None else max(0.0, wakeup_s - self._clock.now_s())

    def _wake(self) -> None:
        self._work_waits = True

    def _cancel(self, request_id: RequestId) -> None:
        if request_id not in self._backlog:
            self._driver.cancel(request_id)
            return
        ticket = self._leave_backlog(request_id)
        self._settle(ticket, None, CancelledError(f"request {request_id}: cancelled by the caller"))

    def _begin_stop(self, *, drain: bool) -> None:
        self._draining = True
        if drain:
            return
        for request_id in self._backlog.first(len(self._backlog)).tolist():
            ticket = self._leave_backlog(request_id)
            self._settle(ticket, None, StoppedError("the engine was stopped before the request began"))
        self._driver.cancel_all()

    def _settle(self, ticket: Ticket, result: Any, error: BaseException | None) -> None:
        ticket.finished_s = self._clock.now_s()
        self._on_settled(ticket, error)
        self._outbox.deliver(ticket, result, error)
        if ticket.chunk is not None:
            ticket.chunk.sequence.sequences.settled(ticket, ticket.chunk, error)

    def _fail_all(self, error: BaseException) -> None:
        with self._lock:
            self._stopping = True
            self._crash = error
        backlog = [self._leave_backlog(number) for number in self._backlog.first(len(self._backlog)).tolist()]
        waiting = [*backlog, *self._driver.tickets()]
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Ticket):
                waiting.append(item)
        for ticket in {ticket.request_id: ticket for ticket in waiting}.values():
            if ticket.finished_s is not None:
                continue
            failure = StoppedError(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._settle(ticket, None, failure)
        self._outbox.flush()
