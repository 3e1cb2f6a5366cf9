"""The scheduler's outputs. `Scheduler.handle` returns these commands; the driver carries them out in order.

They are plain data: arrays of row numbers, no tensors. Nobody changes a command. Those of every turn are not frozen,
because making a frozen object takes a microsecond more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NewType

import numpy as np

from batchmaker.arrays import Flags, Ints
from batchmaker.core.events import RequestId, SequenceId, TaskId, WorkerId
from batchmaker.graph.spec import TypeId, ValueSpec

TableId = NewType("TableId", int)
"""The number of a state table. A table holds values of one kind: an output, an input from the host, or a lane state."""


ZERO_TABLE = TableId(0)
"""Stands for zeros of the right shape. It is no real table and has no rows."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A state table of shape [num_rows, *spec.shape]. `spec` gives the shape and dtype of one row."""

    table: TableId
    spec: ValueSpec


@dataclass(frozen=True, slots=True)
class Reserve:
    """The tables must have at least `num_rows` rows before the next command. Existing rows keep their values."""

    tables: tuple[TableSpec, ...]
    num_rows: int


Grow = Callable[[Reserve], bool]
"""Asked before tables must grow: whether there is memory for it. If so, the tables may have grown already."""


def always(_: Reserve) -> bool:
    """Return True, as the answer to `Grow` where nothing is stored."""
    return True


@dataclass(slots=True)
class Admit:
    """The nodes of a graph have numbers now: local node `first_local + i` of the request is node `base + i`.

    The driver writes the graph's host inputs into the host tables, at the rows with the numbers of the nodes.

    - slot: a small number that belongs to the request alone while it is in flight.
    - host_tables: one per host input of the graph, in the same order.
    - kept_base: first of the stored nodes of the request's sequence. They are the local nodes before the request's own:
      local node i is node `kept_base + i`.
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
    """Where some positions of a batch read one input.

    - table, rows: [n] the rows of that table; `rows` means nothing for ZERO_TABLE.
    - positions: [n] positions in the batch, or None for all positions in order.
    """

    table: TableId
    rows: Ints
    positions: Ints | None = None


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the state of running chains is during a step.

    - tables: one per state input.
    - count: batch size.
    - rows: [count] the lane of each position, or None if position i is lane i. Then the batch is a slice of the tables,
      and nothing is copied.
    - arriving: for each state input, the positions whose state is elsewhere, because the chain starts or moves. It must
      be copied into the lane before the step.
    """

    tables: tuple[TableId, ...]
    count: int
    rows: Ints | None
    arriving: tuple[tuple[RowSource, ...], ...]


@dataclass(slots=True)
class Keep:
    """Outputs that stay in state tables for later nodes.

    - tables: one per output.
    - rows: [n] row `rows[i]` takes the outputs of position `positions[i]`, or of position i if `positions` is None.
    """

    tables: tuple[TableId, ...]
    rows: Ints
    positions: Ints | None


@dataclass(slots=True)
class FetchOutput:
    """One output that goes to the host from some positions, when the step completes."""

    output: int
    positions: Ints


@dataclass(frozen=True, slots=True)
class Step:
    """One batched call of a cell (BatchMaker calls it a task). Made from a RunTask by `steps_of`.

    - nodes: [batch] node numbers.
    - inputs: for each input that is not lane state, its sources.
    - lanes: None for a step of single nodes.
    - may_stop: the step has runs that may stop here, so the driver applies the stop test.
    """

    nodes: Ints
    inputs: tuple[tuple[RowSource, ...], ...]
    lanes: Lanes | None
    keep: Keep | None
    fetches: tuple[FetchOutput, ...]
    may_stop: bool = False

    @property
    def batch(self) -> int:
        return len(self.nodes)


@dataclass(slots=True)
class TaskLanes:
    """Where the state of the chains of a task is. Positions count through all steps of the task.

    - tables: one per state input.
    - rows: [positions] the lane of each position.
    - used: [steps] whether a step has lanes. A step of single nodes only has none.
    - dense: [steps] whether the positions of a step are lanes 0 to batch - 1, in order.
    - move_at: [moves] ascending positions whose state is elsewhere, because the chain starts or moves. It must be
      copied into the lane when the step of the position begins.
    - move_tables, move_rows: [state inputs, moves] where this state is.

    If a step moves state from lane to lane, all of it must be read before any is written.
    """

    tables: tuple[TableId, ...]
    rows: Ints
    used: Flags
    dense: Flags
    move_at: Ints
    move_tables: Ints
    move_rows: Ints


@dataclass(slots=True)
class TaskMemories:
    """Which rows of state tables each position of a task reads as memories.

    Memory k of position p is rows[firsts[k, p] : firsts[k, p] + lengths[k, p]] of table source_tables[k, p] of the
    task, in order. rows: [members]. firsts, lengths: [memories, positions].
    """

    rows: Ints
    firsts: Ints
    lengths: Ints


@dataclass(slots=True)
class RunTask:
    """Run steps of one cell type, in order, on one worker: up to MaxTasksToSubmit, or as many as the budget allows.

    The arrays hold all steps, one after the other. Step s has the positions from ends[s - 1] (0 for the first step) to
    before ends[s].

    - largest: number of rows of the largest step.
    - ends: [steps] the end of each step.
    - nodes: [positions] node numbers.
    - source_tables, source_rows: [inputs, positions] the table and row of each input that is not lane state. The rows
      of the first inputs, if they are memories, are in `memories`; None if the cell has none.
    - lanes: None if no node belongs to a run.
    - keep, fetches: for all steps together; their positions ascend. A position may be kept twice, in two rows.
    - may_stop: [steps] whether a step has runs that may stop there, so that the driver applies the stop test; None if
      no step has any.
    """

    task: TaskId
    worker: WorkerId
    type_id: TypeId
    largest: int
    ends: Ints
    nodes: Ints
    source_tables: Ints
    source_rows: Ints
    lanes: TaskLanes | None
    keep: Keep | None
    fetches: tuple[FetchOutput, ...]
    may_stop: Flags | None
    memories: TaskMemories | None = None

    @property
    def num_steps(self) -> int:
        return len(self.ends)

    def begin_of(self, step: int) -> int:
        """Return the first position of a step. For the step after the last: the number of positions."""
        return int(self.ends[step - 1]) if step else 0

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps one by one, for callers that look at single steps. Computed anew at every access."""
        return steps_of(self)


@dataclass(frozen=True, slots=True)
class Read:
    """Read an output from a state table now: it was asked for after its node had run."""

    request: RequestId
    node: int
    output: int
    table: TableId
    row: int


@dataclass(slots=True)
class Reply:
    """The request is complete, and all outputs that it fetches have been reported."""

    request: RequestId


class FailureKind(Enum):
    """Why a request failed."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REFUSED = "refused"
    CELL = "cell"
    UNFOLD = "unfold"
    MEMORY = "memory"
    NODES = "nodes"


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error instead of a result."""

    request: RequestId
    kind: FailureKind
    reason: str


@dataclass(slots=True)
class NodesBegun:
    """Values have let more nodes begin: the nodes below `num_nodes` may run from now on.

    segments: [3, segments] that begin: slot of the request, form (see Frames.segments), and first node. loops: the
    loops among them that end at a value: the request, its first node, and those of its segment.
    """

    num_nodes: int
    segments: Ints
    loops: tuple[tuple[RequestId, int, tuple[Any, ...]], ...] = ()


@dataclass(slots=True)
class Collect:
    """Loops of requests have collected outputs of nodes, which are done.

    [values] slots: of the requests. numbers: of the collections. places: `node * OUTPUTS + output` of each value.
    """

    slots: Ints
    numbers: Ints
    places: Ints


@dataclass(slots=True)
class Decided:
    """The last decisions of requests are made.

    [requests] slots. outputs: of each, `node * OUTPUTS + output` of each output of its region. num_nodes: how many
    nodes each has had.
    """

    slots: list[int]
    outputs: list[Ints]
    num_nodes: Ints


@dataclass(frozen=True, slots=True)
class StoredRow:
    """Where the outputs of a node are that a sequence keeps: in row `row` of these tables, one for each output."""

    type_id: TypeId
    tables: tuple[TableId, ...]
    row: int


@dataclass(frozen=True, slots=True)
class StateStored:
    """A sequence that goes on from values from outside has these rows, which the driver fills now.

    reason: why it has none; "" if it has.
    """

    sequence: SequenceId
    rows: tuple[StoredRow, ...]
    reason: str = ""


Command = Reserve | Admit | RunTask | Read | Reply | Fail | NodesBegun | Collect | Decided | StateStored
"""The driver must carry out commands in the order in which they come."""


def steps_of(task: RunTask) -> tuple[Step, ...]:
    """Return the steps of a task one by one. In each of them positions count from 0."""
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
            part = Keep(keep.tables, keep.rows[mine], None if len(positions) == end - begin else positions)
            keep = part if len(positions) else None
        of_step = [(f.output, f.positions[within(f.positions, begin, end)] - begin) for f in task.fetches]
        fetches = tuple(FetchOutput(output, positions) for output, positions in of_step if len(positions))
        may_stop = task.may_stop is not None and bool(task.may_stop[number])
        steps.append(Step(task.nodes[begin:end], inputs, lanes, keep, fetches, may_stop))
        begin = end
    return tuple(steps)


def within(positions: Ints, begin: int, end: int) -> slice:
    """Return the slice of ascending `positions` whose values are from `begin` to before `end`."""
    count = len(positions)
    if count and begin <= positions.item(0) and positions.item(count - 1) < end:  # all of a task that ran as a whole
        return slice(0, count)
    first, last = positions.searchsorted((begin, end)).tolist()
    return slice(first, last)


def _sources(tables: Ints, rows: Ints, positions: Ints | None = None) -> tuple[RowSource, ...]:
    """Group the rows of one input by table. tables, rows: [n]. positions: [n] in the batch; None for 0 to n - 1."""
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
