"""The CPU executor for one worker: the engine's own thread computes a part of a task at each poll.

A worker thread would give up the interpreter at every operation. It would get it back only when the engine's thread
gives it up. With steps of less than a millisecond this costs more time than the second thread saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

import torch

from batchmaker.compile.binding import BoundCell
from batchmaker.core.commands import RunTask
from batchmaker.errors import RAISED_BY_USERS
from batchmaker.executor.base import LoopTests, StepsResult, failed_result
from batchmaker.executor.compute import ComputingExecutor
from batchmaker.executor.processors import default_threads
from batchmaker.executor.task_steps import RunningTask
from batchmaker.graph.spec import CellType, TypeId


@final
class InlineExecutor(ComputingExecutor):
    """Runs the steps of submitted tasks in the thread that polls.

    types, cells: by type id; may grow while running. num_threads: compute threads of one step; None: `default_threads`.
    """

    def __init__(
        self, types: Sequence[CellType], cells: Sequence[BoundCell], *, num_threads: int | None = None
    ) -> None:
        super().__init__(types, cells, default_threads() if num_threads is None else num_threads)
        self._tasks: deque[RunTask] = deque()
        self._running: RunningTask | None = None
        self._ready = False
        self._tests: LoopTests | None = None

    @property
    def num_workers(self) -> int:
        """Always 1: the thread that polls."""
        return 1

    def apply_stop_tests(self, tests: LoopTests) -> None:
        """Apply these stop tests between the steps of each task from now on."""
        self._tests = tests

    def submit(self, task: RunTask) -> None:
        """Queue a task. Its steps run during later calls of `poll`."""
        self._tasks.append(task)
        self._notify()

    @property
    def only_task(self) -> RunTask | None:
        """The task that waits, if it is the only one, nothing of it has run, and it may run in a compiled loop."""
        if len(self._tasks) != 1 or self._running is not None or not self._runner.in_loops:
            return None
        if not self._ready:
            self._prepare_thread()
        return self._tasks[0]

    def ran(self, types: Iterable[TypeId]) -> None:
        """Note that the only task has run, and others after it, all in compiled loops. types: of all these."""
        self._tasks.clear()
        for type_id in types:
            self._runner.counts[type_id].in_loop += 1

    def poll(self) -> list[StepsResult]:
        """Run steps of the first task for about REPORT_S, at least one, and return their result. [] without a task."""
        if not self._tasks:
            return []
        if not self._ready:
            self._prepare_thread()
        task, first = self._tasks[0], 0
        try:
            if self._running is None:
                self._running = self._runner.begin(task, None if task.may_stop is None else self._tests)
                if self._tests is not None:
                    self._tests.begin_task()
            first = self._running.num_finished
            result = self._running.advance()
        except RAISED_BY_USERS as error:  # such as too little memory: only this task fails
            result = failed_result(task, first, error)
        if result.end == len(task.ends):
            self._running = None
            self._tasks.popleft()
            if self._tests is not None:
                self._tests.end_task()
        if self._tasks:
            self._notify()
        return [result]

    def compute(self, task: RunTask) -> list[StepsResult]:
        """Run the steps of a task now, without stop tests, and return their results: up to the first with a failure."""
        if not self._ready:
            self._prepare_thread()
        running, results = self._runner.begin(task), list[StepsResult]()
        while running.num_finished < len(task.ends):
            results.append(running.advance())
            if results[-1].failed:
                break
        return results

    def _prepare_thread(self) -> None:
        """Give the thread that computes, always the same one, its number of compute threads."""
        torch.set_num_threads(self._num_threads)
        self._ready = True

    def stop(self) -> None:
        """Do nothing: no step runs between two polls."""

    def anew(self) -> InlineExecutor:
        """See Executor.anew. The stop tests are to be given to it."""
        return InlineExecutor(self._types, self.cells, num_threads=self._num_threads)

    def beside(self) -> InlineExecutor:
        """Return an executor with state tables of its own, whose steps are counted with those of this one."""
        other = self.anew()
        other._runner.counts = self._runner.counts
        return other
