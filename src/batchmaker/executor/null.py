"""An executor that computes nothing: every task is finished at the next poll. For tests and for measuring overheads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.core.commands import Reserve, RunTask, TableId
from batchmaker.executor.base import StepsResult
from batchmaker.graph.spec import TypeId


@final
class NullExecutor:
    """Finishes every submitted task at the next poll. All values are 0, and no row is stored.

    submitted: the tasks in order, if `record` is set. num_rows_reserved: the most rows that a table was to have.
    """

    def __init__(self, num_workers: int = 1, *, record: bool = False) -> None:
        self._num_workers = num_workers
        self._waiting: deque[RunTask] = deque()
        self._notify: Callable[[], None] = lambda: None
        self._record = record
        self.submitted: list[RunTask] = []
        self.num_rows_reserved = 0

    @property
    def num_workers(self) -> int:
        """Number of workers, as given."""
        return self._num_workers

    def start(self, notify: Callable[[], None]) -> None:
        """Keep `notify`. Starts no thread."""
        self._notify = notify

    def await_materialise(self) -> None:
        """Nothing is compiled or measured."""

    def materialise(self, forms: Mapping[TypeId, int]) -> None:
        """Do nothing, since no cell will run."""

    def reserve(self, command: Reserve) -> None:
        """Note the number of rows. Allocates nothing."""
        self.num_rows_reserved = max(self.num_rows_reserved, command.num_rows)

    def write(self, table: TableId, rows: slice | NDArray[np.int64], values: Any) -> None:
        """Drop the values."""

    def put(self, table: TableId, row: int, value: Any) -> None:
        """Drop the value."""

    def read(self, table: TableId, row: int) -> Any:
        """Return 0, whatever the shape of the row."""
        return 0

    def submit(self, task: RunTask) -> None:
        """Keep a task for the next `poll`, and call `notify` at once."""
        if self._record:
            self.submitted.append(task)
        self._waiting.append(task)
        self._notify()

    def poll(self) -> list[StepsResult]:
        """Return all tasks since the last call as finished. Fetched values are [count] int64 zeros."""
        done = [
            StepsResult(task.task, 0, task.num_steps, tuple(_zeros(len(f.positions)) for f in task.fetches), (), 0.0)
            for task in self._waiting
        ]
        self._waiting.clear()
        return done

    def stop(self) -> None:
        """Do nothing: no step is running."""

    def anew(self) -> NullExecutor:
        """Return another with the same options."""
        return NullExecutor(self._num_workers, record=self._record)


def _zeros(count: int) -> Tensor:
    """Return [count] numbers, in place of values of any shape."""
    return torch.zeros(count, dtype=torch.int64)
