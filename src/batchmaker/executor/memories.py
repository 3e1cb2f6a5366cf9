"""The memories that the steps of a task read, as tensors: gathered from state tables, with room for the longest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.export import torch_dtype
from batchmaker.compile.memories import room_for
from batchmaker.executor.tables import StateTables, as_array
from batchmaker.graph.spec import ValueSpec
from batchmaker.scheduler.commands import Rows, RunTask, TableId, TaskMemories


@dataclass(slots=True)
class _Gathered:
    """One memory of one step. values: [padded, room, *shape]. number: [padded]. The rest: [positions], as in a task.

    version: of `values`, which the module may write into.
    """

    values: Tensor
    number: Tensor
    tables: Rows
    firsts: Rows
    lengths: Rows
    version: int


@final
class MemoryReader:
    """Gathers the memories of one task. What was gathered for the step before is used again, if it is the same or grew.

    specs: of one row of each memory.
    """

    def __init__(self, task: RunTask, of: TaskMemories, specs: tuple[ValueSpec, ...], tables: StateTables) -> None:
        self._task, self._of, self._specs, self._tables = task, of, specs, tables
        self._before: list[_Gathered | None] = [None] * len(specs)

    def read(self, positions: slice | Rows, padded: int) -> tuple[Tensor, ...]:
        """Return rows [padded, room, *shape] and their number [padded] of each memory, for these positions of the task.

        The rows after those of a position are zeros. Entries after those of the positions repeat the first.
        """
        given: list[Tensor] = []
        room = room_for(int(self._of.lengths[:, positions].max()))
        for memory, spec in enumerate(self._specs):
            tables = self._task.source_tables[memory, positions]
            firsts, lengths = self._of.firsts[memory, positions], self._of.lengths[memory, positions]
            found = self._again(self._before[memory], tables, firsts, lengths, (padded, room))
            if found is None:
                found = self._gathered(tables, firsts, lengths, (padded, room), spec)
            self._before[memory] = found
            given += (found.values, found.number)
        return tuple(given)

    def _again(
        self, before: _Gathered | None, tables: Rows, firsts: Rows, lengths: Rows, size: tuple[int, int]
    ) -> _Gathered | None:
        """Return what was gathered for the step before, with the rows that have been added; None if it does not do."""
        if before is None or before.values._version != before.version or before.values.shape[:2] != size:
            return None
        if not (np.array_equal(firsts, before.firsts) and np.array_equal(tables, before.tables)):
            return None
        more = lengths - before.lengths
        if more.any():
            if (more < 0).any():
                return None
            self._fill(as_array(before.values), tables, firsts, before.lengths, lengths)
            before.number[: len(lengths)] = torch.from_numpy(lengths)
            before.lengths = lengths
        return before

    def _gathered(self, tables: Rows, firsts: Rows, lengths: Rows, size: tuple[int, int], spec: ValueSpec) -> _Gathered:
        count, padded = len(lengths), size[0]
        values = torch.zeros((*size, *spec.shape), dtype=torch_dtype(spec.dtype))
        array, number = as_array(values), np.empty(padded, np.int64)
        number[:count], number[count:] = lengths, lengths[0]
        self._fill(array, tables, firsts, np.zeros(count, np.int64), lengths)
        array[count:] = array[0]
        # A tensor that shares an array's memory has its own count of the writes that torch makes.
        return _Gathered(values, torch.from_numpy(number), tables, firsts, lengths, values._version)

    def _fill(self, array: NDArray[Any], tables: Rows, firsts: Rows, begins: Rows, ends: Rows) -> None:
        """Write the rows from `begins` to before `ends` of each position's memory to their places."""
        counts = ends - begins
        total = int(counts.sum())
        if total == 0:
            return
        of = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + begins[of]
        rows = self._of.rows[firsts[of] + nth]
        read_from = tables[of]
        for table in np.unique(read_from).tolist():
            mine = read_from == table
            array[of[mine], nth[mine]] = self._tables.take(TableId(table), rows[mine])
