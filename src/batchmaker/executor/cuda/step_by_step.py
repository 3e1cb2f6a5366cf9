"""A task with a launch for each step: the programs that run, and the addresses in their blocks. Used by CudaExecutor.

Addresses of all steps are written together, from the arrays of the task, in compiled loops.
"""

from __future__ import annotations

from typing import final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compile.export import row_bytes
from batchmaker.compiled import int64s
from batchmaker.core.commands import RunTask
from batchmaker.executor.cuda.blocks import Blocks, put_rows, put_sources
from batchmaker.executor.cuda.cells import DeviceCells, HoistedRows
from batchmaker.executor.cuda.fetches import fetched
from batchmaker.executor.cuda.place import Place
from batchmaker.executor.cuda.program import FETCH, KEEP, LANE, TARGETS_OF_STEP, DeviceProgram
from batchmaker.executor.cuda.state_tables import DeviceTables
from batchmaker.graph.spec import CellType


@final
class SteppedTask:
    """A task laid out for single steps, ready to be filled in.

    launches: a program and its number of rows for each block: first what is computed ahead for all steps, then the
    steps. num_ahead: how many are no steps. fetched: where fetched values will be.
    """

    def __init__(self, place: Place, cells: DeviceCells, cell: CellType, task: RunTask) -> None:
        self._place = place
        self._cell = cell
        self._task = task
        self._num_state = 0 if task.lanes is None else len(task.lanes.tables)
        self._counts = np.diff(task.ends, prepend=0)
        self._used = np.zeros(task.num_steps, np.bool_) if task.lanes is None else task.lanes.used
        self._chained = chained_positions(task)
        self._hoisted: HoistedRows | None = None
        programs: dict[bool, DeviceProgram] = {}
        if self._used.any():
            form = cells.chains(task.type_id, len(cell.inputs) - self._num_state)
            programs[True], self._hoisted = form.step, form.hoisted
        if not self._used.all():
            programs[False] = cells.nodes(task.type_id)
        steps = [programs[used] for used in self._used.tolist()]
        ahead: list[tuple[DeviceProgram, int]] = []
        if self._hoisted is not None:
            self._hoisted.reserve(place, len(self._chained))
            ahead = self._hoisted.launches(len(self._chained))
        self.launches = [*ahead, *zip(steps, self._counts.tolist(), strict=True)]
        self.num_ahead = len(ahead)
        self.fetched, num_bytes = fetched(task.fetches, cell.outputs)
        self.blocks = Blocks(place, [program.num_words(count) for program, count in self.launches], num_bytes)
        # for each position of the task: the word of its first input, of its first target, and from column to column
        padded = [program.padded(count) for program, count in self.launches[len(ahead) :]]
        self._stride = np.repeat(np.array(padded, np.int64), self._counts)
        begins = self.blocks.body[len(ahead) :] - (task.ends - self._counts)
        self._inputs = np.repeat(begins, self._counts) + np.arange(len(task.nodes))
        num_inputs = np.repeat(np.array([program.num_inputs for program in steps], np.int64), self._counts)
        self._targets = self._inputs + num_inputs * self._stride

    def fill(self, tables: DeviceTables) -> None:
        """Write all addresses of the task into its blocks."""
        task, keep, used = self._task, self._task.keep, [int64s(self._task.source_tables.ravel())]
        if task.lanes is not None:
            used += [np.array(task.lanes.tables, np.int64), int64s(task.lanes.move_tables.ravel())]
        if keep is not None:
            used.append(np.array(keep.tables, np.int64))
        bases = tables.bases(self._place, *used)
        if self._hoisted is not None:
            rows = np.arange(len(self._chained))
            fill_hoisted(
                self.blocks,
                self._hoisted,
                self._place,
                tables,
                self._chosen(task.source_tables),
                self._chosen(task.source_rows),
                rows,
            )
        if len(self._chained):
            self._fill_chains(tables, bases)
        if len(self._chained) < len(task.nodes):
            alone = np.flatnonzero(~np.repeat(self._used, self._counts))
            for port in range(len(self._cell.inputs)):
                self._put_sources(
                    alone, port, task.source_tables[port][alone], task.source_rows[port][alone], tables, bases
                )
        if keep is not None:
            positions = np.arange(len(task.nodes)) if keep.positions is None else keep.positions
            for output, table in enumerate(keep.tables):
                self._put_targets(positions, output, KEEP, keep.rows, bases[table], tables.row_bytes[table])
        for fetch in self.fetched:
            rows, size = np.arange(len(fetch.positions)), row_bytes(fetch.spec)
            self._put_targets(fetch.positions, fetch.output, FETCH, rows, fetch.base(self.blocks), size)

    def _fill_chains(self, tables: DeviceTables, bases: Ints) -> None:
        """Write the addresses of what is only in steps of chains: of hoisted values, and of the state and its lanes."""
        task, lanes, chained = self._task, self._task.lanes, self._chained
        assert lanes is not None
        num_given, hoisted = len(self._cell.inputs) - self._num_state, self._hoisted
        if hoisted is None:
            for port in range(num_given):
                places = self._chosen(task.source_tables[port]), self._chosen(task.source_rows[port])
                self._put_sources(chained, port, *places, tables, bases)
        else:
            num_given, rows = len(hoisted.specs), np.arange(len(chained))
            for part in range(num_given):
                self._put(self._inputs, chained, part, rows, *hoisted.rows_at(part))
        lane_rows, first = self._chosen(lanes.rows), len(self._cell.outputs) - self._num_state
        for state, table in enumerate(lanes.tables):
            base, size = bases[table], tables.row_bytes[table]
            self._put(self._inputs, chained, num_given + state, lane_rows, base, size)
            self._put_targets(chained, first + state, LANE, lane_rows, base, size)
            self._put_sources(
                lanes.move_at, num_given + state, lanes.move_tables[state], lanes.move_rows[state], tables, bases
            )

    def _chosen(self, values: Ints) -> Ints:
        """Return the values [..., positions] of the positions in chains."""
        return values if len(self._chained) == values.shape[-1] else values[..., self._chained]

    def _put_targets(self, positions: Ints, output: int, kind: int, rows: Ints, base: int, size: int) -> None:
        self._put(self._targets, positions, output * TARGETS_OF_STEP + kind, rows, base, size)

    def _put(self, at: Ints, positions: Ints, column: int, rows: Ints, base: int, size: int) -> None:
        put_rows(self.blocks.words, at[positions], self._stride[positions], column, int64s(rows), int(base), int(size))

    def _put_sources(
        self, positions: Ints, column: int, tables: Ints, rows: Ints, of: DeviceTables, bases: Ints
    ) -> None:
        put_sources(
            self.blocks.words,
            self._inputs[positions],
            self._stride[positions],
            column,
            int64s(tables),
            int64s(rows),
            bases,
            of.row_bytes,
        )


def chained_positions(task: RunTask) -> Ints:
    """Return the positions of a task in steps of chains, ascending."""
    if task.lanes is None:
        return np.zeros(0, np.int64)
    if task.lanes.used.all():
        return np.arange(len(task.nodes))
    return np.flatnonzero(np.repeat(task.lanes.used, np.diff(task.ends, prepend=0)))


def fill_hoisted(
    blocks: Blocks,
    hoisted: HoistedRows,
    place: Place,
    tables: DeviceTables,
    source_tables: Ints,
    source_rows: Ints,
    rows: Ints,
) -> None:
    """Write the addresses of the first blocks of a task, which compute its hoisted values.

    source_tables, source_rows: [inputs, positions] what is read. rows: [positions] where the values of each position
    go in the memory of hoisted values.
    """
    program, words, first = hoisted.program, blocks.words, 0
    for launch, (_, count) in enumerate(hoisted.launches(len(rows))):
        mine = slice(first, first + count)
        at = int(blocks.body[launch]) + np.arange(count)
        stride = np.full(count, program.padded(count))
        for port in range(program.num_inputs):
            numbers = int64s(source_tables[port, mine])
            bases = tables.bases(place, numbers)
            put_sources(words, at, stride, port, numbers, int64s(source_rows[port, mine]), bases, tables.row_bytes)
        for part in range(len(hoisted.specs)):
            base, size = hoisted.rows_at(part)
            put_rows(words, at, stride, program.num_inputs + part, int64s(rows[mine]), base, size)
        first += count
