"""Which requests go before others where the policy only ranks cell types: priority, deadlines, and who came first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, final

from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.spec import TypeId
from batchmaker.graph.work import work_of
from batchmaker.scheduler.deadlines import Deadlines
from batchmaker.scheduler.events import RequestId
from batchmaker.scheduler.priorities import HURRIED, MEMBER, as_member
from batchmaker.scheduler.state import RequestEntry, SchedulerState

HURRY: Final = 2.0
"""A request is short of time when less is left than so many times what it takes alone: once to be computed, and once
for what is on the workers when it comes to the fore and for the company that its batches have."""
LASTS: Final = 4.0
"""Tasks for which a cohort goes first, by the nodes of a request. A closed mini-batch needs fewer than once that."""
_WEIGHT: Final = 0.1  # of the newest step in a type's mean time, and of the newest request in the mean size


@final
class Urgency:
    """Puts the types first that have a ready node of the most urgent request, and these nodes first in their queues.

    A request is more urgent if its priority is higher; among equals if it is short of time; among these if it is of the
    cohort.

    Short of time: looked at when it comes and when it is extended. What it takes alone is its longest way through the
    graph, with what steps of each type have taken lately; before the first step of a type, none. After its deadline it
    is like any other again, so that the late do not make others late.

    The cohort is for orders that are made for closed mini-batches. Newcomers would change what such an order sees, and
    it could put off for ever what it likes to do last. So all requests in flight are a cohort, and are done before
    others; who comes meanwhile rides along in their batches, fills every other batch at most without them, and is of
    the next cohort. It begins when the last of this one has ended. So that long requests do not keep short ones
    waiting, it also begins after LASTS times as many tasks as requests have nodes (geometric mean of the latest); those
    that are left are then of the one after it.
    """

    __slots__ = ("_cohort", "_gave_way", "_later", "_log_size", "_num_tasks", "_over", "_short", "_state", "_step_s")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._short: Deadlines[RequestId] = Deadlines()  # when each is short of time
        self._over: Deadlines[RequestId] = Deadlines()
        self._step_s: dict[int, float] = {}
        self._cohort: list[RequestId] = []  # those that have ended go when they are last
        self._later: list[RequestId] = []  # who came since
        self._log_size: float | None = None
        self._num_tasks = 0  # since the cohort began
        self._gave_way = False  # the last task was a full batch without the cohort

    def arrived(self, request: RequestId, graph: CellGraph) -> None:
        """A request has come; it is a member already, unless there is a cohort that it finds in flight."""
        self._later.append(request)
        if self._cohort_is_in_flight():
            self._mark((request,), MEMBER, on=False)
        log_size = math.log(max(graph.num_nodes, 1))
        before = log_size if self._log_size is None else self._log_size
        self._log_size = before + _WEIGHT * (log_size - before)

    def more_work(self, entry: RequestEntry, graph: CellGraph) -> None:
        """A request has come, or has been extended, with this to compute."""
        if entry.deadline_s is None:
            return
        work, living = work_of(graph), self._state.requests
        steps = zip(work.types.tolist(), work.steps.tolist(), strict=True)
        alone_s = sum(count * self._step_s.get(type_id, 0.0) for type_id, count in steps)
        self._short.add(entry.deadline_s - HURRY * alone_s, entry.request, living, len(living))
        self._over.add(entry.deadline_s, entry.request, living, len(living))

    def step_finished(self, type_id: TypeId, seconds: float) -> None:
        """A step was measured."""
        before = self._step_s.get(type_id, seconds)
        self._step_s[type_id] = before + _WEIGHT * (seconds - before)

    def task_submitted(self) -> None:
        """One of the tasks for which the cohort goes first."""
        self._num_tasks += 1

    def look(self, now_s: float) -> None:
        """Bring requests to the fore whose time runs out, take back those whose time is over, begin a new cohort."""
        changed = self._mark((request for _, request in self._short.passed(now_s)), HURRIED, on=True)
        changed |= self._mark((request for _, request in self._over.passed(now_s)), HURRIED, on=False)
        changed |= self._next_cohort()
        if changed:
            for entry in self._state.types:
                entry.ready.requeue()

    def _mark(self, requests: Iterable[RequestId], mark: int, *, on: bool) -> bool:
        """Give living requests a mark, or take it away; return whether that changes any rank."""
        changed = False
        for request in requests:
            entry = self._state.requests.get(request)
            if entry is not None:
                changed |= self._state.priorities.mark(entry.slot, mark, on)
        return changed

    def _next_cohort(self) -> bool:
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

    def order(self, ranked: Sequence[TypeId]) -> Sequence[TypeId]:
        """Return the policy's order with the types of the most urgent requests first.

        A full batch counts as the cohort's, since it would take as long later, but not twice in a row: the cohort has
        every other task at least.
        """
        if len(ranked) < 2 or not self._state.priorities.differ:
            return ranked
        highest = {type_id: self._state.types[type_id].ready.highest for type_id in ranked}
        ranks = highest if self._gave_way else {t: as_member(r) if self._is_full(t) else r for t, r in highest.items()}
        ordered = sorted(ranked, key=lambda type_id: -ranks[type_id])
        self._gave_way = ranks[ordered[0]] > highest[ordered[0]]
        return ordered

    def _is_full(self, type_id: TypeId) -> bool:
        entry = self._state.types[type_id]
        return len(entry.ready) >= entry.cell.max_batch
