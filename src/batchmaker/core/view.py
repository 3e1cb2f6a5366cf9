"""What others see of the scheduler: policies the `ReadyView` of `policies/base.py`, and drivers its counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from batchmaker.core.commands import RunTask
from batchmaker.core.deadline_heap import Deadlines
from batchmaker.core.depths import Depths
from batchmaker.core.events import RequestId
from batchmaker.core.frontiers import Frontiers
from batchmaker.core.invariants import check_state
from batchmaker.core.layout import (
    HEAD_OF_QUEUE,
    JUST_RAN,
    KEY,
    NODE_BITS,
    NUM_FREE,
    NUM_ROWS,
    NUM_RUNNING,
    RUN_AHEAD,
    SLOTS,
    TAIL_OF_QUEUE,
)
from batchmaker.core.queues import ready_types
from batchmaker.core.state import SchedulerState
from batchmaker.errors import InvariantError
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.requests import RequestKinds, RequestTable

_FLAGS: Final = {
    "kinds": "watches_requests", "requests": "watches_requests", "depths": "needs_depth", "frontiers": "needs_frontiers"
}  # fmt: skip
"""What is kept only for policies that declare that they read it."""


class View:
    """Implements ReadyView. The Scheduler inherits from it and sets `now_s`."""

    kinds: RequestKinds
    depths: Depths
    frontiers: Frontiers

    def __init__(self, policy: CellPolicy, state: SchedulerState) -> None:
        self._policy = policy
        self._state = state
        self.cells: list[CellType] = []
        self.now_s = 0.0
        self._deadlines: Deadlines[RequestId] = Deadlines()
        accounts = (
            ("kinds", None if state.watched is None else state.watched.kinds),
            ("depths", state.depths),
            ("frontiers", state.frontiers),
        )
        for what, account in accounts:
            if account is not None:
                setattr(self, what, account)

    def __getattr__(self, what: str) -> NoReturn:
        flag = _FLAGS.get(what)
        if flag is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {what!r}")
        raise InvariantError(f"policy {self._policy.name!r} reads {what} and does not declare {flag}")

    @property
    def ready(self) -> Sequence[TypeId]:
        types: list[TypeId] = ready_types(self._state.arena.types).tolist()
        return types

    def expected_s(self, task: RunTask) -> float:
        """Return how many seconds a task takes, by the steps that have run; infinity if its type is not known yet."""
        seconds = self._state.arena.seconds
        if task.type_id >= len(seconds):
            return math.inf
        return float(seconds[task.type_id, np.diff(task.ends, prepend=0)].sum())

    def num_ready(self, type_id: TypeId) -> int:
        return self._state.arena.num_ready(type_id)

    def ready_since(self, type_id: TypeId) -> int:
        types, queue = self._state.arena.types, self._state.arena.queue
        return int(queue[KEY, types[HEAD_OF_QUEUE, type_id] : types[TAIL_OF_QUEUE, type_id]].min()) >> NODE_BITS

    def owners(self, nodes: NDArray[np.int64]) -> list[RequestId | None]:
        """Return the request of each node; None if it is no longer in flight."""
        state = self._state
        slots = state.arena.request[nodes].tolist()
        return [state.id_of(slot) if state.arena.is_alive(slot) else None for slot in slots]

    def slots(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each node's request (see Admit)."""
        return self._state.arena.request[nodes]

    @property
    def next_deadline_s(self) -> float | None:
        """The time by which the driver must send an event (TimePassed if there is no other); None without deadlines."""
        return self._deadlines.next_of(self._state.requests) if self._deadlines.heap else None

    def check_invariants(self) -> None:
        """Raise InvariantError unless the state is consistent. Slow: for tests and for the analysis of faults."""
        check_state(self._state)

    def num_running(self, type_id: TypeId) -> int:
        return int(self._state.arena.types[[NUM_RUNNING, JUST_RAN], type_id].sum())

    @property
    def begin_together(self) -> int | None:
        """See `CellPolicy.begins_together`. None where newcomers can be admitted while a device computes."""
        state = self._state
        computes_meanwhile = state.num_workers > 1 or state.arena.rules[RUN_AHEAD] > 0
        return None if computes_meanwhile else self._policy.begins_together(self)

    @property
    def num_waiting(self) -> int:
        return len(self._state.line)

    def waiting(self, limit: int) -> NDArray[np.int64]:
        return self._state.line.first(limit)

    @property
    def requests(self) -> RequestTable:
        watched = self._state.watched
        return self.__getattr__("requests") if watched is None else watched.table

    @property
    def num_requests(self) -> int:
        """Requests in flight, and requests that have ended while a worker still runs steps of them."""
        return self._state.arena.num_used(SLOTS)

    @property
    def num_in_cohort(self) -> int:
        return self.num_requests - self.num_waiting - len(self._state.chunks)

    @property
    def num_tasks(self) -> int:
        """Tasks that are submitted and not finished."""
        return len(self._state.tasks)

    @property
    def num_rows(self) -> int:
        """Rows of state tables in use, without lanes."""
        pools = self._state.arena.pools
        return int((pools[NUM_ROWS] - pools[NUM_FREE]).sum())
