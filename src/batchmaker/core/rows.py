"""The rows and tables of the scheduler: which rows of each pool are free, and the number of every state table."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, final

from batchmaker.core.arena import Arena
from batchmaker.core.commands import Grow, Reserve, TableId, TableSpec
from batchmaker.core.events import WorkerId
from batchmaker.core.layout import NUM_FREE, NUM_ROWS
from batchmaker.graph.spec import CellType, TypeId, ValueSpec

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


@dataclass(frozen=True, slots=True)
class RowPool:
    """Rows of state tables for outputs of finished nodes. One row holds all outputs of one node.

    Cell types whose outputs have equal shapes and dtypes share a pool. So the inner node of a tree can take over the
    row of its leaf.

    number: its place in the arena's `pools`. tables: one per output.
    """

    number: int
    tables: tuple[TableSpec, ...]
    table_ids: tuple[TableId, ...]


@final
class Tables:
    """Gives numbers to all state tables, at their first use.

    - Host tables: one per input that comes with requests, indexed by node number.
    - Value tables: one per output of a pool, indexed by the rows of the pool.
    - Lane tables: one per worker, cell type and state input, indexed by lane.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._count = 1  # 0 is ZERO_TABLE
        self._host: dict[tuple[TypeId, int], TableSpec] = {}
        self._lanes: dict[tuple[WorkerId, TypeId, int], tuple[TableSpec, ...]] = {}
        self._lane_ids: dict[tuple[WorkerId, TypeId], tuple[TableId, ...]] = {}
        self._pools: dict[tuple[object, ...], RowPool] = {}

    def _new(self, spec: ValueSpec, *, host: bool = False) -> TableSpec:
        self._arena.note_table(self._count, host=host)
        self._count += 1
        return TableSpec(TableId(self._count - 1), spec)

    def host(self, cell: CellType, port: int) -> tuple[TableSpec, bool]:
        """Return the host table of an input, and whether it is new."""
        key = (cell.type_id, port)
        spec = self._host.get(key)
        if spec is not None:
            return spec, False
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

    @property
    def pools(self) -> Collection[RowPool]:
        """All pools."""
        return self._pools.values()

    def pool(self, cell: CellType) -> RowPool:
        """Return the pool for a cell type's outputs. Makes the pool at first use."""
        signature = tuple(spec.row_signature for spec in cell.outputs)
        if signature not in self._pools:
            tables = tuple(self._new(spec) for spec in cell.outputs)
            ids = tuple(spec.table for spec in tables)
            self._pools[signature] = RowPool(self._arena.add_pool(ids), tables, ids)
        return self._pools[signature]

    def fit_rows(self, pool: RowPool, wanted: int, needed: int, grow: Grow) -> Reserve | None:
        """Have at least `wanted` free rows, or as many as there is memory for, but at least `needed`.

        Returns how the tables must grow first; None if they need not. If there is no memory for the rows that are
        needed, NoMemoryError is raised, and nothing has changed.
        """
        num_free, old = self._arena.pools[[NUM_FREE, NUM_ROWS], pool.number].tolist()
        if num_free >= wanted:
            return None
        sizes = [max(2 * old, old + wanted, FIRST_ROWS)]
        if num_free < needed:
            sizes.append(old + needed - num_free)
        for num_rows in sizes:
            command = Reserve(pool.tables, num_rows)
            if grow(command):
                self._arena.grow_pool(pool.number, num_rows)
                return command
        if num_free < needed:
            raise NoMemoryError(command)
        return None

    def lanes(self, worker: WorkerId, cell: CellType, num_step_inputs: int) -> tuple[TableSpec, ...]:
        """Return the lane tables of a cell type on a worker, one per state input."""
        key = (worker, cell.type_id, num_step_inputs)
        if key not in self._lanes:
            self._lanes[key] = tuple(self._new(cell.inputs[port]) for port in cell.state_inputs(num_step_inputs))
        return self._lanes[key]

    def lane_ids(self, worker: WorkerId, cell: CellType, num_step_inputs: int) -> tuple[TableId, ...]:
        """Return the numbers of these tables."""
        key = (worker, cell.type_id)
        ids = self._lane_ids.get(key)
        if ids is None:
            specs = self.lanes(worker, cell, num_step_inputs)
            ids = self._lane_ids[key] = tuple([spec.table for spec in specs])
        return ids

    def enter_lanes(self, cell: CellType, num_step_inputs: int, num_workers: int) -> None:
        """Write the numbers of a cell type's lane tables on these workers into the arena."""
        for worker in range(num_workers):
            specs = self.lanes(WorkerId(worker), cell, num_step_inputs)
            self._arena.lane_tables[cell.type_id, worker, : len(specs)] = [spec.table for spec in specs]
