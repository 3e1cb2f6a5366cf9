"""Running the steps of a task on tensors: rows in, cell, rows out."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from batchmaker.cells.binding import BoundCell
from batchmaker.cells.cell import size_ladder
from batchmaker.cells.export import example_rows
from batchmaker.errors import RAISED_BY_USERS, said_by
from batchmaker.executor.base import StepResult
from batchmaker.executor.tables import StateTables, as_array
from batchmaker.graph.spec import CellType, ValueSpec
from batchmaker.scheduler.commands import ZERO_TABLE, FetchOutput, Keep, Lanes, RunTask, Source, Step

Outputs = tuple[Tensor, ...]
Failures = tuple[tuple[int, str], ...]

MAX_HOISTED_ROWS = 2048
HOISTED_SIZES = size_ladder(MAX_HOISTED_ROWS, exact=8, parts=4)
"""Sizes at which the hoisted part of a cell runs; more rows are computed in blocks of the largest."""


@final
class TaskRunner:
    """Runs tasks on one set of state tables. Safe for several threads, whose tasks touch different rows."""

    def __init__(self, types: Sequence[CellType], cells: Sequence[BoundCell], tables: StateTables) -> None:
        self._types = types
        self._cells = cells
        self._tables = tables

    def run(self, task: RunTask) -> Iterator[StepResult]:
        """Run a task's steps in order; yields after each."""
        begin = time.perf_counter()
        cell_type, cell = self._types[task.type_id], self._cells[task.type_id]
        sizes = cell_type.batch_sizes
        chains = [step for step in task.steps if step.lanes is not None]
        hoisted: Outputs = ()
        bad: dict[int, str] = {}
        if chains:
            lanes = chains[0].lanes
            assert lanes is not None
            cell = cell.split(len(cell.inputs) - len(lanes.tables))
            hoisted, bad = self._hoist(cell_type, cell, chains)
        offset = 0
        for number, step in enumerate(task.steps):
            padded = sizes[bisect_left(sizes, step.batch)]
            if step.lanes is None:
                outputs, failed = self._run_nodes(cell, step, padded)
            else:
                block = tuple(values.narrow(0, offset, padded) for values in hoisted)
                outputs, failed = self._run_chains(cell, step, step.lanes, block, padded)
                if bad:
                    failed += tuple((i, bad[offset + i]) for i in range(step.batch) if offset + i in bad)
                offset += step.batch
            fetched = tuple(_fetch(fetch, outputs) for fetch in step.fetches)
            if step.keep is not None:  # last, since outputs that are inputs handed through may lie in these rows
                self._keep(step.keep, step.batch, outputs)
            yield StepResult(task.task, number, fetched, failed, time.perf_counter() - begin)
            begin = time.perf_counter()

    # --- single nodes ------------------------------------------------------------------------------------------

    def _run_nodes(self, cell: BoundCell, step: Step, padded: int) -> tuple[Outputs, Failures]:
        inputs = tuple(
            self._tables.gather(sources, step.batch, padded, spec)
            for sources, spec in zip(step.inputs, cell.inputs, strict=True)
        )
        try:
            return cell.call(inputs), ()
        except RAISED_BY_USERS:  # a cell may raise anything; find the rows that make it
            return _row_by_row(cell.name, cell.outputs, step.batch, inputs, lambda *row: cell.call(row))

    # --- chains --------------------------------------------------------------------------------------------------

    def _hoist(self, cell_type: CellType, cell: BoundCell, chains: list[Step]) -> tuple[Outputs, dict[int, str]]:
        """Compute what does not depend on state for all steps of the task at once.

        Returns the rows of all steps one after the other, with room for the padding of each, and the rows at which the
        cell raised.
        """
        sizes, total, room = cell_type.batch_sizes, 0, 0
        for step in chains:
            room = max(room, total + sizes[bisect_left(sizes, step.batch)])
            total += step.batch
        room = _hoisted_rows(room)
        columns = []
        for port, spec in enumerate(cell.inputs[: len(chains[0].inputs)]):
            parts = [step.inputs[port] for step in chains]
            table = parts[0][0].table
            if all(len(p) == 1 and p[0].positions is None and p[0].table == table for p in parts):
                rows = np.concatenate([p[0].rows for p in parts])
                columns.append(self._tables.gather((Source(table, rows),), total, room, spec))
            else:
                pieces = [self._tables.gather(p, s.batch, s.batch, spec) for p, s in zip(parts, chains, strict=True)]
                pieces.append(pieces[-1][:1].expand(room - total, *spec.shape))
                columns.append(torch.cat(pieces))
        try:
            blocks = [
                cell.hoist(tuple(column[at : at + MAX_HOISTED_ROWS] for column in columns))
                for at in range(0, room, MAX_HOISTED_ROWS)
            ]
        except RAISED_BY_USERS:  # a cell may raise anything; find the rows that make it
            hoisted, failed = _row_by_row(cell.name, cell.hoisted, room, tuple(columns), lambda *row: cell.hoist(row))
            return hoisted, dict(failed)
        return blocks[0] if len(blocks) == 1 else tuple(map(torch.cat, zip(*blocks, strict=True))), {}

    def _run_chains(
        self, cell: BoundCell, step: Step, lanes: Lanes, hoisted: Outputs, padded: int
    ) -> tuple[Outputs, Failures]:
        for i, sources in enumerate(lanes.arriving):
            if sources:
                self._bring(lanes, i, sources)
        tables, rows = self._tables, lanes.rows
        if rows is None:
            state = tuple(tables[table].narrow(0, 0, padded) for table in lanes.tables)
        else:
            state = tuple(tables.copy(table, rows, padded) for table in lanes.tables)
        failed: Failures = ()
        try:
            outputs = cell.step(hoisted, state)
        except RAISED_BY_USERS:  # a cell may raise anything; find the rows that make it
            size = len(hoisted)
            outputs, failed = _row_by_row(
                cell.name, cell.outputs, step.batch, (*hoisted, *state), lambda *row: cell.step(row[:size], row[size:])
            )
        first = len(outputs) - len(lanes.tables)
        stays = [i >= first and new is state[i - first] for i, new in enumerate(outputs)]  # handed through, in its lane
        moving = [new for new, still in zip(outputs, stays, strict=True) if not still]
        if any(tables.holds(table, new) for new in moving for table in lanes.tables):
            # They are still to be kept and fetched.
            outputs = tuple(new if still else new.clone() for new, still in zip(outputs, stays, strict=True))
        places = slice(step.batch) if rows is None else rows
        for table, new, still in zip(lanes.tables, outputs[first:], stays[first:], strict=True):
            if not still:
                tables.put(table, places, as_array(new)[: step.batch])
        return outputs, failed

    def _bring(self, lanes: Lanes, i: int, sources: tuple[Source, ...]) -> None:
        """Copy one part of the state of chains that start or move into their lanes."""
        target = lanes.tables[i]
        values = [None if s.table == ZERO_TABLE else self._tables.take(s.table, s.rows) for s in sources]
        for source, value in zip(sources, values, strict=True):
            places = np.arange(lanes.count) if source.positions is None else source.positions
            if lanes.rows is not None:
                places = lanes.rows[places]
            if value is None:
                self._tables.clear(target, places)
            else:
                self._tables.put(target, places, value)

    # --- outputs -------------------------------------------------------------------------------------------------

    def _keep(self, keep: Keep, batch: int, outputs: Outputs) -> None:
        kept = []
        for values in outputs:
            array = as_array(values)
            if keep.positions is not None:
                array = array.take(keep.positions, 0)
            else:
                handed_through = any(self._tables.holds(table, values) for table in keep.tables)
                array = array[:batch].copy() if handed_through else array[:batch]
            kept.append(array)
        for table, array in zip(keep.tables, kept, strict=True):
            self._tables.put(table, keep.rows, array)


def _fetch(fetch: FetchOutput, outputs: Outputs) -> Tensor:
    """Return the values at some positions in memory of their own."""
    values = outputs[fetch.output]
    taken = torch.from_numpy(as_array(values).take(fetch.positions, 0))
    return taken.view(torch.bfloat16) if values.dtype == torch.bfloat16 else taken


def _hoisted_rows(count: int) -> int:
    """Round up to a size at which the hoisted part runs."""
    if count > MAX_HOISTED_ROWS:
        return -(-count // MAX_HOISTED_ROWS) * MAX_HOISTED_ROWS
    return HOISTED_SIZES[bisect_left(HOISTED_SIZES, count)]


def _row_by_row(
    name: str, specs: Sequence[ValueSpec], count: int, inputs: Outputs, call: Callable[..., Outputs]
) -> tuple[Outputs, Failures]:
    """Run a batch one row at a time, so that only the rows that make the cell raise fail; theirs are zeros."""
    rows: list[Outputs] = []
    failed: list[tuple[int, str]] = []
    for position in range(count):
        try:
            rows.append(call(*(value[position : position + 1] for value in inputs)))
        except RAISED_BY_USERS as error:  # the cell's own; it is reported to the row's request
            rows.append(example_rows(specs, 1))
            failed.append((position, f"cell {name!r} raised {said_by(error)}"))
    return tuple(torch.cat(column) for column in zip(*rows, strict=True)), tuple(failed)
