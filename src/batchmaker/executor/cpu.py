"""The CPU executor for several workers: one thread per worker, and one set of state tables for all."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch

from batchmaker.compile.binding import BoundCell
from batchmaker.errors import RAISED_BY_USERS, OptionError
from batchmaker.executor.base import StepsResult, failed_result
from batchmaker.executor.compute import ComputingExecutor
from batchmaker.executor.processors import default_threads
from batchmaker.graph.spec import CellType
from batchmaker.scheduler.commands import Reserve, RunTask


@final
class CpuExecutor(ComputingExecutor):
    """Runs tasks on worker threads. PyTorch releases the interpreter inside each operation, so workers overlap.

    types, cells: by type id; may grow while running. num_threads: compute threads of each worker; None:
    `default_threads`. OptionError if a number is below 1.
    """

    def __init__(
        self,
        types: Sequence[CellType],
        cells: Sequence[BoundCell],
        *,
        num_workers: int = 1,
        num_threads: int | None = None,
    ) -> None:
        if num_workers < 1:
            raise OptionError(f"num_workers must be at least 1, got {num_workers}")
        super().__init__(types, cells, default_threads(num_workers) if num_threads is None else num_threads)
        self._queues: list[queue.SimpleQueue[RunTask | None]] = [queue.SimpleQueue() for _ in range(num_workers)]
        self._threads: list[threading.Thread] = []
        # Race: workers append to this, and only the engine's thread takes from it. Each is one operation on a deque.
        self._results: deque[StepsResult] = deque()
        self._idle = threading.Condition()
        self._num_submitted = 0
        self._num_done = 0

    @property
    def num_workers(self) -> int:
        """Number of worker threads."""
        return len(self._queues)

    def start(self, notify: Callable[[], None]) -> None:
        """Start a thread for each worker. They call `notify` after every report."""
        super().start(notify)
        for number, tasks in enumerate(self._queues):
            thread = threading.Thread(target=self._work, args=(tasks,), name=f"batchmaker-worker-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def reserve(self, command: Reserve) -> None:
        """Create or grow state tables. If rows must move, wait until all workers have finished their tasks."""
        if self._tables.must_move(command):
            with self._idle:
                self._idle.wait_for(lambda: self._num_done == self._num_submitted)
        super().reserve(command)

    def submit(self, task: RunTask) -> None:
        """Put a task into the queue of its worker."""
        self._num_submitted += 1
        self._queues[task.worker].put(task)

    def poll(self) -> list[StepsResult]:
        """Return what the workers have reported since the last call. Never waits."""
        results: list[StepsResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def stop(self) -> None:
        """Let every worker finish its queue, and wait until all threads have ended."""
        for tasks in self._queues:
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def anew(self) -> CpuExecutor:
        """See Executor.anew. It has threads of its own."""
        return CpuExecutor(self._types, self._cells, num_workers=self.num_workers, num_threads=self._num_threads)

    def _work(self, tasks: queue.SimpleQueue[RunTask | None]) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.no_grad():
            while (task := tasks.get()) is not None:
                first = 0
                try:
                    running = self._runner.begin(task)
                    while (first := running.num_finished) < task.num_steps:
                        self._results.append(running.advance())
                        self._notify()
                except RAISED_BY_USERS as error:  # such as too little memory: only this task fails
                    self._results.append(failed_result(task, first, error))
                    self._notify()
                with self._idle:
                    self._num_done += 1
                    self._idle.notify_all()
