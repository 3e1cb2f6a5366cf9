"""The first start of an installation compiles the scheduler's loops: seconds, and whoever waits is told why."""

from __future__ import annotations

import logging
import threading
from typing import Final

import numpy as np

from batchmaker.compile.passes import interpreter
from batchmaker.executor.task_steps import by_table
from batchmaker.scheduler.warm_up import prepare

_WORTH_TELLING_S: Final = 2.0


def prepare_scheduler() -> None:
    """The scheduler's loops, and those for cells and rows, are compiled or loaded. Says so at INFO after 2 s."""
    told = "compiling the scheduler's loops: some seconds, once per installation"
    notice = threading.Timer(_WORTH_TELLING_S, logging.getLogger(__name__).info, [told])
    notice.daemon = True
    notice.start()
    try:
        prepare()
        interpreter.prepare()
        by_table(np.zeros(2, np.int64), np.zeros(2, np.int64))
    finally:
        notice.cancel()
