"""Signs of life of an engine's thread, and somebody who looks at them and answers in its place while it hangs."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Final, NamedTuple, final

HUNG_AFTER_S: Final = 5.0
"""One turn of the engine's thread that takes longer than this is no longer taken for work: it hangs."""

_PATIENCE_S: Final = 0.05
"""Who is late is left to the engine's thread unless its turn has taken longer than this."""
_OFTEN_S: Final = 0.05
_SELDOM_S: Final = 1.0
_LOG = logging.getLogger("batchmaker.engine")


class Heartbeat(NamedTuple):
    """What an engine's thread did when somebody looked.

    alive: it has been started and has not ended. doing: in words; "waiting" for something to do. age_s: seconds since
    its present turn began, or its last one while it waits. busy_for_s: seconds in the present turn, 0 while it waits.
    """

    alive: bool
    doing: str
    age_s: float
    busy_for_s: float


@final
class Watchdog:
    """Looks at an engine's thread from another one: answers who is late while a turn takes long, and logs a hang once.

    heartbeat: of the engine's thread. thread: the number of that thread, None while there is none. answer_late: answers
    every request whose deadline has passed. `look` does all of it; `start` lets a thread look, twenty times a second
    while deadlines are ahead and once a second otherwise.
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
        self._hung_after_s = hung_after_s
        self._has_told = False
        self._last_due_s = -1.0
        self._seldom = False
        self._woken = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="batchmaker-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Returns once its thread has ended."""
        self._ended = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()

    def expect(self, due_s: float) -> None:
        """A request with this deadline has come. Any thread, one at a time."""
        if due_s <= self._last_due_s:
            return
        self._last_due_s = due_s  # before the look at `_seldom`, which the watchdog sets before it looks at this one
        if self._seldom:
            self._woken.set()

    def look(self) -> None:
        """See how the engine's thread does, and do what it cannot."""
        beat = self._heartbeat()
        if beat.busy_for_s >= _PATIENCE_S:
            self._answer_late(beat)
        hung = beat.alive and beat.busy_for_s >= self._hung_after_s and beat.doing != "stopping"
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

    def _run(self) -> None:
        while not self._ended:
            self._woken.wait(self._interval_s())
            self._woken.clear()
            if not self._ended:
                self.look()

    def _interval_s(self) -> float:
        self._seldom = True
        if self._now_s() > self._last_due_s + _SELDOM_S:
            return _SELDOM_S
        self._seldom = False
        return _OFTEN_S


def stack_of(thread: int | None) -> str:
    """Return what a thread does now, as a traceback shows it; "" if there is no such thread."""
    frame = None if thread is None else sys._current_frames().get(thread)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
