"""What an engine changes in the interpreter of its process: settings, and when signals are handled."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, final

SWITCH_INTERVAL_S: Final = 5e-4
"""Seconds. A worker gives up the interpreter at each operation. It waits at most this long to get it back while another
thread runs Python. With Python's default of 5 ms, steps of 1 ms take 5 ms."""

COLLECT_AFTER: Final = 10_000
"""New objects after which the garbage collector looks at the young ones. Python's default is 700, the objects of about
twenty requests. Most of these are still in use, so each look costs time and finds nothing."""

_NAMES: Final = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF")
_SIGNALS: Final = tuple([int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)])


def tune_interpreter() -> None:
    """Let threads take turns more often, and let the garbage collector look at more objects at once.

    Both are settings of the whole process. An interval that is shorter already, a larger number, and a collector that
    is off stay as they are.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    young, *older = gc.get_threshold()
    if 0 < young < COLLECT_AFTER:
        gc.set_threshold(COLLECT_AFTER, *older)


@final
class SignalsLater:
    """Within it, Python's handlers of signals do not run; they do at its end. A second signal runs its own at once.

    Python runs handlers in the main thread, between any two operations, and most raise. What may not end half-way is
    put here. In other threads it does nothing. `_signal` is `signal` without enums, which would take as long as all
    else that a short request needs.
    """

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._before: list[tuple[int, Callable[[int, FrameType | None], Any]]] = []
        self._came: list[tuple[Callable[[int, FrameType | None], Any], int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _SIGNALS:
                if callable(handler := _signal.getsignal(number)):
                    self._before.append((number, handler))
                    _signal.signal(number, self._note)
        except BaseException:  # of a handler that still ran
            self._put_back()
            raise

    def __exit__(self, *_: object) -> None:
        self._put_back()
        while self._came:
            handler, number, frame = self._came.pop()
            handler(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        handler = dict(self._before)[number]
        if self._came:  # who asks again does not want to wait
            handler(number, frame)
            return
        self._came.append((handler, number, frame))

    def _put_back(self) -> None:
        try:
            while self._before:
                _signal.signal(*self._before[-1])
                self._before.pop()
        finally:  # a handler that is back may have raised
            if self._before:
                self._put_back()
