"""Who owns which row of which state table."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.scheduler.commands import Rows, TableId, TableSpec
from batchmaker.scheduler.events import WorkerId

FIRST_ROWS = 256


@final
class RowPool:
    """Rows of state tables for finished nodes whose outputs have one signature.

    Cell types with equal output shapes and dtypes share a pool, so that a tree's inner node can take over the row of
    its leaf. One row holds all outputs of one node. Its tables are numbered from first_table to before end_table.
    """

    __slots__ = ("_free", "_num_free", "end_table", "first_table", "num_rows", "table_ids", "tables")

    def __init__(self, tables: tuple[TableSpec, ...]) -> None:
        self.tables = tables
        self.table_ids = tuple(spec.table for spec in tables)
        self.first_table = min(self.table_ids, default=0)
        self.end_table = max(self.table_ids, default=-1) + 1
        self.num_rows = 0
        self._free: Rows = np.empty(0, np.int64)
        self._num_free = 0

    @property
    def num_used(self) -> int:
        return self.num_rows - self._num_free

    def fit(self, num_free: int) -> bool:
        """Have at least so many free rows; return whether the tables must grow to `num_rows` first."""
        if self._num_free >= num_free:
            return False
        old = self.num_rows
        self.num_rows = max(2 * old, old + num_free, FIRST_ROWS)
        free = np.empty(self.num_rows, np.int64)
        fresh = np.arange(self.num_rows - 1, old - 1, -1)
        free[: len(fresh)] = fresh
        free[len(fresh) : len(fresh) + self._num_free] = self._free[: self._num_free]
        self._free = free
        self._num_free += len(fresh)
        return True

    @property
    def free(self) -> tuple[Rows, int]:
        """The free rows, the next one to be taken last, and how many they are; the array may be longer."""
        return self._free, self._num_free

    def take(self, num_left: int) -> None:
        """The last free rows have been taken, so many are left."""
        self._num_free = num_left

    def release(self, rows: Rows) -> None:
        """Give rows back. The caller owns them; each comes back once."""
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)

    def free_rows(self) -> Rows:
        """Return the free rows, in no order."""
        return self._free[: self._num_free]


@final
class Tables:
    """Numbers for all state tables, given out at first use.

    Host tables (one per input that comes with requests) are indexed by node number; value tables by the rows of a pool;
    lane tables (one per worker, cell type and state input) by lane.
    """

    def __init__(self) -> None:
        self.is_host: NDArray[np.bool_] = np.zeros(64, np.bool_)  # by table: indexed by node number
        self._count = 1  # 0 is ZERO_TABLE
        self._host: dict[tuple[TypeId, int], TableSpec] = {}
        self._lanes: dict[tuple[WorkerId, TypeId, int], tuple[TableSpec, ...]] = {}
        self._lane_tables: dict[TypeId, Rows] = {}
        self._pools: dict[tuple[object, ...], int] = {}
        self.pools: list[RowPool] = []

    def _new(self, spec: ValueSpec, *, host: bool = False) -> TableSpec:
        if self._count == len(self.is_host):
            self.is_host = np.concatenate((self.is_host, np.zeros_like(self.is_host)))
        self.is_host[self._count] = host
        self._count += 1
        return TableSpec(TableId(self._count - 1), spec)

    def host(self, cell: CellType, port: int) -> tuple[TableSpec, bool]:
        """Return the host table of an input and whether it is new."""
        key = (cell.type_id, port)
        known = self._host.get(key)
        if known is not None:
            return known, False
        self._host[key] = self._new(cell.inputs[port], host=True)
        return self._host[key], True

    def all_host(self) -> tuple[TableSpec, ...]:
        """Return every host table."""
        return tuple(self._host.values())

    def pool(self, cell: CellType) -> int:
        """Return the index in `pools` of the pool for a cell type's outputs."""
        signature = tuple(spec.row_signature for spec in cell.outputs)
        if signature not in self._pools:
            self._pools[signature] = len(self.pools)
            self.pools.append(RowPool(tuple(self._new(spec) for spec in cell.outputs)))
        return self._pools[signature]

    def lanes(self, worker: WorkerId, cell: CellType, num_sequence_inputs: int) -> tuple[TableSpec, ...]:
        """Return the lane tables of a cell type on a worker, one per state input."""
        key = (worker, cell.type_id, num_sequence_inputs)
        if key not in self._lanes:
            self._lanes[key] = tuple(self._new(cell.inputs[port]) for port in cell.state_inputs(num_sequence_inputs))
        return self._lanes[key]

    def lane_tables(self, cell: CellType, num_sequence_inputs: int, num_workers: int) -> Rows:
        """Return the numbers of a cell type's lane tables, [num_workers, state inputs]."""
        found = self._lane_tables.get(cell.type_id)
        if found is None:
            specs = [self.lanes(WorkerId(number), cell, num_sequence_inputs) for number in range(num_workers)]
            found = np.array([[spec.table for spec in of_worker] for of_worker in specs], np.int64)
            self._lane_tables[cell.type_id] = found.reshape(num_workers, -1)
        return self._lane_tables[cell.type_id]
