"""What is counted and shown of steps that have run."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.engine.driver import DriverStats, StepSeen
from batchmaker.executor.base import StepsResult
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.scheduler.commands import RunTask
from batchmaker.scheduler.events import RequestId

Numbers = NDArray[np.int64]
OwnersOf = Callable[[Numbers], list[RequestId | None]]


@final
class StepCounts:
    """Adds steps to the statistics of a driver. owners_of: the requests that nodes belong to."""

    def __init__(self, stats: DriverStats, owners_of: OwnersOf) -> None:
        self._stats = stats
        self._owners_of = owners_of
        self._sizes: dict[TypeId, Numbers] = {}
        self.observer: Callable[[StepSeen], None] | None = None

    def add(self, task: RunTask, cell: CellType, result: StepsResult, now_s: float) -> None:
        """Count steps that have run, without the rows that did not, and show them to the observer."""
        begin, ends = task.begin_of(result.first), task.ends[result.first : result.end]
        batches = ends.copy()
        batches[1:] -= ends[:-1]
        batches[0] -= begin
        skipped = result.skipped if result.skipped is not None and result.skipped.any() else None
        if skipped is not None:
            batches -= np.add.reduceat(skipped.astype(np.int64), ends - batches - begin)
        padded = self._padded(cell)[batches]
        stats = self._stats
        stats.steps += len(batches)
        stats.cells += int(batches.sum())
        stats.padded_cells += int(padded.sum())
        stats.busy_s += result.busy_s
        if self.observer is not None:
            nodes = task.nodes[begin : int(ends[-1])]
            self._show(task, cell, result, nodes if skipped is None else nodes[~skipped], batches, padded, now_s)

    def _padded(self, cell: CellType) -> Numbers:
        """Return the supported size of each batch, [max_batch + 1]; 0 where there is none."""
        found = self._sizes.get(cell.type_id)
        if found is None:
            batches = np.arange(cell.max_batch + 1)
            found = self._sizes[cell.type_id] = np.array(cell.batch_sizes)[np.searchsorted(cell.batch_sizes, batches)]
            found[0] = 0
        return found

    def _show(
        self, task: RunTask, cell: CellType, result: StepsResult, nodes: Numbers, batches: Numbers, padded: Numbers,
        now_s: float,
    ) -> None:  # fmt: skip
        """Show the observer each step; of steps that finished together, each is said to have taken an equal share."""
        assert self.observer is not None
        position, share_s, begin_s = 0, result.busy_s / len(batches), now_s - result.busy_s
        for batch, size in zip(batches.tolist(), padded.tolist(), strict=True):
            owners = tuple(self._owners_of(nodes[position : position + batch]))
            self.observer(StepSeen(task.worker, cell.name, begin_s, begin_s + share_s, owners, size))
            position, begin_s = position + batch, begin_s + share_s
