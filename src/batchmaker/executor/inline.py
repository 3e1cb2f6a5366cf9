"""The CPU executor for one worker: the engine's own thread computes, one step at each poll.

Nothing overlaps, and nothing contends: a worker thread would give up the interpreter at every operation and get it back
only when the engine's thread lets go of it. With steps of less than a millisecond that costs more than it hides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import final

import torch

from batchmaker.cells.binding import BoundCell
from batchmaker.errors import RAISED_BY_USERS
from batchmaker.executor.base import StepResult, failed_results
from batchmaker.executor.computing import ComputingExecutor
from batchmaker.executor.cpu import default_threads
from batchmaker.graph.spec import CellType
from batchmaker.scheduler.commands import RunTask


@final
class InlineExecutor(ComputingExecutor):
    """Runs the steps of submitted tasks in the thread that polls.

    types, cells: by type id, may grow while running. num_threads: compute threads of one step.
    """

    def __init__(
        self, types: Sequence[CellType], cells: Sequence[BoundCell], *, num_threads: int | None = None
    ) -> None:
        super().__init__(types, cells, default_threads() if num_threads is None else num_threads)
        self._tasks: deque[RunTask] = deque()
        self._running: Iterator[StepResult] | None = None
        self._num_finished = 0
        self._ready = False

    @property
    def num_workers(self) -> int:
        return 1

    def submit(self, task: RunTask) -> None:
        self._tasks.append(task)
        self._notify()

    def poll(self) -> list[StepResult]:
        """Run one step, if any is left, and return its result."""
        if not self._tasks:
            return []
        if not self._ready:
            torch.set_num_threads(self._num_threads)
            self._ready = True
        task = self._tasks[0]
        try:
            with torch.no_grad():
                if self._running is None:
                    self._running = self._runner.run(task)
                results = [next(self._running)]
        except RAISED_BY_USERS as error:  # rows that do not fit, memory: the task fails, nothing else
            results = failed_results(task, self._num_finished, error)
        self._num_finished += len(results)
        if self._num_finished == len(task.steps):
            self._running = None
            self._num_finished = 0
            self._tasks.popleft()
        if self._tasks:
            self._notify()
        return results

    def stop(self) -> None:
        """Nothing runs between polls, so nothing is left to finish."""
