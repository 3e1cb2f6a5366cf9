"""The engine's own thread: it takes what other threads send, turns a driver, and delivers answers. Engine owns one."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, final

from batchmaker.clock import Clock
from batchmaker.core.events import RequestId
from batchmaker.engine import forks
from batchmaker.engine.driver import Driver
from batchmaker.engine.heartbeat import Heartbeat, Watchdog, stack_of
from batchmaker.engine.incoming import FEWEST_ARRIVALS, Incoming, Item
from batchmaker.engine.observers import release_frames
from batchmaker.engine.request import Settled, SettledChunk, Ticket, in_bulks
from batchmaker.engine.unanswered import Unanswered
from batchmaker.errors import (
    RAISED_BY_USERS,
    BatchmakerError,
    CancelledError,
    DeadlineError,
    EngineError,
    StoppedError,
    said_by,
)
from batchmaker.policies.ageing import AGED_EVERY

STOP_PATIENCE_S: Final = 60.0
"""Seconds. If one turn takes longer than this, `stop` without `within_s` waits no longer."""

MOST_RESTARTS: Final = 3
"""How many times the engine begins anew without a request that is answered in between. After that it ends."""

_LOG = logging.getLogger("batchmaker.engine")


@final
class Worker:
    """Turns a driver in a thread of its own until it is stopped and every request is answered.

    remake: makes the driver that goes on in place of one that has failed. on_settled, on_leave: see Unanswered;
    on_settled must not raise. give_up_late: whether requests fail at their deadlines; then they also do so while a turn
    takes long. starting: what the engine does while it starts, in words, and the cell that is compiled; "" otherwise.
    aged_every: see WaitingLine.
    is_running: whether the thread has been started. on_idle: called in its thread when no request is left.
    on_failed: called there after a failure that ends the engine.
    """

    def __init__(
        self,
        driver: Driver,
        remake: Callable[[Driver], Driver],
        clock: Clock,
        on_settled: Callable[[Sequence[Settled]], None],
        *,
        give_up_late: bool = True,
        on_leave: Callable[[int], None] = lambda _: None,
        starting: Callable[[], tuple[str, str]] = lambda: ("", ""),
        aged_every: int | None = AGED_EVERY,
    ) -> None:
        self._driver = driver
        self._remake = remake
        self._clock = clock
        self._give_up_late = give_up_late
        self._starting = starting
        self._incoming = Incoming(aged_every)
        self._woken = False  # whether `_wake` is on its way
        self._work_waits = False
        self._draining = False
        self._unanswered = Unanswered(on_settled, on_leave)
        self._lock = threading.RLock()  # a signal handler may call this while its thread is in a call
        self.is_running = False
        self.on_idle: Callable[[], None] | None = None
        self.on_failed: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._used: int | None = None  # the clock of the thread's processor time
        self._refusal = ""  # why no more requests are taken; "" while they are
        self._crash: BaseException | None = None
        self._restarts_left = MOST_RESTARTS
        self._failure: BaseException | None = None  # what the engine must begin anew after
        self._doing = "starting"
        self._waits = False
        self._since_s = 0.0  # when the present turn began; while the thread waits, the last one
        self._watchdog = Watchdog(clock.now_s, self.heartbeat, self._thread_id, self._answer_late)
        forks.register(self)

    # --- from any thread -------------------------------------------------------------------------------------------

    @property
    def driver(self) -> Driver:
        """The driver that is turned. It is another one after a failure of the engine."""
        return self._driver

    @property
    def has_ended(self) -> bool:
        """Whether the thread was started and has ended."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in its thread, as a callback does."""
        return threading.current_thread() is self._thread

    def heartbeat(self) -> Heartbeat:
        """Return what the thread does now. Any thread may ask; each value was true a moment ago."""
        alive = self._thread is not None and self._thread.is_alive()
        waits, since_s, doing = self._waits, self._since_s, self._doing
        age_s = max(0.0, self._clock.now_s() - since_s) if alive else 0.0
        starting, compiling = self._starting() if alive else ("", "")
        return Heartbeat(alive, "waiting" if waits else doing, age_s, 0.0 if waits else age_s, starting, compiling)

    def start(self) -> bool:
        """Start driver and thread. False if that was done before. Raises StoppedError after `stop`."""
        with self._lock:
            self._check()
            if self._thread is not None:
                return False
            self._driver.start(self._notify, self._settle)
            self._since_s = self._clock.now_s()
            self._thread = threading.Thread(target=self._run, name="batchmaker-engine", daemon=True)
            self._thread.start()
            self._watchdog.start()
            self.is_running = True
            return True

    def responds_within(self, seconds: float) -> bool:
        """Whether its thread runs, and has not been in one turn for so long; `heartbeat` says what it does."""
        return self._thread is not None and self._thread.is_alive() and self.busy_for_s < seconds

    @property
    def busy_for_s(self) -> float:
        """Seconds in the present turn; 0 while it waits, or does not run."""
        return 0.0 if self._waits or not self.is_running else max(0.0, self._clock.now_s() - self._since_s)

    @property
    def used_s(self) -> float:
        """Seconds of processor time that the thread has used; 0 while it does not run."""
        if self._used is None:
            return 0.0
        try:
            return time.clock_gettime(self._used)
        except OSError:  # the thread has ended
            return 0.0

    @property
    def work(self) -> int:
        """The work of the requests that are accepted and not answered; see Ticket."""
        return self._unanswered.work

    def end(self, *, drain: bool) -> None:
        """Take no more requests, finish the accepted ones, and end the thread then. drain=False: cancel them instead.

        Returns at once; see `join`.
        """
        with self._lock:
            self._incoming.put_held()
            self._refusal = self._refusal or "the engine has been stopped and takes no more requests; make a new one"
            if self._thread is not None:
                self._incoming.inbox.put(partial(self._begin_stop, drain=drain))

    def join(self, within_s: float | None = None) -> bool:
        """Wait for the end of the thread, after `end`. Returns whether it has ended.

        It waits for `within_s` seconds; by default for as long as no turn takes STOP_PATIENCE_S. If the thread has not
        ended then, every unanswered request fails with StoppedError, and the thread ends when its present turn does.
        """
        thread = self._thread
        if thread is None:
            return True
        if within_s is not None:
            thread.join(within_s)
        while within_s is None and thread.is_alive() and self.heartbeat().busy_for_s < STOP_PATIENCE_S:
            thread.join(1.0)
        if thread.is_alive():
            self._leave_behind()
        return not thread.is_alive()

    def check(self) -> None:
        """Raise StoppedError if no more requests are taken."""
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._refusal:
            raise StoppedError(self._refusal) from self._crash

    def send(self, item: Item) -> None:
        """Accept requests that come together, or a function for its thread. Raises StoppedError after `stop`."""
        with self._lock:
            if self._refusal:
                self._check()
            if isinstance(item, list) and (due_s := self._unanswered.add(item)) is not None:
                self._watchdog.expect(due_s)
            if self._incoming.held:
                self._incoming.put_held()
            self._incoming.inbox.put(item)

    def hold(self, tickets: list[Ticket]) -> None:
        """Accept requests, but hand them over later: with the next `send`, or at `release`. StoppedError as `send`."""
        with self._lock:
            self._check()
            if (due_s := self._unanswered.add(tickets)) is not None:
                self._watchdog.expect(due_s)
            self._incoming.held += tickets

    def release(self) -> None:
        """Hand over all held requests together."""
        # Race: who has held requests sees them here. Those that another thread holds meanwhile have a release ahead.
        if self._incoming.held:
            with self._lock:
                self._incoming.put_held()

    def cancel(self, request_id: RequestId) -> None:
        """Give a request up, if it is not answered yet."""
        self._incoming.inbox.put(partial(self._cancel, request_id))

    def call_soon(self, action: Callable[[], None]) -> None:
        """Call a function in its thread, before the driver handles the next work."""
        self._incoming.inbox.put(action)

    def give(self, other: Worker) -> None:
        """Hand half of the requests that have not begun to a worker that has none. Call it in this one's thread."""
        if self._draining:
            return
        most = (self._incoming.num_tickets + self._driver.num_in_flight) // 2  # one alone stays: it would go to and fro
        spare = self._incoming.spare(most)
        spare += self._driver.withdraw(most - len(spare))
        ours = self._unanswered.hand_over(spare)
        if len(ours) < len(spare):  # another thread has answered them, and they are to be counted
            self._settle([(ticket, None, ticket.error) for ticket in spare if ticket.error is not None])
        for ticket in ours:
            if ticket.answer is not None:
                ticket.answer.handover = other  # before it begins there; see Answer.cancel
        try:
            if ours:
                other.send(ours)
        except StoppedError:  # it stops, and this one will
            for ticket in ours:
                if ticket.answer is not None:
                    ticket.answer.handover = self
            with self._lock:
                self._unanswered.add(ours)
                self._incoming.inbox.put(ours)

    def _notify(self) -> None:
        """Wake the thread. Coalesces wake-ups: `_woken` says that one is in the inbox already.

        Race: two workers may both find `_woken` unset and both send one. The second wake-up does nothing.
        """
        if threading.current_thread() is self._thread:  # it has itself computed a step
            self._work_waits = True
        elif not self._woken:
            self._woken = True
            self._incoming.inbox.put(self._wake)

    # --- in another thread, while the engine's thread hangs --------------------------------------------------------

    def _thread_id(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    def _answer_late(self, beat: Heartbeat) -> None:
        """Answer the requests whose deadlines have passed. They stay in flight until the engine's thread goes on."""
        if not self._give_up_late:
            return
        now_s = self._clock.now_s()
        late = [t for t in self._unanswered.tickets() if t.deadline_s is not None and t.deadline_s <= now_s]
        self._unanswered.answer_instead(
            late,
            lambda ticket: DeadlineError(
                f"{ticket.said_late}; the engine's thread has been busy with one turn for {beat.busy_for_s:.1f} s "
                f"({beat.doing})"
            ),
        )

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
        self._incoming.inbox.put(partial(self._begin_stop, drain=False))
        said = "the engine was stopped, and its thread did not end in time"
        self._unanswered.answer_instead(self._unanswered.tickets(), lambda _: StoppedError(said))

    # --- in a forked process -----------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """See forks. An engine that has not started has no threads yet, and may start in the child."""
        self._lock = threading.RLock()  # a signal handler may call this while its thread is in a call
        if self._thread is None:
            return
        said = (
            f"the engine runs in process {os.getppid()}, from which this one (process {os.getpid()}) was forked: its "
            "threads are there. Make and start an engine here, after the fork"
        )
        self._refusal, self._incoming = self._refusal or said, Incoming()
        self._unanswered.abandon(StoppedError(said))

    # --- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._used = time.pthread_getcpuclockid(threading.get_ident())  # another thread could ask too late
        try:
            while not self._has_finished():
                pass
        except BaseException as error:  # a defect of the engine: every caller that waits must get it
            _LOG.critical("the engine has failed: %s", said_by(error), exc_info=error)
            self._fail_all(error)
            if self.on_failed is not None:
                self.on_failed()
        finally:
            self._driver.stop()
            self._watchdog.stop()

    def _has_finished(self) -> bool:
        """Turn the driver until the last turn, and return True. If something fails before, note it and return False."""
        try:
            if self._failure is not None:
                self._begin_anew(self._failure)
                self._failure = None
            while not self._turn():
                pass
            self._doing = "stopping"
            self._driver.finish()
        except RAISED_BY_USERS as error:  # a defect, of the engine or of a policy: nobody's own
            if not self._restarts_left:
                raise
            self._restarts_left -= 1
            self._failure = error
            return False
        return True

    def _begin_anew(self, error: BaseException) -> None:
        """Fail every request that has begun, and go on with a new driver. It serves those that have not begun.

        What is accepted and not on its way to the driver has begun, wherever the failed turn has lost it. All that this
        turn may have left half done is dropped with the old driver: nothing of it is repaired.
        """
        self._doing = "beginning anew after a failure"
        with self._lock:  # a caller notes a request as accepted and sends it under this lock: here it has done both
            waiting = self._incoming.start_over()
            begun = [ticket for ticket in self._unanswered.unsettled() if ticket.request_id not in waiting]
        _LOG.error(
            "the engine has failed and begins anew: %s; %d requests that had begun fail, %d that had not wait",
            said_by(error),
            len(begun),
            len(waiting),
            exc_info=error,
        )
        said = f"the engine failed while it was in flight, and has begun anew: {said_by(error)}"
        self._fail(begun, error, lambda ticket: EngineError(f"request {ticket.request_id}: {said}"))
        release_frames(error)
        self._driver.stop()
        self._driver = self._remake(self._driver)
        self._driver.start(self._notify, self._settle)
        self._work_waits = True  # a turn follows without a wait: nobody may send anything more

    def _turn(self) -> bool:
        """One turn of the engine: receive, poll, handle, carry out, deliver. True if it was the last one.

        Handling and carrying out are `CellDriver.advance`: events go to the scheduler, its commands come back.
        """
        self._receive()
        self._doing = "collecting or computing steps"
        self._driver.poll()
        incoming = self._incoming
        if not incoming.inbox.empty():
            incoming.take()  # requests that came meanwhile join the next task
        self._doing = "unfolding and scheduling"
        if incoming.num_waiting and self._should_accept():
            self._accept()
        else:
            self._driver.advance(())
        self._doing = "answering"
        self._unanswered.flush()
        return self._draining and not self._driver.num_in_flight and self._incoming.is_empty

    def _receive(self) -> None:
        """Take what other threads have sent. Waits if there is nothing else to do."""
        if self._work_waits or (self._incoming.num_waiting and self._should_accept()):
            self._since_s = self._clock.now_s()
            self._incoming.take()
        else:
            self._incoming.take(self._wait())
        # Race: a worker that calls `_notify` between the line above and the line below finds `_woken` still set and
        # sends nothing. Its result is not missed, because this turn polls the driver after both.
        self._work_waits = self._woken = False

    def _should_accept(self) -> bool:
        """Whether requests of the backlog begin now."""
        driver, incoming = self._driver, self._incoming
        if incoming.num_chunks or incoming.urgent:
            return True
        if driver.wants_requests and (not driver.own_tasks or self._clock.now_s() >= incoming.next_begin_s):
            return True
        stay = driver.has_live_streams or driver.begin_together is not None
        return incoming.are_many and not stay

    def _accept(self) -> None:
        incoming, began_s = self._incoming, self._clock.now_s()
        beside = self._driver.has_live_streams
        if beside:
            incoming.separate_bulks()
            arrivals = incoming.first_beside(wanted=self._driver.wants_requests)
        else:
            are_many = incoming.num_waiting > FEWEST_ARRIVALS and self._driver.wants_requests
            arrivals = incoming.first(together=(are_many and self._driver.begin_together) or 0)
        self._driver.advance(arrivals)
        note = incoming.began_beside if beside else incoming.began
        note(arrivals, began_s, self._clock.now_s())

    def _wait(self) -> Item | None:
        """Wait for one item, or until the driver wants a turn; the turn begins when the wait ends. Return the item."""
        if self.on_idle is not None and not self._driver.num_in_flight and self._incoming.is_empty:
            self.on_idle()
        wakeup_s = self._driver.next_wakeup_s()
        patience_s = None if wakeup_s is None else max(0.0, wakeup_s - self._clock.now_s())
        self._waits = True
        item = self._incoming.wait(patience_s)
        # Race: `heartbeat` reads `_waits` first and `_since_s` second. In this order a reader that sees the end of the
        # wait also sees when the turn began, so it never reports the time of the wait as time of work.
        self._since_s = self._clock.now_s()
        self._waits = False
        return item

    def _wake(self) -> None:
        self._work_waits = True

    def _cancel(self, request_id: RequestId) -> None:
        ticket = self._incoming.leave(request_id)
        if ticket is None:
            self._driver.cancel(request_id)
            return
        self._settle([(ticket, None, CancelledError(f"request {request_id}: cancelled by the caller"))])

    def _begin_stop(self, *, drain: bool) -> None:
        self._draining = True
        if drain:
            return
        said = "the engine was stopped before the request began"
        waiting = self._incoming.first(self._incoming.num_waiting)
        self._settle([(ticket, None, StoppedError(said)) for ticket in waiting])
        self._driver.stop_all()

    def _settle(self, outcomes: Sequence[Settled]) -> None:
        """Answer requests. If one is a chunk, its sequence goes on with the next.

        Race: until a request is claimed, callers cancel and another thread may answer. So the state of a sequence is
        decided after the claim, and before the caller gets the answer.
        """
        now_s = self._clock.now_s()
        if self._incoming.bulks_came:
            outcomes = in_bulks(outcomes, now_s)
        claimed = self._unanswered.claim(outcomes, now_s)
        chunks: list[SettledChunk] = []
        for ticket, _, error in claimed:
            if error is None:
                self._restarts_left = MOST_RESTARTS
            if ticket.chunk is not None:
                chunks.append((ticket, ticket.chunk, error))
        if chunks:
            chunks[0][1].sequence.sequences.decide(chunks)
        self._unanswered.deliver(claimed)
        if chunks:
            chunks[0][1].sequence.sequences.settled(chunks)

    def _fail_all(self, error: BaseException) -> None:
        """Answer every request with StoppedError, because the engine has failed, and take no more."""
        with self._lock:
            self._refusal = "the engine has failed and takes no more requests; make a new one"
            self._crash = error
        said = f"the engine failed: {said_by(error)}"
        self._fail(self._unanswered.unsettled(), error, lambda _: StoppedError(said))

    def _fail(self, tickets: list[Ticket], cause: BaseException, failure: Callable[[Ticket], BatchmakerError]) -> None:
        outcomes: list[Settled] = []
        for ticket in tickets:
            error = failure(ticket)
            error.__cause__ = cause
            outcomes.append((ticket, None, error))
        self._unanswered.deliver(self._unanswered.claim(outcomes, self._clock.now_s()))
        self._unanswered.flush()
