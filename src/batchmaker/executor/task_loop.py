"""Runs a task in one compiled call, on the scheduler's arrays, if its cell has a loop. Used by RunningTask."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.arrays import Ints
from batchmaker.compile.binding import BoundCell
from batchmaker.compile.node_loop import NodeTask
from batchmaker.compile.state_loop import StateTask
from batchmaker.core.commands import RunTask, TableId, TaskLanes
from batchmaker.executor.base import LoopTests
from batchmaker.executor.state_tables import StateTables
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.greedy import GreedyLoop
from batchmaker.kernels.cpu.loop import LoopTask, RecurrentLoop
from batchmaker.model.batch_sizes import size_ladder

_NONE: Final[Ints] = np.empty(0, np.int64)


OutputsOfTask = tuple[Ints, Ints, Ints, tuple[Ints, ...], tuple[int, ...], tuple[NDArray[Any], ...]]
"""The last fields of LoopTask, NodeTask and StateTask: keep_at, keep_rows, keep_tables, fetch_at, fetch_of, fetched."""

MAX_HOISTED_ROWS: Final = 2048
HOISTED_SIZES: Final = size_ladder(MAX_HOISTED_ROWS, exact=8, parts=4)
"""Batch sizes of the hoisted part of a cell. More rows are computed in blocks of the largest size."""


@dataclass(frozen=True, slots=True)
class Looped:
    """The results of a task whose first steps ran in one call.

    num_steps: how many; nothing is written of the others. fetched: the values of its fetches, of these steps. stopped,
    skipped: [positions of these steps] as in StepsResult, if stop tests were applied. failed: positions at which one
    raised, with the reason.
    """

    num_steps: int
    fetched: tuple[Tensor, ...]
    stopped: NDArray[np.bool_] | None = None
    skipped: NDArray[np.bool_] | None = None
    failed: tuple[tuple[int, str], ...] = ()


def run_in_loop(task: RunTask, cell: BoundCell, tables: StateTables, tests: LoopTests | None) -> Looped | None:
    """Run steps of a task in one call, if this is the fastest way. tests: applied between steps, if it has loops.

    It runs all steps, or those before one with a wrong input. Returns None, with nothing written, if the steps must run
    one by one: the cell has no loop, only some of the steps have lanes, or the first step has a wrong input.
    """
    lanes = task.lanes
    if lanes is None:
        return _run_nodes(task, cell, tables)
    num_step_inputs = len(cell.inputs) - len(lanes.tables)
    cell = cell.split(num_step_inputs)
    loop = cell.loop_for(task.largest)
    if isinstance(loop, GreedyLoop):
        looped, fetched = _described(task, lanes, cell, tables)
        ended = loop.run(looped, task.nodes, tests)
        if ended is not None:
            values = _as_values(task, fetched, cell)
            return Looped(task.num_steps, values) if tests is None else Looped(task.num_steps, values, *ended)
    if not isinstance(loop, RecurrentLoop):
        return _run_states(task, lanes, cell, tables, tests)
    num_steps, token = len(task.ends), loop.token
    if num_steps > 1 and task.may_stop is not None:
        return None
    source_tables = source_rows = _NONE
    inputs: tuple[NDArray[Any], ...] = ()
    if token is not None and cell.inputs[token].dtype == "int64":
        source_tables, source_rows = task.source_tables[token], task.source_rows[token]
    else:
        inputs = tuple([_inputs(task.source_tables[k], task.source_rows[k], tables) for k in range(num_step_inputs)])
    looped, fetched = _described(task, lanes, cell, tables, source_tables, source_rows, inputs)
    return Looped(num_steps, _as_values(task, fetched, cell)) if loop.run(looped) else None


def _run_nodes(task: RunTask, cell: BoundCell, tables: StateTables) -> Looped | None:
    """As run_in_loop, for a task of single nodes."""
    loop = cell.node_loop_for(task.largest)
    if loop is None:
        return None
    *_, fetched = outputs = _outputs_of(task, cell)
    looped = NodeTask(
        task.ends,
        task.largest,
        np.ascontiguousarray(task.source_tables),
        np.ascontiguousarray(task.source_rows),
        tables.addresses,
        *outputs,
    )
    return _of_first(task, loop.run(looped), fetched, cell)


def _run_states(
    task: RunTask, lanes: TaskLanes, cell: BoundCell, tables: StateTables, tests: LoopTests | None
) -> Looped | None:
    """As run_in_loop, for chains with any state. cell: split."""
    loop = cell.state_loop_for(task.largest)
    if loop is None or not lanes.used.all() or (tests is not None and not loop.can_watch(tests.outputs)):
        return None
    hoisted = _hoisted(task, cell, tables)
    if hoisted is None:
        return None
    *_, fetched = outputs = _outputs_of(task, cell)
    looped = StateTask(
        task.ends,
        task.largest,
        lanes.rows,
        task.nodes,
        tables.addresses,
        hoisted,
        tuple([tables[table] for table in lanes.tables]),
        lanes.move_at,
        np.ascontiguousarray(lanes.move_tables),
        np.ascontiguousarray(lanes.move_rows),
        *outputs,
    )
    done = loop.run(looped, cell.name, tests)
    if tests is None:
        return _of_first(task, done.num_steps, fetched, cell)
    return _of_first(task, done.num_steps, fetched, cell, done.stopped, done.skipped, done.failed)


def _of_first(
    task: RunTask,
    num_steps: int,
    fetched: tuple[NDArray[Any], ...],
    cell: BoundCell,
    stopped: NDArray[np.bool_] | None = None,
    skipped: NDArray[np.bool_] | None = None,
    failed: tuple[tuple[int, str], ...] = (),
) -> Looped | None:
    """Return the results of the first steps of a task; None if there are none."""
    if num_steps == 0:
        return None
    values = _as_values(task, fetched, cell)
    if num_steps < task.num_steps:
        end = task.begin_of(num_steps)
        values = tuple(
            [rows[: np.searchsorted(f.positions, end)] for rows, f in zip(values, task.fetches, strict=True)]
        )
        stopped, skipped = (None if flags is None else flags[:end] for flags in (stopped, skipped))
    return Looped(num_steps, values, stopped, skipped, failed)


def hoisted_rows(count: int) -> int:
    """Round up to a size at which the hoisted part runs."""
    if count > MAX_HOISTED_ROWS:
        return -(-count // MAX_HOISTED_ROWS) * MAX_HOISTED_ROWS
    return HOISTED_SIZES[bisect_left(HOISTED_SIZES, count)]


def _hoisted(task: RunTask, cell: BoundCell, tables: StateTables) -> tuple[Tensor, ...] | None:
    """Return the hoisted values of all positions, or more; None if the cell raises."""
    if not cell.hoisted:
        return ()
    count, num_step_inputs = len(task.nodes), cell.num_step_inputs or 0
    room, columns = hoisted_rows(count), []
    for spec, of, rows in zip(cell.inputs[:num_step_inputs], task.source_tables, task.source_rows, strict=False):
        values = np.zeros((room, *spec.shape), np.int16 if spec.dtype == "bfloat16" else spec.dtype)
        values[:count] = _inputs(of, rows, tables)
        column = torch.from_numpy(values)
        columns.append(column.view(torch.bfloat16) if spec.dtype == "bfloat16" else column)
    try:
        with torch.no_grad():
            blocks = [
                cell.hoist(tuple([column[at : at + MAX_HOISTED_ROWS] for column in columns]))
                for at in range(0, room, MAX_HOISTED_ROWS)
            ]
    except Exception:  # any exception of the cell; the steps one by one find whose it is
        return None
    joined = blocks[0] if len(blocks) == 1 else tuple(map(torch.cat, zip(*blocks, strict=True)))
    return tuple([values.contiguous() for values in joined])


def _described(
    task: RunTask,
    lanes: TaskLanes,
    cell: BoundCell,
    tables: StateTables,
    source_tables: Ints = _NONE,
    source_rows: Ints = _NONE,
    inputs: tuple[NDArray[Any], ...] = (),
) -> tuple[LoopTask, tuple[NDArray[Any], ...]]:
    """Return a task in the form that loops take, and the arrays into which they write the values of its fetches."""
    *_, fetched = outputs = _outputs_of(task, cell)
    looped = LoopTask(
        task.ends,
        task.largest,
        lanes.used,
        lanes.rows,
        tables.addresses,
        source_tables,
        source_rows,
        inputs,
        lanes.move_at,
        lanes.move_tables,
        lanes.move_rows,
        tuple([tables.array(table) for table in lanes.tables]),
        *outputs,
    )
    return looped, fetched


def _outputs_of(task: RunTask, cell: BoundCell) -> OutputsOfTask:
    """Return where the outputs of a task go; the last are arrays for the values of its fetches."""
    outputs, keep = cell.outputs, task.keep
    kept = (_NONE, _NONE, _NONE)
    if keep is not None and keep.positions is not None:
        kept = keep.positions, keep.rows, _numbers(keep.tables)
    at, of = tuple([fetch.positions for fetch in task.fetches]), tuple([fetch.output for fetch in task.fetches])
    return *kept, at, of, tuple([_room(len(fetch.positions), outputs[fetch.output]) for fetch in task.fetches])


def _inputs(of: Ints, rows: Ints, tables: StateTables) -> NDArray[Any]:
    """Return one input of every position, [positions, *shape], in memory of its own. of, rows: [positions]."""
    first = TableId(of.item(0))
    if len(of) == 1 or (of == first).all():
        return tables.take(first, rows)
    together: NDArray[Any] | None = None
    for table in np.unique(of).tolist():
        mine = of == table
        values = tables.take(TableId(table), rows[mine])
        together = np.empty((len(of), *values.shape[1:]), values.dtype) if together is None else together
        together[mine] = values
    assert together is not None
    return together


@lru_cache(maxsize=1024)
def _numbers(tables: tuple[TableId, ...]) -> Ints:
    """Return the numbers of tables as an array. It is cached: do not write to it."""
    return np.array(tables, np.int64)


def _room(count: int, spec: ValueSpec) -> NDArray[Any]:
    """Return zeros [count, *shape] to be filled; of int16 for bfloat16. Rows that do not run stay as they are."""
    return np.zeros((count, *spec.shape), np.int16 if spec.dtype == "bfloat16" else spec.dtype)


def _as_values(task: RunTask, fetched: tuple[NDArray[Any], ...], cell: BoundCell) -> tuple[Tensor, ...]:
    """Return the filled arrays as tensors: the values of the task's fetches."""
    values = map(torch.from_numpy, fetched)
    return tuple(
        [
            rows.view(torch.bfloat16) if cell.outputs[fetch.output].dtype == "bfloat16" else rows
            for rows, fetch in zip(values, task.fetches, strict=True)
        ]
    )
