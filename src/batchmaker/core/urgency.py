"""Which requests go before others, by priority, deadline and arrival, under policies that only rank cell types.

`Scheduler` uses it for policies with `urgent_first`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, final

from batchmaker.core.deadline_heap import Deadlines
from batchmaker.core.events import RequestId
from batchmaker.core.priorities import HURRIED, MEMBER
from batchmaker.core.state import SchedulerState
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import TypeId
from batchmaker.graph.work import work_of

HURRY: Final = 2.0
"""A request is short of time if the time left is less than HURRY times the time that it takes alone.

One time is for its own steps. The other is for the steps already on workers, and for the larger batches that it shares.
"""
LASTS: Final = 4.0
"""A cohort goes first for at most LASTS times as many tasks as a request has nodes.

A closed mini-batch needs fewer tasks than a request has nodes.
"""
_WEIGHT: Final = 0.1  # of the newest step in the mean time of its type, and of the newest request in the mean size


@final
class Urgency:
    """Marks the most urgent requests: their ready nodes go first in their queues, and the types of these (`choose`).

    Urgency is compared in this order: higher priority; short of time; member of the cohort. Of the tasks of a worker
    in which a higher priority goes first while a lower one waits, one of `state.aged_every` is of the type with the
    node that has been ready longest.

    *Short of time.* The time from which a request is short of time is computed when it arrives and again when it is
    extended. The time that it takes alone is the sum, over the cell types, of the most nodes of the type on any path,
    times the recent mean time of such a step. A type without a finished step counts 0. After its deadline the request
    is no longer preferred, so that late requests do not make others late.

    *Cohort.* Some policies use orders that are made for closed mini-batches. Newcomers would change what such an order
    sees, and nodes that it runs last could be delayed for ever. So all requests in flight are made a cohort, which goes
    before later requests. Newcomers share the batches of the cohort. A full batch of newcomers may also go first, but
    not twice in a row. Newcomers belong to the next cohort, which begins when the present one has ended.

    The next cohort also begins after LASTS times as many tasks as a request has nodes (geometric mean over the latest
    requests), so that long requests do not block short ones. The requests that are left belong to the cohort after it.
    """

    __slots__ = ("_cohort", "_ends", "_later", "_log_size", "_num_tasks", "_short", "_state", "_step_s")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._short: Deadlines[RequestId] = Deadlines()  # the time from which each is short of time
        self._ends: Deadlines[RequestId] = Deadlines()  # the deadline of each
        self._step_s: dict[int, float] = {}
        self._cohort: list[RequestId] = []  # ended requests are removed when they are at the end of the list
        self._later: list[RequestId] = []  # the next cohort
        self._log_size: float | None = None
        self._num_tasks = 0  # since the cohort began

    def arrived(self, request: RequestId, graph: CellGraph) -> None:
        """Note that a request has arrived. If a cohort is in flight, the request is not a member of it."""
        self._later.append(request)
        if self._cohort_is_in_flight():
            self._mark((request,), MEMBER, on=False)
        log_size = math.log(max(graph.num_nodes, 1))
        before = log_size if self._log_size is None else self._log_size
        self._log_size = before + _WEIGHT * (log_size - before)

    def more_work(self, slot: int, graph: CellGraph) -> None:
        """Note that a request has arrived or was extended, and has this graph to compute."""
        deadline_s, request = self._state.deadline_s(slot), self._state.id_of(slot)
        if deadline_s is None:
            return
        work, living = work_of(graph), self._state.requests
        steps = zip(work.types.tolist(), work.steps.tolist(), strict=True)
        alone_s = sum(count * self._step_s.get(type_id, 0.0) for type_id, count in steps)
        self._short.add(deadline_s - HURRY * alone_s, request, living, len(living))
        self._ends.add(deadline_s, request, living, len(living))

    def step_finished(self, type_id: TypeId, seconds: float) -> None:
        """Note the duration of a step."""
        before = self._step_s.get(type_id, seconds)
        self._step_s[type_id] = before + _WEIGHT * (seconds - before)

    def task_submitted(self) -> None:
        """Count a task of the cohort's share."""
        self._num_tasks += 1

    def look(self, now_s: float) -> None:
        """Update the marks: for requests short of time, for deadlines that have passed, and for a new cohort."""
        changed = self._mark(self._short.passed(now_s), HURRIED, on=True)
        changed |= self._mark(self._ends.passed(now_s), HURRIED, on=False)
        changed |= self._next_cohort()
        if changed:
            self._state.order_again()

    def _mark(self, requests: Iterable[RequestId], mark: int, *, on: bool) -> bool:
        """Set or clear a mark of the requests that are in flight; return whether any rank has changed."""
        changed = False
        for request in requests:
            slot = self._state.requests.get(request)
            if slot is not None:
                changed |= self._state.priorities.mark(slot, mark, on)
        return changed

    def _next_cohort(self) -> bool:
        """Begin the next cohort if it is time; return whether any rank has changed."""
        lasts = self._log_size is not None and self._num_tasks < LASTS * math.exp(self._log_size)
        if not self._later or (self._cohort_is_in_flight() and lasts):
            return False
        living = self._state.requests
        self._cohort, self._later = self._later, [request for request in self._cohort if request in living]
        self._num_tasks = 0
        return self._mark(self._later, MEMBER, on=False) | self._mark(self._cohort, MEMBER, on=True)

    def _cohort_is_in_flight(self) -> bool:
        living = self._state.requests
        while self._cohort and self._cohort[-1] not in living:
            self._cohort.pop()
        return len(self._cohort) > 0
