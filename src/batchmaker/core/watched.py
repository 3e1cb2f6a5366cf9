"""The request table of a policy that watches requests, filled when the policy asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.core.events import RequestArrived
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.regions import repeats, stopping_types
from batchmaker.graph.work import work_of
from batchmaker.policies.requests import RequestKinds, RequestTable


@final
class WatchedRequests:
    """Requests as policies see them.

    Until the policy asks for the table, only what requests are like is noted: a row, and a count of each submitted
    node, cost more than all else that a small request needs of a policy. Then all requests are entered at once, and
    from then on each as it comes, until none is left.

    - num_submitted: returns how many nodes of each type of these requests were submitted, [requests, types], as long as
      no value may end a run. num_begun: how many they have got since they began, as values decided.
    - is_kept: whether the requests are entered now.
    - counts: whether submitted nodes are counted now: while the requests are entered; and always once there was a run
      that a value may end, because nobody knows later how far such a run has come.
    """

    __slots__ = ("_began_s", "_num_begun", "_num_requests", "_num_submitted", "_table", "_unseen", "counts", "is_kept")

    def __init__(
        self, num_submitted: Callable[[Sequence[int]], Ints], num_begun: Callable[[Sequence[int]], Ints]
    ) -> None:
        self._num_submitted, self._num_begun = num_submitted, num_begun
        self._table = RequestTable()
        self.is_kept = self.counts = False
        self._num_requests = 0
        self._unseen: dict[int, RequestArrived] = {}  # by slot, those without a row
        self._began_s: dict[int, float] = {}  # of these

    @property
    def kinds(self) -> RequestKinds:
        """What the requests so far were like."""
        return self._table

    @property
    def table(self) -> RequestTable:
        """The table, with a row for each request that has not left."""
        self.keep()
        return self._table

    def keep(self) -> None:
        """Enter all requests from now on, until none is left."""
        if not self.is_kept:
            self._fill()

    def _fill(self) -> None:
        """Enter all requests that have no row yet."""
        self.is_kept = True
        for slot, event in self._unseen.items():
            self._enter(slot, event)
        for slot, began_s in self._began_s.items():
            self._table.begin((slot,), began_s)
        if self._began_s and not self.counts:
            slots = list(self._began_s)
            self._table.left[slots] += self._num_begun(slots)
            self._table.add_submitted(slots, self._num_submitted(slots))
        self.counts = True
        self._unseen.clear()
        self._began_s.clear()

    def _enter(self, slot: int, event: RequestArrived) -> None:
        deadline_s = math.inf if event.deadline_s is None else event.deadline_s
        is_open = event.open or event.graph.region is not None
        self._table.enter(slot, event.at_s, deadline_s, event.model, event.priority, is_open=is_open)
        self._table.add_work(slot, work_of(event.graph))

    def add_type(self) -> None:
        """Note that there is one more cell type."""
        self._table.add_type()

    def note_kinds(self, events: Sequence[RequestArrived]) -> None:
        """Note what requests are like that are about to arrive."""
        table = self._table
        for event in events:
            region = event.graph.region
            table.decide.add(region is not None)
            table.repeat |= len(event.graph.runs) > 0 or (region is not None and repeats(region))
            for type_id in stopping_types(region) if region is not None else ():
                table.note_run(type_id, may_stop=True)
            if event.deadline_s is not None or event.model >= table.num_models:
                table.note_kind(math.inf if event.deadline_s is None else event.deadline_s, event.model)
            for run in event.graph.runs:
                if run.open_ended or run.type_id not in table.run_types:
                    table.note_run(run.type_id, may_stop=run.open_ended)

    def arrived(self, slots: Sequence[int], events: Sequence[RequestArrived]) -> None:
        """Note that requests have arrived."""
        table = self._table
        self._num_requests += len(slots)
        table.fit(max(slots))
        if self.is_kept:
            for slot, event in zip(slots, events, strict=True):
                self._enter(slot, event)
        else:
            self._unseen.update(zip(slots, events, strict=True))
        if table.stopping_types and not self.counts:
            self._fill()

    def begin(self, slots: Sequence[int], now_s: float) -> None:
        """Note that requests begin, in this order."""
        if self.is_kept:
            self._table.begin(slots, now_s)
        else:
            self._began_s.update(dict.fromkeys(slots, now_s))

    def extended(self, slot: int, graph: CellGraph, *, is_open: bool) -> None:
        """Note that a request has more to compute, and whether it may get more still."""
        table = self.table
        table.open[slot] = is_open
        table.add_work(slot, work_of(graph))
        for run in graph.runs:
            table.note_run(run.type_id, may_stop=run.open_ended)

    def begun(self, slots: Ints, graphs: Sequence[CellGraph]) -> None:
        """Note that requests have got one more of these graphs each, as values decided."""
        if not self.is_kept:
            return
        table = self._table
        table.changes += 1
        for graph in {id(graph): graph for graph in graphs}.values():
            mine, work = slots[[other is graph for other in graphs]], work_of(graph)
            for type_id, nodes in zip(work.types.tolist(), work.nodes.tolist(), strict=True):
                np.add.at(table.left[:, type_id], mine, nodes)
                table.type_model[type_id] = table.model[mine[0]]

    def decided(self, slots: Sequence[int]) -> None:
        """Note that these requests will get no more graphs."""
        if self.is_kept:
            self._table.open[list(slots)] = False

    def submitted(self, slots: Ints, type_id: int) -> None:
        """Note that one node of this type of each of these requests is on a worker; slots may repeat.

        Called only while it `counts`.
        """
        self._table.submitted(slots, type_id)

    def stopped(self, slots: Ints, type_id: int, counts: Ints, ahead: Ints) -> None:
        """Note that runs of these requests ended early: `counts` nodes of the type are not computed.

        ahead: how many of these were submitted, and did not run.
        """
        self._table.stopped(slots, type_id, counts, ahead)

    def leave(self, slots: Sequence[int]) -> None:
        """Note that requests have ended."""
        self._num_requests -= len(slots)
        if not self.is_kept:
            for slot in slots:
                del self._unseen[slot]
                self._began_s.pop(slot, None)
            return
        self._table.leave(slots)
        if not self._num_requests:
            self.is_kept = False
            self.counts = bool(self._table.stopping_types)
            if not self.counts:
                self._table.clear()

    def forget(self, slots: Sequence[int]) -> None:
        """Note that these slots are free: no node of their requests is on a worker any more."""
        if self.counts:
            self._table.forget(slots)
