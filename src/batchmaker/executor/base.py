"""The interface between the engine and a device: tasks go in, finished steps come out, and submitting never blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.run_form import RunForm
from batchmaker.core.commands import Reserve, RunTask, TableId
from batchmaker.core.events import TaskId
from batchmaker.errors import said_by
from batchmaker.graph.spec import TypeId


@dataclass(slots=True)
class StepsResult:
    """Steps `first` to before `end` of a task have finished.

    - fetched: for each fetch of the task, the values at its positions that are of these steps, [count, *shape], on the
      host. Nobody else writes to their memory. Empty if the steps failed as a whole.
    - failed: positions of the task at which the cell or a stop test raised, with the reason. Their values are
      undefined.
    - busy_s: seconds that the steps took on their worker.
    - stopped: [positions of these steps] where loops have ended; None if the executor has not applied the stop tests.
    - skipped: [positions of these steps] which rows did not run, because their loop had ended before; None as for
      `stopped`. Their values are undefined.
    """

    task: TaskId
    first: int
    end: int
    fetched: tuple[Tensor, ...]
    failed: tuple[tuple[int, str], ...]
    busy_s: float
    stopped: NDArray[np.bool_] | None = None
    skipped: NDArray[np.bool_] | None = None


NO_LOOP: Final = -1
"""The number of a test for nodes that are in no loop that ends at a value."""


class LoopTests(Protocol):
    """The stop tests of the loops in flight. See `batchmaker.engine.stop_tests.StopTests` for its arrays."""

    test_of: NDArray[np.int64]
    last: NDArray[np.int64]
    ended: NDArray[np.bool_]
    constants: NDArray[np.int64]
    is_constant: NDArray[np.bool_]
    output_of: NDArray[np.int64]
    outputs: Counter[int]

    def begin_task(self) -> None:
        """Note that a task begins to run, step by step. Reports may be handled between two steps."""

    def end_task(self) -> None:
        """Note that no further step of the task will run."""

    def running(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of these nodes of the task run, [nodes]. A node does not run if its loop has ended before it."""

    def apply(
        self, cell: str, nodes: NDArray[np.int64], values: Tensor, output: int = 0
    ) -> tuple[NDArray[np.bool_], tuple[tuple[int, str], ...]]:
        """Test loops after their steps at these nodes. values: [nodes, *shape] of an output that tests look at.

        cell: its name. Returns which loops have ended, [nodes], and the indices in `nodes` at which a test raised, with
        the reason.
        """


def failed_result(task: RunTask, first: int, error: BaseException, end: int | None = None) -> StepsResult:
    """Return a result in which every row of steps `first` to before `end` has failed; end=None: all that are left."""
    end = task.num_steps if end is None else end
    reason = f"a step of this request failed: {said_by(error)}"
    positions = range(task.begin_of(first), task.begin_of(end))
    return StepsResult(task.task, first, end, (), tuple((position, reason) for position in positions), 0.0)


@dataclass(slots=True)
class RunCounts:
    """How many steps of a cell type have run in one call for a task, and how many one by one."""

    in_loop: int = 0
    one_by_one: int = 0


@runtime_checkable
class TellsForms(Protocol):
    """An executor that can tell in which form a cell runs on its device."""

    def run_form(self, type_id: TypeId, num_step_inputs: int | None, ends: frozenset[str]) -> RunForm:
        """Return the form, and why no faster one. num_step_inputs: None for single nodes. ends: see run_form."""
        ...

    def counted(self, type_id: TypeId) -> RunCounts:
        """Return the counts of a cell type since the start."""
        ...


class Executor(Protocol):
    """One kind of device with one or more workers. The engine's thread calls its methods, except `start`,
    `await_materialise` and `materialise`, which the thread calls that starts the engine.

    `submit` returns at once. Tasks of one worker run in order, and several may be in flight. When steps of a task have
    finished, one or several together, the executor calls `notify` (from any thread). The next `poll` returns them, in
    order for each task.
    """

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        ...

    def start(self, notify: Callable[[], None]) -> None:
        """Start the workers. notify: is cheap, and may be called from any thread."""

    def await_materialise(self) -> None:
        """Example requests come first, and `materialise` after them: until then, compile no loops in tasks.

        Does nothing if tasks need none.
        """

    def materialise(self, forms: Mapping[TypeId, int]) -> None:
        """Do what is needed once for each batch size of each known cell type, before the first request needs it.

        forms: type id -> number of inputs per step, for the types that run as chains. Nothing is submitted meanwhile.
        """

    def reserve(self, command: Reserve) -> None:
        """Create or grow state tables. May wait for running steps, if rows must move."""

    def write(self, table: TableId, rows: slice | NDArray[np.int64], values: Any) -> None:
        """Write host values [count, ...] into rows that no submitted step reads."""

    def put(self, table: TableId, row: int, value: Tensor) -> None:
        """Write a value from the host into a row of a table of outputs that no submitted step reads."""

    def read(self, table: TableId, row: int) -> Any:
        """Return a copy of one row; a Python number if it is a scalar. No submitted step writes this row."""

    def submit(self, task: RunTask) -> None:
        """Let the worker run the steps of a task, in order, after its earlier tasks."""

    def poll(self) -> list[StepsResult]:
        """Return the steps that have finished since the last call."""

    def stop(self) -> None:
        """Finish all submitted tasks, then end the workers. A second call does nothing."""

    def anew(self) -> Executor:
        """Return an executor for the same cells and devices that knows no table and no task. Call `stop` before."""
        ...
