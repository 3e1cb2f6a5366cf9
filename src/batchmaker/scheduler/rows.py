"""The rows and tables of the scheduler: which rows of each pool are free, and the number of every state table."""

from __future__ import annotations

import math
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.scheduler.commands import Grow, Reserve, Rows, TableId, TableSpec
from batchmaker.scheduler.events import WorkerId

FIRST_ROWS = 256


@final
class NoMemoryError(Exception):
    """There is no memory for the rows that are needed. wanted: how tables had to grow."""

    def __init__(self, wanted: Reserve) -> None:
        size = sum(wanted.num_rows * math.prod(t.spec.shape) * _ITEM_BYTES.get(t.spec.dtype, 8) for t in wanted.tables)
        super().__init__(
            f"its values do not fit into memory beside those of the others: for {wanted.num_rows} rows in "
            f"{len(wanted.tables)} tables {size / 1e6:,.1f} MB were wanted"
        )
        self.wanted = wanted


_ITEM_BYTES: Final = {
    "bool": 1, "int8": 1, "uint8": 1, "bfloat16": 2, "float16": 2, "int16": 2, "float32": 4, "int32": 4,
}  # fmt: skip
"""Bytes of a number by its dtype; 8 for all others."""


@final
class RowPool:
    """Rows of state tables for outputs of finished nodes. One row holds all outputs of one node.

    Cell types whose outputs have equal shapes and dtypes share a pool. So the inner node of a tree can take over the
    row of its leaf. The tables of a pool have the numbers from first_table to before end_table, one per output.
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

    def fit(self, wanted: int, needed: int, grow: Grow) -> Reserve | None:
        """Have at least `wanted` free rows, or as many as there is memory for, but at least `needed`.

        Returns how the tables must grow first; None if they need not. If there is no memory for the rows that are
        needed, NoMemoryError is raised, and nothing has changed.
        """
        if self._num_free >= wanted:
            return None
        old = self.num_rows
        sizes = [max(2 * old, old + wanted, FIRST_ROWS)]
        if self._num_free < needed:
            sizes.append(old + needed - self._num_free)
        for num_rows in sizes:
            command = Reserve(self.tables, num_rows)
            if grow(command):
                self._grow(num_rows)
                return command
        if self._num_free < needed:
            raise NoMemoryError(command)
        return None

    def _grow(self, num_rows: int) -> None:
        fresh = np.arange(num_rows - 1, self.num_rows - 1, -1)
        free = np.empty(num_rows, np.int64)
        free[: len(fresh)] = fresh
        free[len(fresh) : len(fresh) + self._num_free] = self._free[: self._num_free]
        self._free, self.num_rows = free, num_rows
        self._num_free += len(fresh)

    @property
    def free(self) -> tuple[Rows, int]:
        """The free rows and their number. The array may be longer. Rows are taken from the end of the free ones."""
        return self._free, self._num_free

    def take(self, num_left: int) -> None:
        """Note that the last free rows were taken, so that `num_left` are left."""
        self._num_free = num_left

    def release(self, rows: Rows) -> None:
        """Give back rows that were in use. Each row comes back once."""
        self._free[self._num_free : self._num_free + len(rows)] = rows
        self._num_free += len(rows)

    def free_rows(self) -> Rows:
        """Return the free rows, in any order."""
        return self._free[: self._num_free]


@final
class Tables:
    """Gives numbers to all state tables, at their first use.

    - Host tables: one per input that comes with requests, indexed by node number.
    - Value tables: one per output of a pool, indexed by the rows of the pool.
    - Lane tables: one per worker, cell type and state input, indexed by lane.
    """

    def __init__(self) -> None:
        self.is_host: NDArray[np.bool_] = np.zeros(64, np.bool_)  # [tables] whether a table is a host table
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
        """Return the host table of an input, and whether it is new."""
        key = (cell.type_id, port)
        known = self._host.get(key)
        if known is not None:
            return known, False
        self._host[key] = self._new(cell.inputs[port], host=True)
        return self._host[key], True

    def knows_host(self, type_id: TypeId, port: int) -> bool:
        """Whether an input has a host table."""
        return (type_id, port) in self._host

    def forget_host(self, cell: CellType, port: int) -> None:
        """Drop a host table that nothing is stored in."""
        del self._host[cell.type_id, port]

    def all_host(self) -> tuple[TableSpec, ...]:
        """Return every host table."""
        return tuple(self._host.values())

    def pool(self, cell: CellType) -> int:
        """Return the index in `pools` of the pool for a cell type's outputs. Makes the pool at first use."""
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
        """Return the numbers of a cell type's lane tables: [num_workers, state inputs]."""
        found = self._lane_tables.get(cell.type_id)
        if found is None:
            specs = [self.lanes(WorkerId(number), cell, num_sequence_inputs) for number in range(num_workers)]
            found = np.array([[spec.table for spec in of_worker] for of_worker in specs], np.int64)
            self._lane_tables[cell.type_id] = found.reshape(num_workers, -1)
        return self._lane_tables[cell.type_id]
