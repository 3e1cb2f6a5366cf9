"""The seam between the engine and a device: tasks go in, finished steps come out, nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.errors import said_by
from batchmaker.graph.spec import TypeId
from batchmaker.scheduler.commands import Reserve, RunTask, TableId
from batchmaker.scheduler.events import TaskId


@dataclass(frozen=True, slots=True)
class StepsResult:
    """Steps `first` to before `end` of a task have finished.

    fetched: per fetch of the task, the values at those of its positions that are of these steps, [count, *shape] on the
    host, whose memory nobody else writes to; none where the steps failed as a whole. failed: positions of the task at
    which the cell raised, with the reason; their values are undefined. busy_s: seconds the steps took on their worker.
    stopped: [positions of these steps] where loops have ended, if the executor has applied the stop tests. skipped:
    [positions of these steps] which did not run, since their loop had ended before, if any; their values are undefined.
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
"""Test of nodes that are of no loop that a value ends."""


class LoopTests(Protocol):
    """The stop tests of the loops in flight. See `batchmaker.engine.stop_tests.StopTests` for its arrays."""

    test_of: NDArray[np.int64]
    last: NDArray[np.int64]
    over: NDArray[np.bool_]
    constants: NDArray[np.int64]
    is_constant: NDArray[np.bool_]

    def begin_task(self) -> None:
        """The steps of a task begin to run, one by one; reports may be handled in between."""

    def end_task(self) -> None:
        """The last step of the task has run, or none more will."""

    def running(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which nodes of the task run: not those of loops that have ended before them."""

    def apply(
        self, cell: str, nodes: NDArray[np.int64], values: Tensor
    ) -> tuple[NDArray[np.bool_], tuple[tuple[int, str], ...]]:
        """Test loops after their steps at these nodes. values: [nodes, *shape], what each loop looks at.

        cell: its name. Returns which have ended, [nodes], and the places at which a test raised, with the reason.
        """


def failed_result(task: RunTask, first: int, error: BaseException, end: int | None = None) -> StepsResult:
    """Return the result of a task's steps from `first` on (to before `end`), every row failed."""
    end = task.num_steps if end is None else end
    reason = f"a step of this request failed: {said_by(error)}"
    positions = range(task.begin_of(first), task.begin_of(end))
    return StepsResult(task.task, first, end, (), tuple((position, reason) for position in positions), 0.0)


class Executor(Protocol):
    """One kind of device with one or more workers. Called by one thread, the engine's.

    submit returns at once; tasks of one worker run in order and several may be in flight. Whenever steps have finished,
    one or several of a task together, the executor calls `notify` (from any thread) and hands them out at the next
    `poll`, in order per task.
    """

    @property
    def num_workers(self) -> int: ...

    def start(self, notify: Callable[[], None]) -> None:
        """Begin work. notify: cheap, callable from any thread."""

    def await_materialise(self) -> None:
        """Until `materialise`, compile and measure nothing: example requests come first, in the engine's thread."""

    def materialise(self, forms: Mapping[TypeId, int]) -> None:
        """Make what each batch size of each known cell type costs once, before the first request needs it.

        forms: how many inputs per step the types take that run as chains. Nothing is submitted meanwhile.
        """

    def reserve(self, command: Reserve) -> None:
        """Create or grow state tables; waits for running steps where rows must move."""

    def write(self, table: TableId, rows: slice | NDArray[np.int64], values: Any) -> None:
        """Write host values [count, ...] into rows that no submitted step reads."""

    def read(self, table: TableId, row: int) -> Any:
        """Return a copy of one row, a number if it is a scalar. No submitted step writes it."""

    def submit(self, task: RunTask) -> None:
        """Run a task's steps in order after the worker's earlier tasks."""

    def poll(self) -> list[StepsResult]:
        """Return the steps finished since the last call."""

    def stop(self) -> None:
        """Finish what was submitted and end the workers."""
