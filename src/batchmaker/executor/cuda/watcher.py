"""A thread that tells the engine when steps have finished. It looks at the counters that the devices set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

LOOK_EVERY_S = 50e-6
"""Seconds between two looks at the counters."""
CHECK_EVERY_S = 1.0
"""Seconds. If a device has work but finishes nothing for this long, it is asked whether it has failed."""


class Counting(Protocol):
    """Something with a counter that a device sets: numbers of the last work submitted and finished."""

    num_submitted: int

    @property
    def num_finished(self) -> int: ...


@final
class Watcher:
    """A thread that looks at the counters of all places while they have work, and sleeps otherwise.

    notify: called when a counter has changed, and every CHECK_EVERY_S while none changes.
    """

    def __init__(self, places: Sequence[Counting], notify: Callable[[], None]) -> None:
        self._places = list(places)
        self._notify = notify
        self._busy = threading.Event()
        self._has_ended = False
        self._thread = threading.Thread(target=self._watch, name="batchmaker-watcher", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Note that something was submitted."""
        self._busy.set()

    def watch(self, watched: Counting) -> None:
        """Look at another counter, too."""
        # Race: the thread reads the list at each look, and sees the new one in one of the next.
        self._places = [*self._places, watched]

    def stop(self) -> None:
        """End the thread."""
        self._has_ended = True
        self._busy.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = [0] * len(self._places)
        heard_s = time.monotonic()
        while True:
            if not self._busy.wait(timeout=0):
                self._busy.wait()
                heard_s = time.monotonic()
            if self._has_ended:
                return
            # Race: another thread submits work and then calls `wake`. Clear first, then look: work that the look misses
            # sets the event after the clear.
            self._busy.clear()
            places = self._places
            now = [place.num_finished for place in places]
            if any(done < place.num_submitted for done, place in zip(now, places, strict=True)):
                self._busy.set()
            if now != seen or time.monotonic() - heard_s > CHECK_EVERY_S:
                seen, heard_s = now, time.monotonic()
                self._notify()
            time.sleep(LOOK_EVERY_S)
