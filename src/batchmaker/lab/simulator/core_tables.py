"""The scheduler's tables with nothing in flight, for compiled simulations, which play on them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Final, final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.core.batching import TASK_S
from batchmaker.core.events import CellTypeAdded
from batchmaker.core.layout import (
    EDGES,
    EXTENT_NUM_EDGES,
    EXTENTS,
    ID,
    NODE_MASK,
    NODES,
    NUM_NODES,
    NUM_SUBGRAPHS,
    PLACES,
    SLOTS,
    SUBGRAPHS,
)
from batchmaker.core.scheduler import Scheduler
from batchmaker.core.state import SchedulerState
from batchmaker.cost.profile import Overhead
from batchmaker.graph.cell_graph import CellGraph, Run
from batchmaker.graph.spec import CellType
from batchmaker.lab.simulator.workload import ShapedRequests, SimulatedRequest
from batchmaker.policies.base import CellPolicy

_NO_LIMIT: Final = 1 << 62


def kinds_of(requests: Sequence[SimulatedRequest]) -> tuple[list[SimulatedRequest], Ints]:
    """Return the different ones of these requests; and [requests] which of them each is."""
    if isinstance(requests, ShapedRequests):
        return list(requests.shapes), requests.kinds.astype(np.int64)
    places: dict[int, int] = {}
    kinds = np.array([places.setdefault(id(request), len(places)) for request in requests], np.int64)
    return [requests[i] for i in np.unique(kinds, return_index=True)[1].tolist()], kinds


def task_s(overhead: Overhead) -> float:
    """Return what a task costs beside its steps: see Scheduler."""
    return 0.0 if overhead == Overhead() else TASK_S


def _new_state(
    cells: Sequence[CellType], policy: CellPolicy, graphs: Sequence[CellGraph], overhead: Overhead
) -> SchedulerState:
    """Return the state of a scheduler that has seen no request, and knows how runs of these graphs use each type."""
    scheduler = Scheduler(policy, plan_rows=False, give_up_late=False, task_s=task_s(overhead))
    scheduler.handle(*(CellTypeAdded(cell, 0.0) for cell in cells))
    for type_id, num in {(run.type_id, len(run.sequences)) for graph in graphs for run in graph.runs}:
        scheduler.state.learn_form(type_id, num)
    return scheduler.state


@final
class CoreTables:
    """The tables of a scheduler for one worker, which plans no rows, has nothing in flight, and knows these graphs.

    The number of a graph's form is its place in `graphs`.
    """

    def __init__(
        self, cells: Sequence[CellType], policy: CellPolicy, graphs: Sequence[CellGraph], overhead: Overhead
    ) -> None:
        self._make = partial(_new_state, cells, policy, graphs, overhead)
        state = self._make()
        self._arena, self._copies = state.arena, state.admission.copies
        self._copies.max_forms = self._copies.max_nodes = _NO_LIMIT
        self._counts = np.zeros((3, len(graphs)), np.int64)
        self._places = np.zeros((len(cells), len(graphs)), np.int64)
        graph_ids = set[int]()
        for number, graph in enumerate(graphs):
            extent = state.admission.admit([copy(graph) if id(graph) in graph_ids else graph], [0]).extents[:, 0]
            graph_ids.add(id(graph))
            self._counts[:, number] = extent[[NUM_NODES, NUM_SUBGRAPHS, EXTENT_NUM_EDGES]]
            for part in graph.parts:
                np.add.at(self._places[:, number], part.type_id if isinstance(part, Run) else part.types, 1)
            self._arena.forget_numbers()
        self._arena.keeps_sources = False  # copies have none

    def another(self) -> CoreTables:
        """Return the tables of another such scheduler, which has seen nothing. It has the forms of this one."""
        other = copy(self)
        other._arena = self._make().arena
        other._arena.keeps_sources = False
        return other

    @property
    def addresses(self) -> Ints:
        """See `tables.state_at`. Ask again after there was more room."""
        return self._arena.tables

    @property
    def forms(self) -> Ints:
        """See `copies.forms_at`."""
        return self._copies.tables

    def ids_of_ready(self, type_id: int) -> list[int]:
        """Return the requests that have ready nodes of a type, in the order of their queue."""
        arena = self._arena
        ids: list[int] = arena.requests[ID, arena.request[arena.ready_keys(type_id) & NODE_MASK]].tolist()
        return ids

    @property
    def num_slots(self) -> int:
        """Requests for which there is room."""
        return int(self._arena.requests.shape[1])

    def make_room(self, kinds: Ints) -> None:
        """Have room for copies of these graphs, whatever is in flight."""
        arena, counts = self._arena, self._arena.counts
        most = (self._counts * 5 // 4)[:, kinds].sum(axis=1).tolist()  # size classes are at most a quarter larger
        for kind, more in zip((NODES, SUBGRAPHS, EDGES, SLOTS, EXTENTS), (*most, len(kinds), len(kinds)), strict=True):
            arena.make_room(kind, int(counts[kind]) + more)
        coming = self._places[:, kinds].sum(axis=1)
        arena.types[PLACES] += coming
        arena.fit_queues()
        arena.types[PLACES] -= coming
