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
class Source:
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
    arriving: tuple[tuple[Source, ...], ...]


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
    runs: [batch] subgraph numbers where the step has runs that may stop here, for the driver's stop test.
    """

    nodes: Rows
    inputs: tuple[tuple[Source, ...], ...]
    lanes: Lanes | None
    keep: Keep | None
    fetches: tuple[FetchOutput, ...]
    runs: Rows | None = None

    @property
    def batch(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class RunTask:
    """Run up to MaxTasksToSubmit steps of one cell type, in order, on one worker; signal after each step."""

    task: TaskId
    worker: WorkerId
    type_id: TypeId
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """An output that rests in a state table is asked for after its node has run: read it now."""

    request: RequestId
    node: int
    output: int
    table: TableId
    row: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The request's last cell is done: everything that it fetches has been reported."""

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
