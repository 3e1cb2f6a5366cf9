"""Runs a task in one compiled call, on the scheduler's arrays, if its cell has a loop. Used by RunningTask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.compile.binding import BoundCell
from batchmaker.compile.node_loop import NodeTask
from batchmaker.executor.base import LoopTests
from batchmaker.executor.tables import StateTables
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.greedy import GreedyLoop
from batchmaker.kernels.cpu.loop import LoopTask
from batchmaker.scheduler.commands import Rows, RunTask, TableId, TaskLanes

_NONE: Final[Rows] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Looped:
    """The results of a task whose steps ran in one call.

    fetched: the values of its fetches. stopped, skipped: [positions] as in StepsResult, if stop tests were applied.
    """

    fetched: tuple[Tensor, ...]
    stopped: NDArray[np.bool_] | None = None
    skipped: NDArray[np.bool_] | None = None


def run_in_loop(task: RunTask, cell: BoundCell, tables: StateTables, tests: LoopTests | None) -> Looped | None:
    """Run all steps of a task in one call, if this is the fastest way. tests: applied between steps, if it has loops.

    Returns None, with nothing written, if the steps must run one by one: the cell has no loop, only some of the steps
    have lanes, a stop test must be called between two steps, or an input is wrong.
    """
    lanes = task.lanes
    if lanes is None:
        return _run_nodes(task, cell, tables)
    num_sequence = len(cell.inputs) - len(lanes.tables)
    loop = cell.split(num_sequence).loop_for(task.largest)
    if loop is None:
        return None
    if isinstance(loop, GreedyLoop):
        looped, fetched = _described(task, lanes, cell, tables)
        ended = loop.run(looped, task.nodes, tests)
        if ended is None:
            return None
        values = _as_values(task, fetched, cell)
        return Looped(values) if tests is None else Looped(values, *ended)
    if task.num_steps > 1 and task.may_stop is not None:
        return None
    source_tables = source_rows = _NONE
    inputs: tuple[NDArray[Any], ...] = ()
    if loop.token is not None and cell.inputs[loop.token].dtype == "int64":
        source_tables, source_rows = task.source_tables[loop.token], task.source_rows[loop.token]
    else:
        inputs = tuple([_inputs(task.source_tables[k], task.source_rows[k], tables) for k in range(num_sequence)])
    looped, fetched = _described(task, lanes, cell, tables, source_tables, source_rows, inputs)
    return Looped(_as_values(task, fetched, cell)) if loop.run(looped) else None


def _run_nodes(task: RunTask, cell: BoundCell, tables: StateTables) -> Looped | None:
    """As run_in_loop, for a task of single nodes."""
    loop = cell.node_loop_for(task.largest)
    if loop is None:
        return None
    keep_at, keep_rows, keep_tables, fetched = _outputs_of(task, cell)
    looped = NodeTask(
        task.ends, task.largest, np.ascontiguousarray(task.source_tables), np.ascontiguousarray(task.source_rows),
        tables.addresses, keep_at, keep_rows, keep_tables, tuple([f.positions for f in task.fetches]),
        tuple([f.output for f in task.fetches]), fetched,
    )  # fmt: skip
    return Looped(_as_values(task, fetched, cell)) if loop.run(looped) else None


def _described(
    task: RunTask,
    lanes: TaskLanes,
    cell: BoundCell,
    tables: StateTables,
    source_tables: Rows = _NONE,
    source_rows: Rows = _NONE,
    inputs: tuple[NDArray[Any], ...] = (),
) -> tuple[LoopTask, tuple[NDArray[Any], ...]]:
    """Return a task in the form that loops take, and the arrays into which they write the values of its fetches."""
    keep_at, keep_rows, keep_tables, fetched = _outputs_of(task, cell)
    looped = LoopTask(
        task.ends, task.largest, lanes.used, lanes.rows, tables.addresses, source_tables, source_rows, inputs,
        lanes.move_at, lanes.move_tables, lanes.move_rows, tuple([tables.array(table) for table in lanes.tables]),
        keep_at, keep_rows, keep_tables, tuple([f.positions for f in task.fetches]),
        tuple([f.output for f in task.fetches]), fetched,
    )  # fmt: skip
    return looped, fetched


def _outputs_of(task: RunTask, cell: BoundCell) -> tuple[Rows, Rows, Rows, tuple[NDArray[Any], ...]]:
    """Return positions, rows and tables of what stays in state tables, and arrays for the values of the fetches."""
    outputs, keep = cell.outputs, task.keep
    fetched = tuple([_room(len(fetch.positions), outputs[fetch.output]) for fetch in task.fetches])
    if keep is None or keep.positions is None:
        return _NONE, _NONE, _NONE, fetched
    return keep.positions, keep.rows, _numbers(keep.tables), fetched


def _inputs(of: Rows, rows: Rows, tables: StateTables) -> NDArray[Any]:
    """Return one input of every position, [positions, *shape], in memory of its own. of, rows: [positions]."""
    first = TableId(of.item(0))
    if len(of) == 1 or (of == first).all():
        return tables.take(first, rows)
    found: NDArray[Any] | None = None
    for table in np.unique(of).tolist():
        mine = of == table
        values = tables.take(TableId(table), rows[mine])
        found = np.empty((len(of), *values.shape[1:]), values.dtype) if found is None else found
        found[mine] = values
    assert found is not None
    return found


@lru_cache(maxsize=1024)
def _numbers(tables: tuple[TableId, ...]) -> Rows:
    """Return the numbers of tables as an array. It is cached: do not write to it."""
    return np.array(tables, np.int64)


def _room(count: int, spec: ValueSpec) -> NDArray[Any]:
    """Return an array [count, *shape] to be filled; of int16 for bfloat16."""
    return np.empty((count, *spec.shape), np.int16 if spec.dtype == "bfloat16" else spec.dtype)


def _as_values(task: RunTask, fetched: tuple[NDArray[Any], ...], cell: BoundCell) -> tuple[Tensor, ...]:
    """Return the filled arrays as tensors: the values of the task's fetches."""
    values = map(torch.from_numpy, fetched)
    return tuple([
        rows.view(torch.bfloat16) if cell.outputs[fetch.output].dtype == "bfloat16" else rows
        for rows, fetch in zip(values, task.fetches, strict=True)
    ])  # fmt: skip
