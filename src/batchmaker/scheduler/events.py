"""What happens to the scheduler. Every event carries its time, in engine seconds; the core reads no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType

RequestId = NewType("RequestId", int)
TaskId = NewType("TaskId", int)
WorkerId = NewType("WorkerId", int)
SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True, slots=True)
class CellTypeAdded:
    """A cell was used for the first time."""

    cell: CellType
    at_s: float


@dataclass(slots=True)
class RequestArrived:
    """A request was unfolded. (Nobody changes it: a frozen one takes a microsecond more to make.)

    open: its unfold function waits for a value and may add nodes later. priority: larger is served first. model: which
    of the models that share the scheduler it is for. sequence: what it is the next request of: its graph begins with
    what the last one that was answered has kept, and what it keeps takes that one's place with its Reply.
    """

    request: RequestId
    graph: CellGraph
    at_s: float
    deadline_s: float | None = None
    open: bool = False
    priority: int = 0
    model: int = 0
    sequence: SequenceId | None = None


@dataclass(frozen=True, slots=True)
class GraphExtended:
    """An unfold function that waited went on. open: it waits again.

    dropped: (first node, count) whose handles the function has let go since the last event.
    """

    request: RequestId
    graph: CellGraph
    at_s: float
    open: bool = False
    dropped: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller gave the request up."""

    request: RequestId
    at_s: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The driver found that the request cannot go on, for example because its unfold function raised."""

    request: RequestId
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class StepsFinished:
    """Steps `first` to before `end` of a task are done: all their rows have their outputs.

    Steps of a task finish in order; how many are told of at once is the executor's choice. Positions are those of the
    task, whose steps lie one after the other. stopped: [positions of these steps] whether the value that ends an
    open-ended run was seen; None where they have no such run. failed: positions at which the cell raised, with the
    reason for each. The other rows are good. busy_s: seconds that these steps took on their worker, 0 if not known.
    """

    task: TaskId
    first: int
    end: int
    at_s: float
    stopped: NDArray[np.bool_] | None = None
    failed: tuple[tuple[int, str], ...] = ()
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SequenceClosed:
    """No more requests of a sequence will come, and none is in flight: what it keeps may go."""

    sequence: SequenceId
    at_s: float


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing happened but time: deadlines are looked at."""

    at_s: float


Event = (
    CellTypeAdded
    | RequestArrived
    | GraphExtended
    | RequestCancelled
    | RequestFailed
    | StepsFinished
    | SequenceClosed
    | TimePassed
)
