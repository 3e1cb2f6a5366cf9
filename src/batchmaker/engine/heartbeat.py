"""The state of an engine's thread, and a watchdog that answers late requests while it hangs. Worker uses it."""

from __future__ import annotations

import logging
import math
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final, NamedTuple, final

HUNG_AFTER_S: Final = 5.0
"""Seconds. If one turn of the engine's thread takes longer, the thread is taken to hang."""

_PATIENCE_S: Final = 0.05
"""Seconds. While a turn is shorter, late requests are left to the engine's thread."""
_OFTEN_S: Final = 0.05
_SELDOM_S: Final = 1.0
"""Seconds between two looks of the watchdog: _OFTEN_S while deadlines are ahead, otherwise _SELDOM_S."""
_LOG = logging.getLogger("batchmaker.engine")


class Heartbeat(NamedTuple):
    """A snapshot of an engine's thread.

    alive: it has been started and has not ended. doing: its activity in words, "waiting" while it has nothing to do.
    age_s: seconds since its present turn began; while it waits, since the last one began. busy_for_s: seconds in the
    present turn, 0 while it waits. starting: what the start of the engine does, in words; "" before and after it.
    compiling: what is compiled for its first use now, in words; "" if nothing is.
    """

    alive: bool
    doing: str
    age_s: float
    busy_for_s: float
    starting: str = ""
    compiling: str = ""


@final
class Watchdog:
    """Watches an engine's thread from another thread: answers late requests while a turn takes long, logs a hang once.

    While cells are compiled and tried, at the engine's start or at their first use, a long turn is no hang; what takes
    long is logged once then.

    now_s: reads the engine's clock. heartbeat: takes a snapshot of the engine's thread. thread: returns the number of
    that thread, None while there is none. answer_late: answers every request whose deadline has passed. hung_after_s:
    see HUNG_AFTER_S. `look` checks once. `start` begins a thread that looks twenty times a second while deadlines are
    ahead, and once a second otherwise.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        heartbeat: Callable[[], Heartbeat],
        thread: Callable[[], int | None],
        answer_late: Callable[[Heartbeat], None],
        *,
        hung_after_s: float = HUNG_AFTER_S,
    ) -> None:
        self._now_s = now_s
        self._heartbeat = heartbeat
        self._watched = thread
        self._answer_late = answer_late
        self.hung_after_s = hung_after_s
        self._has_told = False
        self._prepares, self._since_s = "", 0.0
        self._prepared_s = -math.inf
        self._last_due_s = -1.0
        self._seldom = False
        self._woken = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="batchmaker-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watchdog's thread, and wait for its end."""
        self._ended = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def expect(self, due_s: float) -> None:
        """Note that a request with this deadline has come. Any thread may call this, but only one at a time."""
        if due_s <= self._last_due_s:
            return
        # Race: the watchdog sets `_seldom` and then reads the deadline. This thread writes the deadline and then reads
        # `_seldom`. So either the watchdog sees the new deadline, or this thread sees `_seldom` and wakes the watchdog.
        self._last_due_s = due_s
        if self._seldom:
            self._woken.set()

    def look(self) -> None:
        """Check the engine's thread once: answer late requests if its turn takes long, log if a hang begins or ends."""
        beat = self._heartbeat()
        if beat.busy_for_s >= _PATIENCE_S:
            self._answer_late(beat)
        if self._prepares_cells(beat):
            return
        # A turn goes on for a moment after its cells are compiled.
        busy_s = min(beat.busy_for_s, self._now_s() - self._prepared_s)
        hung = beat.alive and busy_s >= self.hung_after_s and beat.doing != "stopping"
        if hung and not self._has_told:
            _LOG.warning(
                "the engine's thread has been busy with one turn for %.1f s (%s); nobody is served meanwhile. Its "
                "stack:\n%s",
                beat.busy_for_s,
                beat.doing,
                stack_of(self._watched()),
            )
        elif self._has_told and not hung:
            _LOG.warning("the engine's thread goes on")
        self._has_told = hung

    def _prepares_cells(self, beat: Heartbeat) -> bool:
        """Whether the engine starts or compiles a cell. Logs what takes long; each thing is logged once."""
        now_s, prepares = self._now_s(), beat.starting or beat.compiling
        if prepares:
            self._prepared_s = now_s
        if prepares != self._prepares:
            self._prepares, self._since_s = prepares, now_s
        elif prepares and now_s - self._since_s >= self.hung_after_s:
            taken_s, self._since_s = now_s - self._since_s, math.inf
            if beat.starting:
                _LOG.info("the engine is still starting: it %s, for %.1f s now", prepares, taken_s)
            else:
                _LOG.warning(
                    "the engine %s for the first request that needs them, for %.1f s now, and serves nobody meanwhile; "
                    "with an example_request in the model it does so when it starts",
                    prepares,
                    taken_s,
                )
        return bool(prepares)

    def _run(self) -> None:
        while not self._ended:
            self._woken.wait(self.interval_s())
            self._woken.clear()
            if not self._ended:
                self.look()

    def interval_s(self) -> float:
        """Return the seconds until the next look. `expect` explains the order of the first two lines."""
        self._seldom = True
        if self._now_s() > self._last_due_s + _SELDOM_S:
            return _SELDOM_S
        self._seldom = False
        return _OFTEN_S


def stack_of(thread: int | None) -> str:
    """Return the stack of a thread in the form of a traceback; "" if there is no such thread."""
    frame = None if thread is None else sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
