"""The memories that steps read, as tensors: gathered from state tables, with room for the longest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.export import torch_dtype
from batchmaker.compile.memories import room_for
from batchmaker.core.commands import RunTask, TableId, TaskMemories
from batchmaker.executor.state_tables import StateTables, as_array
from batchmaker.graph.spec import ValueSpec


@dataclass(slots=True)
class _Gathered:
    """One memory of one step.

    values: [padded, room, *shape]. number: [padded]. version: of `values`, which the module may write into. rows:
    [positions, room] rows of the table, -1 after the memory's. tables, firsts, lengths: [positions], as in the task.
    """

    values: Tensor
    number: Tensor
    version: int
    rows: Ints
    tables: Ints
    firsts: Ints
    lengths: Ints


@final
class MemoryReader:
    """Gathers the memories of one cell type on one worker.

    What was gathered for the step before is used again if the same runs go on: then it is the same, or has grown.
    specs: of one row of each memory.
    """

    def __init__(self, specs: tuple[ValueSpec, ...], tables: StateTables) -> None:
        self._specs, self._tables = specs, tables
        self._before: list[_Gathered | None] = [None] * len(specs)
        self._task: RunTask | None = None
        self._nodes: Ints = np.empty(0, np.int64)

    def begin(self) -> None:
        """Note that a task begins to run: its memories may be others, even if the same task ran before."""
        self._task = None

    def read(
        self, task: RunTask, of: TaskMemories, positions: slice | Ints, padded: int, *, stay: bool
    ) -> tuple[Tensor, ...]:
        """Return rows [padded, room, *shape] and their number [padded] of each memory, for these positions of a task.

        The rows after those of a position are zeros. Entries after those of the positions repeat the first. stay: all
        positions are chains that keep their lanes.

        The chains that stay, and are one node further than the nodes of the read before, are the same ones. For such a
        node was read by its chain on this worker, every read is noted here, and a node has one owner at a time. While
        a run goes on, nobody else writes to the rows of its memories.
        """
        nodes = task.nodes[positions]
        go_on = stay and np.array_equal(nodes, self._nodes + 1)
        room = room_for(int(of.lengths[:, positions].max()))
        arguments: list[Tensor] = []
        for memory, spec in enumerate(self._specs):
            tables, firsts = task.source_tables[memory, positions], of.firsts[memory, positions]
            lengths, before = of.lengths[memory, positions], self._before[memory]
            is_known = before is not None and before.values.shape[:2] == (padded, room)
            if not (
                is_known
                and before is not None
                and before.values._version == before.version
                and np.array_equal(tables, before.tables)
                and (lengths >= before.lengths).all()
                and (go_on or (task is self._task and np.array_equal(firsts, before.firsts)))
                and self._added(before, of, firsts, lengths)
            ):
                before = self._gathered(of, tables, firsts, lengths, padded, room, spec)
            self._before[memory] = before
            arguments += (before.values, before.number)
        self._task, self._nodes = task, nodes
        return tuple(arguments)

    def _added(self, before: _Gathered, of: TaskMemories, firsts: Ints, lengths: Ints) -> bool:
        """Add the rows that memories have gained since the step before. Return whether the others are the same."""
        if np.array_equal(lengths, before.lengths) and np.array_equal(firsts, before.firsts):
            return True
        rows = _rows(of, firsts, lengths, before.rows.shape[1])
        is_new = before.rows < 0
        if not (is_new | (rows == before.rows)).all():
            return False
        self._copy(np.where(is_new, rows, -1), before.tables, as_array(before.values))
        before.number[: len(lengths)] = torch.from_numpy(lengths)
        before.rows, before.firsts, before.lengths = rows, firsts, lengths
        return True

    def _gathered(
        self, of: TaskMemories, tables: Ints, firsts: Ints, lengths: Ints, padded: int, room: int, spec: ValueSpec
    ) -> _Gathered:
        values = torch.empty((padded, room, *spec.shape), dtype=torch_dtype(spec.dtype))
        array, number, count = as_array(values), np.empty(padded, np.int64), len(lengths)
        number[:count], number[count:] = lengths, lengths[0]
        rows = _rows(of, firsts, lengths, room)
        if (tables == tables[0]).all() and lengths.any():
            self._tables.take_into(TableId(tables.item(0)), np.maximum(rows, 0), array[:count])
            array[:count][rows < 0] = 0
        else:
            array[:count] = 0
            self._copy(rows, tables, array)
        array[count:] = array[0]
        return _Gathered(values, torch.from_numpy(number), values._version, rows, tables, firsts, lengths)

    def _copy(self, rows: Ints, tables: Ints, array: NDArray[Any]) -> None:
        """Copy rows [positions, room] that are not negative to their places."""
        of, nth = np.nonzero(rows >= 0)
        wanted, read_from = rows[of, nth], tables[of]
        for table in np.unique(read_from).tolist():
            mine = read_from == table
            array[of[mine], nth[mine]] = self._tables.take(TableId(table), wanted[mine])


def _rows(of: TaskMemories, firsts: Ints, lengths: Ints, room: int) -> Ints:
    """Return the rows of one memory of some positions: [positions, room], -1 after the memory's."""
    places = np.arange(room)
    is_row = places < lengths[:, None]
    rows = np.full(is_row.shape, -1)
    rows[is_row] = of.rows[(firsts[:, None] + places)[is_row]]
    return rows
