"""An executor that computes nothing: every step is done as soon as somebody asks. For tests and dry runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.executor.base import StepsResult
from batchmaker.graph.spec import TypeId
from batchmaker.scheduler.commands import Reserve, RunTask, TableId


@final
class NullExecutor:
    """Finishes every submitted task at the next poll; all values are 0. Keeps no row.

    submitted: the tasks in order, if `record` is set.
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
        return self._num_workers

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify

    def await_materialise(self) -> None:
        """Nothing is compiled or measured."""

    def materialise(self, forms: Mapping[TypeId, int]) -> None:
        """Nothing is computed, so nothing is made ready."""

    def reserve(self, command: Reserve) -> None:
        self.num_rows_reserved = max(self.num_rows_reserved, command.num_rows)

    def write(self, table: TableId, rows: slice | NDArray[np.int64], values: Any) -> None:
        """Drop the values."""

    def read(self, table: TableId, row: int) -> Any:
        return 0

    def submit(self, task: RunTask) -> None:
        if self._record:
            self.submitted.append(task)
        self._waiting.append(task)
        self._notify()

    def poll(self) -> list[StepsResult]:
        done = [
            StepsResult(task.task, 0, task.num_steps, tuple(_zeros(len(f.positions)) for f in task.fetches), (), 0.0)
            for task in self._waiting
        ]
        self._waiting.clear()
        return done

    def stop(self) -> None:
        """Nothing runs, so nothing is left to finish."""


def _zeros(count: int) -> Tensor:
    """Return numbers in place of values of whatever shape."""
    return torch.zeros(count, dtype=torch.int64)
