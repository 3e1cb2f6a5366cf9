"""The CPU executor for one worker: the engine's own thread computes, one step at each poll.

Nothing overlaps, and nothing contends: a worker thread would give up the interpreter at every operation and get it back
only when the engine's thread lets go of it. With steps of less than a millisecond that costs more than it hides.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from batchmaker.cells.binding import BoundCell
from batchmaker.errors import OptionError
from batchmaker.executor.base import StepResult, failed_results
from batchmaker.executor.cpu import default_threads
from batchmaker.executor.stepping import RanStep, TaskRunner
from batchmaker.executor.tables import StateTables
from batchmaker.graph.spec import CellType
from batchmaker.scheduler.commands import Reserve, RunTask, TableId


@final
class InlineExecutor:
    """Runs the steps of submitted tasks in the thread that polls.

    types, cells: by type id, may grow while running. num_threads: compute threads of one step.
    """

    def __init__(
        self, types: Sequence[CellType], cells: Sequence[BoundCell], *, num_threads: int | None = None
    ) -> None:
        self._num_threads = default_threads() if num_threads is None else num_threads
        if self._num_threads < 1:
            raise OptionError(f"num_threads must be at least 1, got {self._num_threads}")
        self._tables = StateTables()
        self._runner = TaskRunner(types, cells, self._tables)
        self._tasks: deque[RunTask] = deque()
        self._running: Iterator[RanStep] | None = None
        self._num_finished = 0
        self._notify: Callable[[], None] = lambda: None
        self._ready = False

    @property
    def num_workers(self) -> int:
        return 1

    @property
    def num_threads(self) -> int:
        """Compute threads of one step."""
        return self._num_threads

    @property
    def table_bytes(self) -> int:
        """Bytes of state tables allocated."""
        return self._tables.num_bytes

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def reserve(self, command: Reserve) -> None:
        self._tables.reserve(command)

    def write(self, table: TableId, first_row: int, values: Any) -> None:
        self._tables.write(table, first_row, values)

    def read(self, table: TableId, row: int) -> Any:
        value = self._tables[table][row]
        return value.item() if value.ndim == 0 else value.clone()

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
        begin = time.perf_counter()
        try:
            with torch.no_grad():
                if self._running is None:
                    self._running = self._runner.run(task)
                ran = next(self._running)
            results = [StepResult(task.task, ran.step, ran.fetched, ran.failed, time.perf_counter() - begin)]
        except Exception as error:  # rows that do not fit, memory: the task fails, nothing else
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
