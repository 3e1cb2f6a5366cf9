"""The open sequences of an engine: which chunk may begin, which chunks fail with another, when a sequence ends.

A chunk is a request like any other, but it begins only when the chunk before it has been answered. If a chunk has no
result, the sequence keeps the state from before it. Chunks that were sent after it rely on its state, so they fail too.
CellDriver uses this for every chunk.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, final

from batchmaker.clock import Clock
from batchmaker.core.deadline_heap import Deadlines
from batchmaker.core.events import RequestId, SequenceId
from batchmaker.engine import forks
from batchmaker.engine.failures import stopped
from batchmaker.engine.observers import call_quietly
from batchmaker.engine.request import (
    Chunk,
    SequenceEnd,
    SequenceEnded,
    SequenceEntry,
    SequenceKeeper,
    Settle,
    Settled,
    SettledChunk,
    TakeState,
    Ticket,
)
from batchmaker.errors import (
    BatchmakerError,
    CancelledError,
    DeadlineError,
    OptionError,
    SequenceError,
    SequenceLimitError,
)
from batchmaker.model.options import check_number
from batchmaker.model.sequence_state import NOTHING_KEPT

DEFAULT_MAX_SEQUENCES = 1024
DEFAULT_IDLE_TIMEOUT_S = 60.0


@final
class SequenceLimit:
    """Counts the open sequences of an engine. most: that are open at once. Any thread may call its methods."""

    def __init__(self, most: int = DEFAULT_MAX_SEQUENCES) -> None:
        if most < 0:
            raise OptionError(f"max_sequences must be at least 0, got {most}")
        self._most = most
        self._lock = threading.RLock()
        self.num_open = 0
        forks.register(self)

    def after_fork(self) -> None:
        """See forks."""
        self._lock = threading.RLock()

    def count(self, keeper: SequenceKeeper) -> None:
        """Count a sequence more, of this worker. Raises SequenceLimitError if there is no room."""
        with self._lock:
            if self.num_open >= self._most:
                raise SequenceLimitError(
                    f"{self.num_open} sequences are open, the most that this engine takes; close one, wait for one to "
                    "end, or raise Engine(max_sequences=...)"
                )
            self.num_open += 1
            keeper.num_open += 1

    def uncount(self, entry: SequenceEntry) -> None:
        """Count the sequence no longer. A second call does nothing."""
        with self._lock:
            self.num_open -= entry.counted
            entry.sequences.num_open -= entry.counted
            entry.counted = False


@final
class Sequences:
    """The open sequences of one worker.

    limit: of all of the engine. num_open: how many of these it counts. give_up_late: see Scheduler. settle: called with
    chunks that fail here. opened: those that have not ended. has_news: whether chunks are due or sequences have ended;
    see `take_due` and `take_closed`. on_decided: told which sequences go on from after their computed chunk, and which
    from before it. Any thread may call `make` and `uncount`; everything else is for the engine's thread.
    """

    def __init__(self, clock: Clock, limit: SequenceLimit | None = None, *, give_up_late: bool = True) -> None:
        self._clock = clock
        self._limit = SequenceLimit() if limit is None else limit
        self._give_up_late = give_up_late
        self._ids = itertools.count()
        self.num_open = 0
        self.opened: dict[SequenceId, SequenceEntry] = {}
        self._waiting: dict[RequestId, Ticket] = {}
        self._due: list[Ticket] = []
        self._closed: list[SequenceId] = []
        self.has_news = False
        self._idle: Deadlines[SequenceId] = Deadlines()
        self._late: Deadlines[RequestId] = Deadlines()
        self.settle: Callable[[Sequence[Settled]], None] = lambda _: None
        self.on_decided: Callable[[Sequence[SequenceId], Sequence[SequenceId]], None] = lambda _, __: None

    # --- any thread --------------------------------------------------------------------------------------------

    def make(self, idle_timeout_s: float, on_ended: Callable[[SequenceEnded], None] | None = None) -> SequenceEntry:
        """Return a new sequence, to give to `open`.

        idle_timeout_s: seconds, above 0, or math.inf; else OptionError. on_ended: called in the engine's thread when it
        has ended. SequenceLimitError if the limit is reached.
        """
        check_number("idle_timeout_s", idle_timeout_s, above=0.0, hint=" (math.inf for none)")
        self._limit.count(self)
        return SequenceEntry(SequenceId(next(self._ids)), idle_timeout_s, self, on_ended)

    def uncount(self, entry: SequenceEntry) -> None:
        """Stop counting the sequence towards the limit. A second call does nothing."""
        self._limit.uncount(entry)

    # --- chunks --------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Ticket]:
        """Chunks that were taken and have not begun."""
        return [*self._waiting.values(), *self._due]

    @property
    def num_waiting(self) -> int:
        """Number of chunks that were taken and have not begun."""
        return len(self._waiting) + len(self._due)

    def may_begin(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Take requests, chunks among them. Return those that begin now: not chunks that wait for another, or fail."""
        begun: list[Ticket] = []
        for ticket in tickets:
            chunk = ticket.chunk
            if chunk is None:
                begun.append(ticket)
                continue
            entry = chunk.sequence
            if entry.ended is not None:
                self.settle([(ticket, None, SequenceError(f"the sequence has ended: {entry.ended}"))])
            elif entry.failed and entry.counts_on_failed(chunk):
                self.settle([(ticket, None, _after_failed(entry.failed[chunk.era]))])
            elif entry.active is not None:
                entry.waiting[ticket.request_id] = self._waiting[ticket.request_id] = ticket
                if ticket.deadline_s is not None and self._give_up_late:
                    self._late.add(ticket.deadline_s, ticket.request_id, self._waiting, len(self._waiting))
            else:
                entry.active = ticket
                begun.append(ticket)
        return begun

    def decide(self, chunks: Sequence[SettledChunk]) -> None:
        """Let sequences go on from the state after a computed chunk if its caller gets the result, that is: no error.

        Otherwise the state is the one before it, as after every chunk without a result: it was cancelled while it was
        computed, or its result could not be made. Chunks that were not computed change nothing.
        """
        answered: list[SequenceId] = []
        unanswered: list[SequenceId] = []
        for _, chunk, error in chunks:
            entry = chunk.sequence
            if entry.computed is not None:
                if error is None:
                    entry.state = entry.computed
                (answered if error is None else unanswered).append(entry.sequence_id)
                entry.computed = None
        if answered or unanswered:
            self.on_decided(answered, unanswered)

    def settled(self, chunks: Sequence[SettledChunk]) -> None:
        """Note that chunks are answered, in whatever state they were.

        If one failed, chunks that rely on it fail too. Otherwise the next chunk is due. A sequence that closes may end.
        """
        now_s = self._clock.now_s()
        for ticket, chunk, error in chunks:
            entry = chunk.sequence
            entry.outstanding.pop(ticket.request_id, None)
            if error is not None and not isinstance(chunk.control, TakeState | Settle):
                self._fail_after(entry, chunk)
            if ticket is entry.active:
                entry.active = None
                if entry.waiting:
                    _, entry.active = entry.waiting.popitem(last=False)
                    del self._waiting[entry.active.request_id]
                    self._due.append(entry.active)
                    self.has_news = True
            if not entry.outstanding:
                entry.idle_since_s = now_s
                if len(entry.failed) > 1:
                    last = max(entry.failed)
                    entry.failed = {last: entry.failed[last]}
                if entry.closing is not None:
                    self._end(entry, entry.closing)

    def _fail_after(self, entry: SequenceEntry, chunk: Chunk) -> None:
        """Note that a chunk has no result. Chunks that wait and rely on it fail."""
        entry.failed[chunk.era] = min(chunk.number, entry.failed.get(chunk.era, chunk.number))
        doomed = [other for other in entry.waiting.values() if other.chunk and entry.counts_on_failed(other.chunk)]
        for other in doomed:
            self._stop_waiting(other)
        if doomed:
            self.settle([(other, None, _after_failed(chunk.number)) for other in doomed])

    def cancel(self, request_id: RequestId) -> bool:
        """Give up a chunk that waits. False if no chunk of this number waits."""
        return self._give_up(request_id, CancelledError(f"request {request_id}: cancelled by the caller"))

    def stop_all(self) -> None:
        """Give up every chunk that waits, because the engine is stopped."""
        for request_id in list(self._waiting):
            self._give_up(request_id, stopped(request_id))

    def _give_up(self, request_id: RequestId, error: BatchmakerError) -> bool:
        ticket = self._waiting.get(request_id)
        if ticket is None:
            return False
        self._stop_waiting(ticket)
        self.settle([(ticket, None, error)])
        return True

    def take_due(self) -> list[Ticket]:
        """Return the chunks that have become due since the last call. The caller must begin them."""
        due, self._due = self._due, []
        return due

    def _stop_waiting(self, ticket: Ticket) -> bool:
        chunk = ticket.chunk
        if chunk is None or self._waiting.pop(ticket.request_id, None) is None:
            return False
        del chunk.sequence.waiting[ticket.request_id]
        return True

    # --- sequences -----------------------------------------------------------------------------------------------

    def open(self, entry: SequenceEntry) -> None:
        """Begin a sequence. It is idle until its first chunk comes."""
        self.opened[entry.sequence_id] = entry
        entry.idle_since_s = entry.opened_s = self._clock.now_s()
        self._watch(entry, entry.idle_since_s)

    def close(self, entry: SequenceEntry, end: SequenceEnd) -> None:
        """End a sequence once its chunks are answered."""
        entry.closing = entry.closing or end
        if not entry.outstanding:
            self._end(entry, entry.closing)

    def close_all(self, reason: str) -> None:
        """End every sequence. No chunk may be in flight."""
        for entry in list(self.opened.values()):
            self._end(entry, SequenceEnd.STOPPED, reason)

    def begin_anew(self, reason: str) -> None:
        """End every sequence, whatever its chunks were doing, and forget them: the engine has failed and answered them.

        Chunks that have not come here yet fail when they come.
        """
        self._waiting, self._due, self._late = {}, [], Deadlines()
        self.close_all(reason)
        self._closed = []  # nothing of them is left on the device

    def take_closed(self) -> list[SequenceId]:
        """Return the sequences that have ended since the last call."""
        closed, self._closed = self._closed, []
        self.has_news = bool(self._due)
        return closed

    def next_wakeup_s(self) -> float | None:
        """Engine time at which `expire` must be called; None if nothing can expire."""
        if not self.opened:
            return None
        times = [time_s for time_s in (self._idle.next_s, self._late.next_s) if time_s is not None]
        return min(times, default=None)

    def expire(self, now_s: float) -> None:
        """Give up waiting chunks whose deadline has passed, and end sequences that have been idle for too long."""
        for request_id in self._late.passed(now_s):
            ticket = self._waiting.get(request_id)
            if ticket is not None and self._stop_waiting(ticket):
                late = f"request {request_id}: its deadline passed while it waited for the chunk before it"
                self.settle([(ticket, None, DeadlineError(late))])
        for sequence_id in list(self._idle.passed(now_s)):
            entry = self.opened.get(sequence_id)
            if entry is None:
                continue
            if entry.outstanding:
                self._watch(entry, now_s)
            elif entry.idle_since_s + entry.idle_timeout_s > now_s:
                self._watch(entry, entry.idle_since_s)
            else:
                self._end(entry, SequenceEnd.IDLE, f"no chunk came for {entry.idle_timeout_s:g} s")

    def _watch(self, entry: SequenceEntry, since_s: float) -> None:
        if entry.idle_timeout_s != math.inf:
            self._idle.add(since_s + entry.idle_timeout_s, entry.sequence_id, self.opened, len(self.opened))

    def _end(self, entry: SequenceEntry, end: SequenceEnd, said: str | None = None) -> None:
        if self.opened.pop(entry.sequence_id, None) is None:
            return
        entry.ended = said or said_end(end)
        entry.state, entry.computed = NOTHING_KEPT, None
        self._closed.append(entry.sequence_id)
        self.has_news = True
        self.uncount(entry)
        if entry.on_ended is not None:
            lasted_s = self._clock.now_s() - entry.opened_s
            event = SequenceEnded(end, entry.ended, entry.next_number, lasted_s)
            call_quietly(partial(entry.on_ended, event), "on_ended of a sequence")


def said_end(end: SequenceEnd) -> str:
    """Return why a sequence has ended, in words, where `Sequence.close` or `finish` has ended it."""
    return _SAID.get(end, f"it was {end}")


_SAID: Final = {SequenceEnd.FAILED: "a chunk of it has no result", SequenceEnd.STOPPED: "what served it was stopped"}


def _after_failed(number: int) -> SequenceError:
    return SequenceError(
        f"chunk {number} of the sequence, which was sent before, has no result, and the sequence is in the state from "
        "before it. Call resume() and send on from there, or close the sequence"
    )
