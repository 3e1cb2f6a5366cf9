"""Runs the steps of a task on tensors: reads rows, calls the cell, writes rows. Used by the CPU executors."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.binding import BoundCell
from batchmaker.compile.export import example_rows
from batchmaker.core.commands import ZERO_TABLE, RunTask, TableId, TaskLanes, within
from batchmaker.core.events import WorkerId
from batchmaker.errors import RAISED_BY_USERS, said_by
from batchmaker.executor.base import LoopTests, RunCounts, StepsResult
from batchmaker.executor.memories import MemoryReader
from batchmaker.executor.state_tables import StateTables, as_array
from batchmaker.executor.step_rows import InputReader, Inputs, keep_rows
from batchmaker.executor.task_loop import MAX_HOISTED_ROWS, hoisted_rows, run_in_loop
from batchmaker.graph.spec import CellType, TypeId, ValueSpec

Outputs = tuple[Tensor, ...]
Failures = list[tuple[int, str]]
_NO_FLAGS: Final = np.zeros(0, np.bool_)

REPORT_S: Final = 1e-3
"""Seconds of computing after which finished steps are reported. So a request whose last step has run need not wait for
the end of a long task."""


@final
class TaskRunner:
    """Runs tasks on one set of state tables. Several threads may use it, since their tasks use different rows.

    in_loops: whether tasks may run in compiled loops. The first use of a loop compiles and measures it. counts: of the
    steps of each type that have run since then.
    """

    def __init__(self, types: Sequence[CellType], cells: Sequence[BoundCell], tables: StateTables) -> None:
        self._types = types
        self._cells = cells
        self._tables = tables
        self._memories: dict[tuple[TypeId, WorkerId], MemoryReader] = {}
        self._readers: dict[tuple[TypeId, int, int], InputReader] = {}
        self.in_loops = True
        self.counts: defaultdict[TypeId, RunCounts] = defaultdict(RunCounts)

    def begin(self, task: RunTask, tests: LoopTests | None = None) -> RunningTask:
        """Return a task of which no step has run. tests: stop tests to apply between its steps, or None."""
        cell_type, cell = self._types[task.type_id], self._cells[task.type_id]
        if not self.in_loops and tests is not None and task.lanes is not None and not tests.is_constant.all():
            cell.split(len(cell.inputs) - len(task.lanes.tables)).ends_by_function = True
        counts = self.counts[task.type_id] if self.in_loops else RunCounts()
        memories, key = None, (task.type_id, task.worker)
        if task.memories is not None:
            memories = self._memories.get(key)
            if memories is None:
                specs = cell.inputs[: cell.num_memories]
                memories = self._memories[key] = MemoryReader(specs, self._tables)
            memories.begin()
        return RunningTask(task, cell_type, cell, self._tables, tests, self.in_loops, counts, self._reader, memories)

    def _reader(self, type_id: TypeId, first: int, end: int) -> InputReader:
        """Return what reads the inputs of a type from the first to before the end."""
        try:
            return self._readers[type_id, first, end]
        except KeyError:
            reader = InputReader(self._cells[type_id].inputs[first:end], first)
            return self._readers.setdefault((type_id, first, end), reader)


@final
class RunningTask:
    """A task while it is computed. num_finished: how many of its steps have run."""

    __slots__ = (
        "_bad", "_cell", "_counts", "_ends", "_fetched", "_hoisted", "_in_loop", "_inputs_read", "_memories", "_name",
        "_reader", "_sizes", "_skipped", "_stopped", "_tables", "_task", "_tests", "num_finished",
    )  # fmt: skip

    def __init__(
        self,
        task: RunTask,
        cell_type: CellType,
        cell: BoundCell,
        tables: StateTables,
        tests: LoopTests | None,
        in_loop: bool,
        counts: RunCounts,
        reader: Callable[[TypeId, int, int], InputReader],
        memories: MemoryReader | None = None,
    ) -> None:
        self._task = task
        self._sizes = cell_type.batch_sizes
        self._name = cell_type.name
        self._cell = cell
        self._tables = tables
        self._tests = tests
        self._in_loop = in_loop
        self._counts = counts
        self._skipped: NDArray[np.bool_] = _NO_FLAGS
        self._stopped: NDArray[np.bool_] = _NO_FLAGS
        self._ends: list[int] = []
        self._hoisted: Outputs | None = None
        self._reader = reader
        self._inputs_read: list[tuple[InputReader, Inputs]] = []  # of the present step
        self._memories = memories
        self._bad: dict[int, str] = {}
        self._fetched: list[list[Tensor]] = [[] for _ in task.fetches]
        self.num_finished = 0

    def advance(self) -> StepsResult:
        """Run steps for about REPORT_S, at least one, and return their result."""
        task, first = self._task, self.num_finished
        began = time.perf_counter()
        in_loop = first == 0 and self._in_loop and self._memories is None
        looped = run_in_loop(task, self._cell, self._tables, self._tests) if in_loop else None
        if looped is not None:
            self.num_finished = end = looped.num_steps
            self._counts.in_loop += end
            busy_s = time.perf_counter() - began
            return StepsResult(task.task, 0, end, looped.fetched, looped.failed, busy_s, looped.stopped, looped.skipped)
        if not self._ends:
            self._ends = task.ends.tolist()
            if self._tests is not None:
                self._skipped, self._stopped = np.zeros((2, len(task.nodes)), np.bool_)
        failed: Failures = []
        with torch.no_grad():
            while True:
                self._run_step(self.num_finished, failed)
                self.num_finished += 1
                busy_s = time.perf_counter() - began
                if self.num_finished == len(self._ends) or busy_s >= REPORT_S:
                    break
        self._counts.one_by_one += self.num_finished - first
        brought = tuple([parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self._fetched])
        self._fetched = [[] for _ in task.fetches]
        result = StepsResult(task.task, first, self.num_finished, brought, tuple(failed), busy_s)
        if self._tests is None:
            return result
        ran = slice(task.begin_of(first), self._ends[self.num_finished - 1])
        return replace(result, stopped=self._stopped[ran], skipped=self._skipped[ran])

    def _run_step(self, number: int, failed: Failures) -> None:
        """Run one step. Adds the positions of the task at which it failed to `failed`."""
        task, end = self._task, self._ends[number]
        begin = self._ends[number - 1] if number else 0
        lanes = task.lanes
        if lanes is None or not lanes.used[number]:
            outputs = self._run_nodes(begin, end, self._sizes[bisect_left(self._sizes, end - begin)], failed)
            ran = None
        else:
            ran = self._running(begin, end)
            if ran is not None and len(ran) == 0:
                outputs = tuple([example_rows((spec,), 0)[0] for spec in self._cell.outputs])
            else:
                outputs = self._run_chains(number, lanes, begin, end, ran, failed)
        for fetch, parts in zip(task.fetches, self._fetched, strict=True):
            mine = within(fetch.positions, begin, end)
            parts.append(self._fetch(outputs, fetch.output, fetch.positions[mine] - begin, begin, ran, failed))
        keep = task.keep
        if keep is not None and keep.positions is not None:
            mine = within(keep.positions, begin, end)
            places, rows = _among(keep.positions[mine] - begin, ran)
            if len(rows):  # last: these rows may be the memory of an output, if the cell returned an input
                keep_rows(self._tables, keep.tables, outputs, rows, keep.rows[mine][places])
        for reader, inputs in self._inputs_read:
            reader.leave(inputs)
        self._inputs_read.clear()

    def _running(self, begin: int, end: int) -> Ints | None:
        """Return the rows of a step that run, ascending; None if all do. Rows of ended loops do not run."""
        if self._tests is None:
            return None
        running = self._tests.running(self._task.nodes[begin:end])
        self._skipped[begin:end] = ~running
        return None if running.all() else np.flatnonzero(running)

    def _fetch(
        self, outputs: Outputs, output: int, positions: Ints, begin: int, ran: Ints | None, failed: Failures
    ) -> Tensor:
        """Return an output at these positions of a step, and apply the stop tests of it. ran: see _running."""
        places, rows = _among(positions, ran)
        good_values = _taken(outputs[output], rows)
        if self._tests is not None and output in self._tests.outputs and len(rows):
            at = begin + positions[places]
            good = ~np.isin(at, [position for position, _ in failed])
            ended, untested = self._tests.apply(
                self._name, self._task.nodes[at[good]], good_values[torch.from_numpy(good)], output
            )
            self._stopped[at[good][ended]] = True
            failed.extend((int(at[good][place]), reason) for place, reason in untested)
        if ran is None:
            return good_values
        values = good_values.new_zeros((len(positions), *good_values.shape[1:]))
        values[torch.from_numpy(np.arange(len(positions))[places])] = good_values
        return values

    # --- single nodes ------------------------------------------------------------------------------------------

    def _run_nodes(self, begin: int, end: int, padded: int, failed: Failures) -> Outputs:
        cell = self._cell
        inputs = self._inputs(slice(begin, end), padded, len(cell.inputs), stay=False)
        try:
            return cell.call(inputs)
        except RAISED_BY_USERS:  # a cell may raise anything; find the rows at fault
            failures: Failures = []
            outputs = _row_by_row(cell.name, cell.outputs, end - begin, inputs, lambda *row: cell.call(row), failures)
            failed.extend((begin + position, reason) for position, reason in failures)
            return outputs

    def _inputs(self, positions: slice | Ints, padded: int, num_inputs: int, *, stay: bool) -> Outputs:
        """Return the first inputs of the cell for these positions of the task, memories as rows and numbers.

        stay: see MemoryReader.read.
        """
        task, cell = self._task, self._cell
        memories: Outputs = ()
        if self._memories is not None and task.memories is not None:
            memories = self._memories.read(task, task.memories, positions, padded, stay=stay)
        return (*memories, *self._read(positions, cell.num_memories, num_inputs, padded))

    def _read(self, positions: slice | Ints, first: int, end: int, padded: int) -> Outputs:
        """Return the inputs from the first to before the end of the cell, until the end of the step."""
        task = self._task
        of, rows, begin, stop = task.source_tables, task.source_rows, 0, len(task.nodes)
        if isinstance(positions, slice):
            begin, stop = positions.start, positions.stop
        else:
            of, rows, stop = of[:, positions], rows[:, positions], len(positions)
        reader = self._reader(task.type_id, first, end)
        inputs = reader.read(self._tables, of, rows, begin, stop, padded)
        self._inputs_read.append((reader, inputs))
        return inputs.values

    # --- chains --------------------------------------------------------------------------------------------------

    def _hoist(self, cell: BoundCell, num_step_inputs: int) -> Outputs:
        """Compute the part that does not depend on state, for all positions of the task at once.

        Returns its rows, with room for the padding of each step, and notes the rows at which the cell raised. Later
        calls return the same rows.
        """
        if self._hoisted is not None:
            return self._hoisted
        task, sizes, total, room, begin = self._task, self._sizes, self._ends[-1], 0, 0
        for end in self._ends:
            room = max(room, begin + sizes[bisect_left(sizes, end - begin)])
            begin = end
        room = hoisted_rows(room)
        reader = self._reader(task.type_id, 0, num_step_inputs)  # what is hoisted may be an input, so it keeps its room
        columns = reader.read(self._tables, task.source_tables, task.source_rows, 0, total, room).values
        try:
            blocks = [
                cell.hoist(tuple([column[at : at + MAX_HOISTED_ROWS] for column in columns]))
                for at in range(0, room, MAX_HOISTED_ROWS)
            ]
        except RAISED_BY_USERS:  # a cell may raise anything; find the rows at fault
            failures: Failures = []
            made = _row_by_row(cell.name, cell.hoisted, total, columns, lambda *row: cell.hoist(row), failures)
            self._bad = dict(failures)
            self._hoisted = tuple([torch.cat((rows, rows[-1:].expand(room - total, *rows.shape[1:]))) for rows in made])
            return self._hoisted
        self._hoisted = blocks[0] if len(blocks) == 1 else tuple(map(torch.cat, zip(*blocks, strict=True)))
        return self._hoisted

    def _run_chains(
        self, number: int, lanes: TaskLanes, begin: int, end: int, ran: Ints | None, failed: Failures
    ) -> Outputs:
        """Run a step of chains. ran: the rows of the step that run, in their order; None for all.

        Of a cell with memories nothing is hoisted.
        """
        num_state = len(lanes.tables)
        cell = self._cell.split(len(self._cell.inputs) - num_state)
        batch = end - begin if ran is None else len(ran)
        padded = self._sizes[bisect_left(self._sizes, batch)]
        num_step_inputs, moves = len(cell.inputs) - num_state, within(lanes.move_at, begin, end)
        if self._memories is None:
            hoisted = tuple([_chosen(rows, begin, padded, ran) for rows in self._hoist(cell, num_step_inputs)])
        else:
            running = slice(begin, end) if ran is None else begin + ran
            hoisted = self._inputs(running, padded, num_step_inputs, stay=moves.stop == moves.start)
        size = len(hoisted)

        def step(*arguments: Tensor) -> Outputs:
            return cell.call(arguments) if self._memories is not None else cell.step(arguments[:size], arguments[size:])

        if self._bad:
            failed.extend((position, self._bad[position]) for position in range(begin, end) if position in self._bad)
        if moves.stop > moves.start:
            self._bring(lanes, moves)
        tables = self._tables
        rows = None if lanes.dense[number] and ran is None else lanes.rows[begin:end]
        if rows is not None and ran is not None:
            rows = rows[ran]
        if rows is None:
            state = tuple([tables[table].narrow(0, 0, padded) for table in lanes.tables])
        else:
            state = tuple([tables.copy(table, rows, padded) for table in lanes.tables])
        try:
            outputs = step(*hoisted, *state)
        except RAISED_BY_USERS:  # a cell may raise anything; find the rows at fault
            failures = Failures()
            outputs = _row_by_row(cell.name, cell.outputs, batch, (*hoisted, *state), step, failures)
            places = range(batch) if ran is None else ran.tolist()
            failed.extend((begin + places[position], reason) for position, reason in failures)
        first = len(outputs) - num_state
        stays = [i >= first and new is state[i - first] for i, new in enumerate(outputs)]  # a returned input
        moving = [new for new, still in zip(outputs, stays, strict=True) if not still]
        if any(tables.holds(table, new) for new in moving for table in lanes.tables):
            # Such an output is memory of a lane that is written below, but it is still needed: to be kept and fetched.
            outputs = tuple(new if still else new.clone() for new, still in zip(outputs, stays, strict=True))
        at = slice(batch) if rows is None else rows
        for table, new, still in zip(lanes.tables, outputs[first:], stays[first:], strict=True):
            if not still:
                tables.put(table, at, as_array(new)[:batch])
        return outputs

    def _bring(self, lanes: TaskLanes, moves: slice) -> None:
        """Copy the state of chains that start or move into their lanes. All of it is read before any is written."""
        places, brought = lanes.rows[lanes.move_at[moves]], []
        for target, tables, rows in zip(
            lanes.tables, lanes.move_tables[:, moves], lanes.move_rows[:, moves], strict=True
        ):
            for table in {tables.item(0)} if len(tables) == 1 else set(tables.tolist()):
                mine = tables == table
                value = None if table == ZERO_TABLE else self._tables.take(TableId(table), rows[mine])
                brought.append((target, places[mine], value))
        for target, at, value in brought:
            if value is None:
                self._tables.clear(target, at)
            else:
                self._tables.put(target, at, value)


def _taken(values: Tensor, positions: Ints) -> Tensor:
    """Return the values at these positions, in memory of their own."""
    chosen = torch.from_numpy(as_array(values).take(positions, 0))
    return chosen.view(torch.bfloat16) if values.dtype == torch.bfloat16 else chosen


def _among(positions: Ints, ran: Ints | None) -> tuple[Ints | slice, Ints]:
    """Return which of these positions of a step ran, and their rows in its outputs. ran: ascending, None for all."""
    if ran is None:
        return slice(None), positions
    rows = np.searchsorted(ran, positions)
    among = np.flatnonzero(np.isin(positions, ran))
    return among, rows[among]


def _chosen(rows: Tensor, begin: int, padded: int, ran: Ints | None) -> Tensor:
    """Return the hoisted rows of a step, [padded, ...]. Rows after those of the step are arbitrary but valid."""
    if ran is None:
        return rows.narrow(0, begin, padded)
    places = np.full(padded, begin)
    places[: len(ran)] += ran
    return rows[torch.from_numpy(places)]


def _row_by_row(
    name: str,
    specs: Sequence[ValueSpec],
    count: int,
    inputs: Outputs,
    call: Callable[..., Outputs],
    failed: Failures,
) -> Outputs:
    """Run a batch one row at a time, so that only rows at which the cell raises fail. Their outputs are zeros.

    Adds the positions at which it raised, and the reasons, to `failed`.
    """
    rows: list[Outputs] = []
    for position in range(count):
        try:
            rows.append(call(*(value[position : position + 1] for value in inputs)))
        except RAISED_BY_USERS as error:  # the cell's own error; the row's request gets it
            rows.append(example_rows(specs, 1))
            failed.append((position, f"cell {name!r} raised {said_by(error)}"))
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))
