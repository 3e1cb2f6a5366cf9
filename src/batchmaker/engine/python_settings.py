"""What an engine changes in the interpreter of its process when it starts."""

from __future__ import annotations

import gc
import sys
from typing import Final

SWITCH_INTERVAL_S: Final = 5e-4
"""Seconds. A worker gives up the interpreter at each operation. It waits at most this long to get it back while another
thread runs Python. With Python's default of 5 ms, steps of 1 ms take 5 ms."""

COLLECT_AFTER: Final = 10_000
"""New objects after which the garbage collector looks at the young ones. Python's default is 700, the objects of about
twenty requests. Most of these are still in use, so each look costs time and finds nothing."""


def tune_interpreter() -> None:
    """Let threads take turns more often, and let the garbage collector look at more objects at once.

    Both are settings of the whole process. An interval that is shorter already, a larger number, and a collector that
    is off stay as they are.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    young, *older = gc.get_threshold()
    if 0 < young < COLLECT_AFTER:
        gc.set_threshold(COLLECT_AFTER, *older)
