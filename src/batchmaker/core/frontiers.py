"""Frontiers: the nodes in flight that wait for no other node of their type. Kept only for policies that ask.

The scheduler's state calls it; policies read it as a `FrontierView`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.core.arena import Arena
from batchmaker.core.layout import INDEPENDENT
from batchmaker.graph import wait_counts

NONE: Ints = np.empty(0, np.int64)


@final
@dataclass(frozen=True, slots=True)
class FrontierCounts:
    """What living requests have in the arena.

    - spans: [extents, 2] first node, and number of nodes.
    - late_edges: (node that is not done, node in a later extent that it feeds).
    - on_workers: nodes of steps that have not finished.
    """

    spans: Ints
    late_edges: Sequence[tuple[int, int]]
    on_workers: Ints


@final
class Frontiers:
    """For each type, the number of units in flight that have no unsubmitted ancestor of their own type.

    A unit is a single node, or the unsubmitted rest of a run, because only its next node can come first. As everywhere
    in the scheduler, a node that reads any step of a run waits for its last step. A run waits for the sources of all
    its steps.

    Nothing is kept until a policy asks. Then all that is in flight is counted once. From then on the counts are updated
    with every event, until no unit is left. `graph.wait_counts` explains the method; it takes 4 bytes for each pair of
    a node and a type.

    - look: returns what is in flight.
    - is_kept: whether the counts are kept now.
    - counts: [types], in the arena's `types`.
    - left: [nodes] True for the last node of each unit that is not completely submitted.
    """

    __slots__ = (
        "_arena",
        "_blocks",
        "_late_edges",
        "_late_first",
        "_late_free",
        "_look",
        "_num_left",
        "_stack",
        "is_kept",
        "left",
    )

    def __init__(self, arena: Arena, look: Callable[[], FrontierCounts]) -> None:
        self._arena = arena
        self._look = look
        self.is_kept = False
        self.left = np.zeros(0, np.bool_)
        self._num_left = 0
        self._blocks = np.zeros((0, 0), np.int32)
        self._late_first: Ints = NONE
        self._late_edges: Ints = np.empty((2, 0), np.int64)
        self._late_free = np.array([-1, 0])
        self._stack: Ints = NONE

    def independent(self, type_id: int) -> int:
        """Return how many unsubmitted nodes of a type have no unsubmitted ancestor of this type."""
        self.keep()
        return int(self.counts[type_id])

    def keep(self) -> None:
        """Keep the counts from now on, until no unit is left."""
        if not self.is_kept:
            self.is_kept = True
            counts = self._look()
            self._enter(counts.spans, counts.late_edges, counts.on_workers, counted=False)

    @property
    def counts(self) -> Ints:
        counts: Ints = self._arena.types[INDEPENDENT]
        return counts

    def admit(self, spans: Ints, late_edges: Sequence[tuple[int, int]]) -> None:
        """Note that requests have got these nodes. spans, late_edges: those that lead to them (see FrontierCounts)."""
        if self.is_kept:
            self._enter(spans, late_edges, NONE, counted=True)

    def submitted(self, type_id: int, nodes: Ints) -> None:
        """Note that these nodes of one type are on a worker."""
        if self.is_kept:
            units = wait_counts.run(nodes, type_id, self._stack, self._graph, self._now, self._late)
            self._fewer(units)

    def stopped(self, type_id: int, ends: Ints) -> None:
        """Note that runs have ended early. ends: [runs] one past the last node of each run.

        Nothing changes for a run whose last step was submitted.
        """
        self.submitted(type_id, ends - 1)

    def withdraw(self, spans: Ints) -> None:
        """Note that the other nodes of these extents will not be submitted, because their request has failed."""
        if self.is_kept:
            self._fewer(wait_counts.withdraw(*_columns(spans), self._graph, self._now, self._late))

    @property
    def _graph(self) -> wait_counts.Graph:
        arena = self._arena
        return arena.subgraph, arena.end, arena.type, arena.first_edge, arena.num_edges, arena.consumer

    @property
    def _now(self) -> wait_counts.Counters:
        return self.left, self._blocks, self.counts

    @property
    def _late(self) -> wait_counts.LateLists:
        return self._late_first, self._late_edges, self._late_free

    def _enter(self, spans: Ints, late_edges: Sequence[tuple[int, int]], on_workers: Ints, *, counted: bool) -> None:
        self._fit(len(late_edges))
        late = np.array(late_edges, np.int64).reshape(-1, 2).T.copy()
        self._num_left += wait_counts.enter(
            counted, *_columns(spans), on_workers, late, self._arena.state, self._graph, self._now, self._late
        )

    def _fewer(self, units: int) -> None:
        """Count fewer units. If none is left, nothing is kept until a policy asks again."""
        self._num_left -= units
        self.is_kept = self._num_left > 0

    def _fit(self, num_late: int) -> None:
        """Make room for every node number given out, for every type, and for this many more late edges."""
        size, num_types = self._arena.node_capacity, len(self.counts)
        before = self._blocks.shape
        if before != (size, num_types):
            blocks = np.zeros((size, num_types), np.int32)
            blocks[: before[0], : before[1]] = self._blocks
            more = size - before[0]
            self._blocks, self._stack = blocks, np.empty(size, np.int64)
            self.left = np.concatenate((self.left, np.zeros(more, np.bool_)))
            self._late_first = np.concatenate((self._late_first, np.full(more, -1)))
        free, first = int(self._late_free[1]), self._late_edges.shape[1]
        if num_late > free:
            more = max(num_late - free, first)
            fresh = np.arange(first, first + more)
            chain = np.stack((np.append(fresh[1:], self._late_free[0]), fresh))
            self._late_edges = np.concatenate((self._late_edges, chain), axis=1)
            self._late_free = np.array([first, free + more])


def _columns(spans: Ints) -> tuple[Ints, Ints]:
    """Return the first nodes of extents, and their numbers of nodes."""
    return spans[:, 0].copy(), spans[:, 1].copy()
