"""The common base of the executors that compute on the CPU: state tables, a task runner, and compute threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.binding import BoundCell
from batchmaker.compile.run_form import RunForm, run_form
from batchmaker.core.commands import Reserve, RunTask, TableId
from batchmaker.errors import OptionError
from batchmaker.executor.base import RunCounts, StepsResult
from batchmaker.executor.state_tables import StateTables
from batchmaker.executor.task_loop import HOISTED_SIZES
from batchmaker.executor.task_steps import TaskRunner
from batchmaker.graph.spec import CellType, TypeId


class ComputingExecutor(ABC):
    """An Executor whose workers share one set of state tables. Subclasses decide in which thread a task runs, and when.

    types, cells: by type id; may grow while running. num_threads: compute threads of each worker; OptionError below 1.
    """

    def __init__(self, types: Sequence[CellType], cells: Sequence[BoundCell], num_threads: int) -> None:
        if num_threads < 1:
            raise OptionError(f"num_threads must be at least 1, got {num_threads}")
        self._num_threads = num_threads
        self._types = types
        self.cells = cells
        self._tables = StateTables()
        self._runner = TaskRunner(types, cells, self._tables)
        self._notify: Callable[[], None] = lambda: None

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers."""
        ...

    @property
    def num_threads(self) -> int:
        """Compute threads of each worker."""
        return self._num_threads

    @property
    def addresses(self) -> Ints:
        """[tables] the address of row 0 of each state table, by its number."""
        return self._tables.addresses

    @property
    def table_bytes(self) -> int:
        """Bytes of all state tables, written or not."""
        return self._tables.num_bytes

    def start(self, notify: Callable[[], None]) -> None:
        """Keep `notify`. Starts no thread."""
        self._notify = notify

    def await_materialise(self) -> None:
        self._runner.in_loops = False

    def materialise(self, forms: Mapping[TypeId, int]) -> None:
        """Run every cell once at every supported size. This makes programs, primitives, packed weights and pages.

        See Executor.materialise, and BatchMaker 6.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            with torch.no_grad():
                for cell_type, bound in zip(self._types, self.cells, strict=False):
                    s = forms.get(cell_type.type_id)
                    if s is None:
                        bound.warm_up(cell_type.batch_sizes)
                    else:
                        bound.split(s).warm_up(cell_type.batch_sizes, HOISTED_SIZES if s else ())
        finally:
            torch.set_num_threads(before)
            self._runner.in_loops = True

    def run_form(self, type_id: TypeId, num_step_inputs: int | None, ends: frozenset[str]) -> RunForm:
        """See TellsForms."""
        cell = self.cells[type_id]
        return run_form(cell if num_step_inputs is None else cell.split(num_step_inputs), ends)

    def counted(self, type_id: TypeId) -> RunCounts:
        """See TellsForms."""
        return self._runner.counts[type_id]

    def reserve(self, command: Reserve) -> None:
        """Create or grow state tables. If rows must move, no step may be running."""
        self._tables.reserve(command)

    def write(self, table: TableId, rows: slice | NDArray[np.int64], values: Any) -> None:
        """See Executor.write. Copies at once, in the calling thread."""
        self._tables.write(table, rows, values)

    def put(self, table: TableId, row: int, value: Tensor) -> None:
        """See Executor.put. Copies at once."""
        self._tables[table][row] = value

    def read(self, table: TableId, row: int) -> Any:
        """See Executor.read. Never waits."""
        value = self._tables[table][row]
        return value.item() if value.ndim == 0 else value.clone()

    @abstractmethod
    def submit(self, task: RunTask) -> None:
        """See Executor.submit."""
        ...

    @abstractmethod
    def poll(self) -> list[StepsResult]:
        """See Executor.poll."""
        ...

    @abstractmethod
    def stop(self) -> None:
        """See Executor.stop."""
        ...

    @abstractmethod
    def anew(self) -> ComputingExecutor:
        """See Executor.anew."""
        ...
