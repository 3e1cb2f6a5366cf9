"""The scheduler's inputs. The driver makes these events; `Scheduler.handle` takes them.

`at_s` of an event is its time, in seconds of the engine's clock. The scheduler itself reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import CellType, TypeId

RequestId = NewType("RequestId", int)
TaskId = NewType("TaskId", int)
WorkerId = NewType("WorkerId", int)
SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True, slots=True)
class CellTypeAdded:
    """A cell is used for the first time. Its type id must be the number of types so far."""

    cell: CellType
    at_s: float


@dataclass(slots=True)
class RequestArrived:
    """A request has arrived, and its unfold function has made this graph.

    - deadline_s: time of the engine's clock; None for no deadline.
    - open: the unfold function waits for a value and may add nodes later.
    - priority: larger is served first; among equals chunks of sequences are.
    - model: which of the models that share the scheduler the request is for.
    - sequence: the sequence that the request is a chunk of, of which no other request is in flight; None for a request
      outside a sequence. The graph begins with the nodes that the last answered chunk has kept. If this request is
      answered after its Reply, the nodes that it keeps replace them; see Scheduler.decide.

    Nobody changes an event. It is not frozen because making a frozen object takes a microsecond more.
    """

    request: RequestId
    graph: CellGraph
    at_s: float
    deadline_s: float | None = None
    open: bool = False
    priority: int = 0
    model: int = 0
    sequence: SequenceId | None = None

    @property
    def precedence(self) -> int:
        """Larger is served first: by priority; among equals chunks, since the next one of a sequence is on its way."""
        return 2 * self.priority + (self.sequence is not None)


@dataclass(slots=True)
class GraphExtended:
    """A waiting unfold function has continued and has added this graph. (Not frozen, as RequestArrived.)

    - open: the function waits again.
    - dropped: (first local node, count) of the handles that the function has dropped since the last event.
    """

    request: RequestId
    graph: CellGraph
    at_s: float
    open: bool = False
    dropped: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller has cancelled the request."""

    request: RequestId
    at_s: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The driver found that the request cannot continue, for example because its unfold function raised."""

    request: RequestId
    at_s: float
    reason: str


@dataclass(slots=True)
class WentOn:
    """What became of tasks that ran one after another in one call, each formed by `turn_by_values` after the last.

    said, formed: what this returned at last. ran: of each task the type, the rows of its step, and seconds.
    """

    said: NDArray[np.int64]
    formed: NDArray[np.int64]
    ran: Sequence[tuple[TypeId, int, float]]


@dataclass(slots=True)
class StepsFinished:
    """Steps `first` to before `end` of a task are done: their rows have their outputs, except the rows in `failed`.

    Steps of a task finish in order. The executor chooses how many it reports at once. Positions count through all steps
    of the task, one step after the other.

    - stopped: [positions of these steps] whether the value was seen that ends an open-ended run. None if these steps
      have no such run.
    - failed: (position, reason) of the rows for which the cell raised. The other rows are good.
    - values: (output, nodes, values) that have come to the host and that decisions may look at.
    - busy_s: seconds that the worker needed for these steps; 0 if not known.
    - went_on: if this task and others that followed have run and the tables know of it.
    """

    task: TaskId
    first: int
    end: int
    at_s: float
    stopped: NDArray[np.bool_] | None = None
    failed: tuple[tuple[int, str], ...] = ()
    busy_s: float = 0.0
    values: tuple[tuple[int, NDArray[np.int64], NDArray[np.int64]], ...] = ()
    went_on: WentOn | None = None


@dataclass(frozen=True, slots=True)
class SequenceRestored:
    """A sequence goes on from values that come from outside. It keeps nothing, and no request of it is in flight.

    types: of the nodes that it keeps from now on, in their order. `StateStored` says where their values go.
    """

    sequence: SequenceId
    types: tuple[TypeId, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class SequenceClosed:
    """A sequence keeps nothing any more: it is over, or begins from the start again. No request of it is in flight."""

    sequence: SequenceId
    at_s: float


@dataclass(slots=True)
class TimePassed:
    """Only time has passed. The scheduler checks deadlines."""

    at_s: float


Event = (
    CellTypeAdded
    | RequestArrived
    | GraphExtended
    | RequestCancelled
    | RequestFailed
    | StepsFinished
    | SequenceRestored
    | SequenceClosed
    | TimePassed
)
