"""A task of recurrent chains in one compiled call: the scheduler's arrays as the loop takes them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchmaker.cells.binding import BoundCell
from batchmaker.executor.tables import StateTables
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.loop import LoopTask
from batchmaker.scheduler.commands import Rows, RunTask, TableId

_NONE: Final[Rows] = np.empty(0, np.int64)


def run_in_loop(task: RunTask, cell: BoundCell, tables: StateTables) -> tuple[Tensor, ...] | None:
    """Run all steps of a task, if that is the fastest way; return the values of its fetches.

    None, with nothing written, where its steps have to run one by one: the cell is more than one recurrent step, some
    step has no lanes, a loop may end between two steps, or an input is at fault.
    """
    lanes = task.lanes
    if lanes is None or (task.num_steps > 1 and task.may_stop.any()):
        return None
    num_sequence = len(cell.inputs) - len(lanes.tables)
    loop = cell.split(num_sequence).loop_for(task.largest)
    if loop is None:
        return None
    source_tables = source_rows = _NONE
    inputs: tuple[NDArray[Any], ...] = ()
    if loop.token is not None and cell.inputs[loop.token].dtype == "int64":
        source_tables, source_rows = task.source_tables[loop.token], task.source_rows[loop.token]
    else:
        inputs = tuple([_inputs(task.source_tables[k], task.source_rows[k], tables) for k in range(num_sequence)])
    keep_at, keep_rows, keep_tables = _NONE, _NONE, _NONE
    keep = task.keep
    if keep is not None and keep.positions is not None:
        keep_at, keep_rows, keep_tables = keep.positions, keep.rows, _numbers(keep.tables)
    outputs = cell.outputs
    fetched = tuple([_room(len(f.positions), outputs[f.output]) for f in task.fetches])
    looped = LoopTask(
        task.ends, task.largest, lanes.used, lanes.rows, tables.addresses, source_tables, source_rows, inputs,
        lanes.move_at, lanes.move_tables, lanes.move_rows, tuple([tables.array(table) for table in lanes.tables]),
        keep_at, keep_rows, keep_tables, tuple([f.positions for f in task.fetches]),
        tuple([f.output for f in task.fetches]), fetched,
    )  # fmt: skip
    if not loop.run(looped):
        return None
    return tuple([_as_values(rows, outputs[f.output]) for rows, f in zip(fetched, task.fetches, strict=True)])


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


@lru_cache(maxsize=1024)
def _numbers(tables: tuple[TableId, ...]) -> Rows:
    """Return the numbers of tables as an array, which is shared."""
    return np.array(tables, np.int64)


def _room(count: int, spec: ValueSpec) -> NDArray[Any]:
    """Return rows to be filled; bfloat16 as int16."""
    return np.empty((count, *spec.shape), np.int16 if spec.dtype == "bfloat16" else spec.dtype)


def _as_values(rows: NDArray[Any], spec: ValueSpec) -> Tensor:
    values = torch.from_numpy(rows)
    return values.view(torch.bfloat16) if spec.dtype == "bfloat16" else values
