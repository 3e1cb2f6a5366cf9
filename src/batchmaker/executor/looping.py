"""A task of recurrent chains in one compiled call: the scheduler's arrays as the loop takes them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.cells.binding import BoundCell
from batchmaker.executor.tables import StateTables
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.loop import LoopTask
from batchmaker.scheduler.commands import ZERO_TABLE, Rows, RunTask, TableId, TaskLanes

_NONE: Final[Rows] = np.empty(0, np.int64)
_FROM_ZEROS: Final = -1
_FIRST_ENTERING: Final = -2


def run_in_loop(task: RunTask, cell: BoundCell, tables: StateTables) -> tuple[Tensor, ...] | None:
    """Run all steps of a task, if that is the fastest way; return the values of its fetches.

    None, with nothing written, where its steps have to run one by one: the cell is more than one recurrent step, some
    step has no lanes, a loop may end between two steps, or an input is at fault.
    """
    lanes = task.lanes
    if lanes is None or (task.num_steps > 1 and task.may_stop.any()):
        return None
    bound = cell.split(len(cell.inputs) - len(lanes.tables))
    if bound.loop is None or not lanes.used.all():
        return None
    loop = bound.loop_for(task.largest)
    if loop is None:
        return None
    num_sequence = len(cell.inputs) - len(lanes.tables)
    inputs = tuple([_inputs(task.source_tables[k], task.source_rows[k], tables) for k in range(num_sequence)])
    move_from, entering = _moves(lanes, cell.inputs[num_sequence:], tables)
    fetched = tuple([_room(len(f.positions), cell.outputs[f.output]) for f in task.fetches])
    keep = task.keep
    keep_at = _NONE if keep is None or keep.positions is None else keep.positions
    looped = LoopTask(
        task.ends, lanes.rows, inputs, lanes.move_at, move_from, entering,
        tuple([tables.array(table) for table in lanes.tables]), keep_at, _NONE if keep is None else keep.rows,
        () if keep is None else tuple([tables.array(table) for table in keep.tables]),
        tuple([f.positions for f in task.fetches]), tuple([f.output for f in task.fetches]), fetched,
    )  # fmt: skip
    if not loop.run(looped):
        return None
    return tuple([_as_values(rows, cell.outputs[f.output]) for rows, f in zip(fetched, task.fetches, strict=True)])


def _inputs(of: Rows, rows: Rows, tables: StateTables) -> NDArray[Any]:
    """Return one input of every position, in memory of its own. of, rows: [positions] table and row."""
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


def _moves(
    lanes: TaskLanes, state: tuple[ValueSpec, ...], tables: StateTables
) -> tuple[Rows, tuple[NDArray[Any], ...]]:
    """Return where the state of those that move is, and rows of each part for those that bring one from elsewhere."""
    of, rows = lanes.move_tables, lanes.move_rows
    if of.shape[1] == 0 or not of.any():  # ZERO_TABLE
        return np.full(of.shape[1], _FROM_ZEROS), tuple([_room(0, spec) for spec in state])
    stays = (of == np.array(lanes.tables)[:, None]).all(0)
    move_from = np.where(stays, rows[0], _FROM_ZEROS)
    comes = np.flatnonzero(~stays & of.any(0))
    move_from[comes] = _FIRST_ENTERING - np.arange(len(comes))
    entering = []
    for part, spec in enumerate(state):
        brought = _room(len(comes), spec)
        for table in np.unique(of[part, comes]).tolist():
            mine = of[part, comes] == table
            brought[mine] = 0 if table == ZERO_TABLE else tables.take(TableId(table), rows[part, comes[mine]])
        entering.append(brought)
    return move_from, tuple(entering)


def _room(count: int, spec: ValueSpec) -> NDArray[Any]:
    """Return rows to be filled; bfloat16 as int16."""
    return np.empty((count, *spec.shape), np.int16 if spec.dtype == "bfloat16" else spec.dtype)


def _as_values(rows: NDArray[Any], spec: ValueSpec) -> Tensor:
    values = torch.from_numpy(rows)
    return values.view(torch.bfloat16) if spec.dtype == "bfloat16" else values
