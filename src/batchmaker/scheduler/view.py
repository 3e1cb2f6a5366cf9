"""What others see of the scheduler: policies the `ReadyView` of `policies/base.py`, and drivers its counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError
from batchmaker.graph.spec import CellType, TypeId
from batchmaker.policies.base import CellPolicy
from batchmaker.policies.requests import RequestKinds, RequestTable
from batchmaker.scheduler.depths import Depths
from batchmaker.scheduler.frontiers import Frontiers
from batchmaker.scheduler.state import SchedulerState

Kept = TypeVar("Kept")


class View:
    """Implements ReadyView. The Scheduler inherits from it and sets `_now_s` and `_just_run`."""

    def __init__(self, policy: CellPolicy, state: SchedulerState) -> None:
        self._policy = policy
        self._state = state
        self._cells: list[CellType] = []
        self._ready: set[TypeId] = set()
        self._just_run: TypeId | None = None
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    @property
    def cells(self) -> Sequence[CellType]:
        return self._cells

    @property
    def ready(self) -> Sequence[TypeId]:
        return sorted(self._ready)

    def num_ready(self, type_id: TypeId) -> int:
        return len(self._state.types[type_id].ready)

    def num_running(self, type_id: TypeId) -> int:
        return self._state.types[type_id].num_running + (type_id == self._just_run)

    @property
    def num_waiting(self) -> int:
        return len(self._state.line)

    def waiting(self, limit: int) -> NDArray[np.int64]:
        return self._state.line.first(limit)

    @property
    def kinds(self) -> RequestKinds:
        return self._kept(self._state.watched, "kinds", "watches_requests").kinds

    @property
    def requests(self) -> RequestTable:
        return self._kept(self._state.watched, "requests", "watches_requests").table

    @property
    def depths(self) -> Depths:
        return self._kept(self._state.depths, "depths", "needs_depth")

    @property
    def frontiers(self) -> Frontiers:
        return self._kept(self._state.frontiers, "frontiers", "needs_frontiers")

    @property
    def num_requests(self) -> int:
        """Requests in flight, and requests that have ended while a worker still runs steps of them."""
        return len(self._state.by_slot)

    @property
    def num_tasks(self) -> int:
        """Tasks that are submitted and not finished."""
        return len(self._state.tasks)

    @property
    def num_rows(self) -> int:
        """Rows of state tables in use, without lanes."""
        return sum(pool.num_used for pool in self._state.tables.pools)

    def _kept(self, kept: Kept | None, what: str, flag: str) -> Kept:
        if kept is None:
            raise InvariantError(f"policy {self._policy.name!r} reads {what} and does not declare {flag}")
        return kept
