"""Telling the engine that steps have finished, by looking at the counters that the devices set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from batchmaker.executor.cuda.place import Place

LOOK_EVERY_S = 50e-6
CHECK_EVERY_S = 1.0
"""A device that finishes nothing for so long, with work at hand, is asked whether it still lives."""


@final
class Watcher:
    """A thread that looks at the places' counters while something is submitted, and sleeps otherwise.

    notify: called when a counter has moved, and every CHECK_EVERY_S while none does.
    """

    def __init__(self, places: Sequence[Place], notify: Callable[[], None]) -> None:
        self._places = places
        self._notify = notify
        self._busy = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._watch, name="batchmaker-watcher", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something was submitted."""
        self._busy.set()

    def stop(self) -> None:
        """End the thread."""
        self._over = True
        self._busy.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = [0] * len(self._places)
        heard_s = time.monotonic()
        while True:
            if not self._busy.wait(timeout=0):
                self._busy.wait()
                heard_s = time.monotonic()
            if self._over:
                return
            self._busy.clear()
            now = [place.num_finished for place in self._places]
            if any(done < place.num_submitted for done, place in zip(now, self._places, strict=True)):
                self._busy.set()
            if now != seen or time.monotonic() - heard_s > CHECK_EVERY_S:
                seen, heard_s = now, time.monotonic()
                self._notify()
            time.sleep(LOOK_EVERY_S)
