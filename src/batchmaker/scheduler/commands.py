"""What the scheduler asks of its driver. Plain data: arrays of row numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.spec import TypeId, ValueSpec
from batchmaker.scheduler.events import RequestId, TaskId, WorkerId

TableId = NewType("TableId", int)
"""A state table: all rows of one output of one kind of value."""

Rows = NDArray[np.int64]
Flags = NDArray[np.bool_]

ZERO_TABLE = TableId(0)
"""Stands for zeros of the right shape; it has no rows."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A state table [num_rows, *spec.shape]. spec says shape and dtype of one row."""

    table: TableId
    spec: ValueSpec


@dataclass(frozen=True, slots=True)
class Reserve:
    """The tables must have at least `num_rows` rows before the next task; rows already there keep their values."""

    tables: tuple[TableSpec, ...]
    num_rows: int


@dataclass(slots=True)
class Admit:
    """A graph's nodes have got numbers: local node `first_local + i` of the request is node `base + i`.

    Nobody changes it: a frozen one takes a microsecond more to make.

    The driver writes the graph's host inputs into the host tables (one per host input, in order) at those rows.
    slot: a small number that the request has to itself while it is in flight. kept_base: where the request's local
    nodes before its own are found, which its sequence has kept: local i is node `kept_base + i`.
    """

    request: RequestId
    slot: int
    first_local: int
    base: int
    num_nodes: int
    host_tables: tuple[TableId, ...]
    kept_base: int = 0


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where some positions of a batch find one input.

    table, rows: [n] rows of that table (ignored for ZERO_TABLE). positions: [n] places in the batch, or None for
    all places in order.
    """

    table: TableId
    rows: Rows
    positions: Rows | None = None


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the state of running chains lives during a step.

    tables: one per state input. count: batch size. rows: the lane of each position, or None when position i is lane i:
    then the batch is a slice of the tables and nothing is copied. arriving: per state input, positions whose state
    lies elsewhere (a chain that starts or moves) and must be copied into its lane first.
    """

    tables: tuple[TableId, ...]
    count: int
    rows: Rows | None
    arriving: tuple[tuple[RowSource, ...], ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """Outputs that stay in state tables for later nodes.

    tables: one per output. rows: [n]; rows[i] takes the outputs at positions[i], or at i where positions is None.
    """

    tables: tuple[TableId, ...]
    rows: Rows
    positions: Rows | None


@dataclass(frozen=True, slots=True)
class FetchOutput:
    """One output of some positions travels to the host with the step's completion."""

    output: int
    positions: Rows


@dataclass(frozen=True, slots=True)
class Step:
    """One batched invocation of a cell (a task in BatchMaker's words).

    nodes: [batch] node numbers. inputs: per input that is not lane state, its sources. lanes: None for single nodes.
    may_stop: whether the step has runs that may stop here, for the driver's stop test.
    """

    nodes: Rows
    inputs: tuple[tuple[RowSource, ...], ...]
    lanes: Lanes | None
    keep: Keep | None
    fetches: tuple[FetchOutput, ...]
    may_stop: bool = False

    @property
    def batch(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class TaskLanes:
    """Where the state of the chains of a task lives. Positions are those of the task.

    tables: one per state input. rows: [positions] the lane of each. used: [steps] whether a step has lanes; one of
    single nodes alone has none. dense: [steps] whether the positions of a step are lanes 0 to batch - 1, in order.
    move_at: [moves] ascending positions whose state lies elsewhere and must be brought to their lane when their step
    begins: that of chains that start or move. move_tables, move_rows: [state inputs, moves] where it lies. What is
    moved from lane to lane in one step is read before any of it is written.
    """

    tables: tuple[TableId, ...]
    rows: Rows
    used: Flags
    dense: Flags
    move_at: Rows
    move_tables: Rows
    move_rows: Rows


@dataclass(frozen=True, slots=True)
class RunTask:
    """Run steps of one cell type, in order, on one worker: up to MaxTasksToSubmit, or as many as the budget allows.

    The steps lie one after the other in the same arrays: those of step s are the positions from ends[s - 1] (0 for the
    first) to before ends[s]. largest: rows of the largest step. nodes: [positions]. source_tables, source_rows:
    [inputs, positions] where each finds each input that is no lane state. lanes: None where no node is of a run. keep,
    fetches: of all steps; their positions are ascending. may_stop: [steps] whether a step has runs that may stop there,
    for the driver's stop test.
    """

    task: TaskId
    worker: WorkerId
    type_id: TypeId
    largest: int
    ends: Rows
    nodes: Rows
    source_tables: Rows
    source_rows: Rows
    lanes: TaskLanes | None
    keep: Keep | None
    fetches: tuple[FetchOutput, ...]
    may_stop: Flags

    @property
    def num_steps(self) -> int:
        return len(self.ends)

    def begin_of(self, step: int) -> int:
        """Return the first position of a step; of the one after the last, how many positions there are."""
        return int(self.ends[step - 1]) if step else 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps one by one, for who looks at single ones; made anew at every call."""
        return steps_of(self)


@dataclass(frozen=True, slots=True)
class Read:
    """An output that rests in a state table is asked for after its node has run: read it now."""

    request: RequestId
    node: int
    output: int
    table: TableId
    row: int


@dataclass(slots=True)
class Reply:
    """The request's last cell is done: everything that it fetches has been reported. (Nobody changes it: see Admit.)"""

    request: RequestId


class FailureKind(Enum):
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REFUSED = "refused"
    CELL = "cell"
    UNFOLD = "unfold"


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends without an answer."""

    request: RequestId
    kind: FailureKind
    reason: str


Command = Reserve | Admit | RunTask | Read | Reply | Fail
"""Commands come in the order in which they must be carried out."""


def steps_of(task: RunTask) -> tuple[Step, ...]:
    """Return the steps of a task one by one, with positions that are those of the step."""
    begin = 0
    steps = []
    for number, end in enumerate(task.ends.tolist()):
        lanes = _lanes_of(task.lanes, number, begin, end)
        num_inputs = len(task.source_tables) - (0 if lanes is None else len(lanes.tables))
        inputs = tuple(
            _sources(task.source_tables[port, begin:end], task.source_rows[port, begin:end])
            for port in range(num_inputs if len(task.source_tables) else 0)
        )
        keep = task.keep
        if keep is not None and keep.positions is not None:
            mine = within(keep.positions, begin, end)
            positions = keep.positions[mine] - begin
            kept = Keep(keep.tables, keep.rows[mine], None if len(positions) == end - begin else positions)
            keep = kept if len(positions) else None
        found = [(f.output, f.positions[within(f.positions, begin, end)] - begin) for f in task.fetches]
        fetches = tuple(FetchOutput(output, positions) for output, positions in found if len(positions))
        steps.append(Step(task.nodes[begin:end], inputs, lanes, keep, fetches, bool(task.may_stop[number])))
        begin = end
    return tuple(steps)


def within(positions: Rows, begin: int, end: int) -> slice:
    """Return where those of ascending positions lie that are from `begin` to before `end`."""
    first, last = np.searchsorted(positions, (begin, end)).tolist()
    return slice(first, last)


def _sources(tables: Rows, rows: Rows, positions: Rows | None = None) -> tuple[RowSource, ...]:
    """Return sources by table. tables, rows: [n]. positions: [n] in the batch; None where they are the batch."""
    distinct = np.unique(tables)
    if positions is None and len(distinct) == 1:
        return (RowSource(TableId(int(distinct[0])), rows),)
    places = np.arange(len(tables)) if positions is None else positions
    masks = [(table, tables == table) for table in distinct.tolist()]
    return tuple(RowSource(TableId(table), rows[mask], places[mask]) for table, mask in masks)


def _lanes_of(lanes: TaskLanes | None, step: int, begin: int, end: int) -> Lanes | None:
    if lanes is None or not lanes.used[step]:
        return None
    moves = within(lanes.move_at, begin, end)
    positions = lanes.move_at[moves] - begin
    arriving = tuple(
        _sources(tables[moves], rows[moves], positions)
        for tables, rows in zip(lanes.move_tables, lanes.move_rows, strict=True)
    )
    return Lanes(lanes.tables, end - begin, None if lanes.dense[step] else lanes.rows[begin:end], arriving)
