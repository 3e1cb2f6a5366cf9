"""The nodes of a closed mini-batch that can run next, updated while it runs: a few operations per edge and type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.graph import wait_counts
from batchmaker.graph.mini_batch import MiniBatch


@final
class Frontier:
    """The state of a mini-batch during its computation.

    ready: [types] the nodes of each type that have not run and whose sources have (Frontier_a of G_t), in the order in
    which they became ready. independent: [types] the number of nodes of each type that have not run and have no
    ancestor of their own type that has not run (the size of the frontier of G^a_t, at least that of `ready`). num_left:
    nodes that have not run. Only `run` and `reset` write these. The memory is 8 bytes for a node and type (see
    `wait_counts`).
    """

    __slots__ = (
        "_at_first",
        "_edges",
        "_graph",
        "_late",
        "_now",
        "_num_sources",
        "_ready_at_first",
        "_scratch",
        "_types",
        "_unmet",
        "independent",
        "mini_batch",
        "num_left",
        "ready",
    )

    def __init__(self, mini_batch: MiniBatch) -> None:
        self.mini_batch = mini_batch
        size = len(mini_batch)
        nodes, num_fed = np.arange(size), mini_batch.num_fed
        self._types: list[int] = mini_batch.types.tolist()
        self._edges = (num_fed.cumsum() - num_fed, num_fed, mini_batch.fed)
        types, single = mini_batch.types.astype(np.int16), np.zeros(size, np.int64)
        self._graph: wait_counts.Graph = (nodes, single, types, *self._edges)
        self._late: wait_counts.LateLists = (np.full(size, -1), np.empty((2, 0), np.int64), np.array([-1, 0]))
        self._scratch = np.empty(size, np.int64)
        left = np.empty(size, np.bool_)
        blocks = np.empty((size, mini_batch.num_types), np.int32)
        independent = np.zeros(mini_batch.num_types, np.int64)
        self._at_first: wait_counts.Counters = (left, blocks, independent)
        everything = (np.zeros(1, np.int64), np.array([size]))
        nothing = (np.empty(0, np.int64), np.empty((2, 0), np.int64))
        state = np.zeros(size, np.int8)
        wait_counts.enter(False, *everything, *nothing, state, self._graph, self._at_first, self._late)
        self._num_sources: Ints = np.diff(mini_batch.starts)
        self._ready_at_first: list[list[int]] = [[] for _ in range(mini_batch.num_types)]
        for node in np.flatnonzero(self._num_sources == 0).tolist():
            self._ready_at_first[self._types[node]].append(node)
        self.reset()

    def reset(self) -> None:
        """Return to the state in which nothing has run."""
        self._unmet = self._num_sources.copy()
        left, blocks, independent = self._at_first
        self._now: wait_counts.Counters = (left.copy(), blocks.copy(), independent.copy())
        self.ready = [list(nodes) for nodes in self._ready_at_first]
        self.independent: list[int] = independent.tolist()
        self.num_left = len(self._types)

    def run(self, type_id: int, nodes: Sequence[int] | None = None) -> Sequence[int]:
        """Run ready nodes of one type, all of them or those named, and return them."""
        ready, types = self.ready, self._types
        if nodes is None:
            nodes, ready[type_id] = ready[type_id], []
        else:
            chosen = set(nodes)
            ready[type_id] = [node for node in ready[type_id] if node not in chosen]
        running = np.array(nodes, np.int64)
        for node in self._scratch[: _met(running, self._unmet, self._scratch, *self._edges)].tolist():
            ready[types[node]].append(node)
        wait_counts.run(running, type_id, self._scratch, self._graph, self._now, self._late)
        self.independent[type_id] = int(self._now[2][type_id])
        self.num_left -= len(nodes)
        return nodes

    def nearest_to_sufficient(self) -> int:
        """Return the type nearest to the sufficient condition for a best order (Lemma 1): the highest ready /
        independent. Ties go to the type with more ready nodes and then to the lower type id."""
        independent = self.independent
        return max(
            (len(nodes) / independent[kind], len(nodes), -kind, kind) for kind, nodes in enumerate(self.ready) if nodes
        )[3]


@compiled
def _met(nodes: Ints, unmet: Ints, ready: Ints, first_edge: Ints, num_edges: Ints, fed: Ints) -> int:
    """Lower the unmet counts of these nodes' consumers; write those that are ready now, return their number."""
    count = 0
    for node in nodes:
        for edge in range(first_edge[node], first_edge[node] + num_edges[node]):
            after = fed[edge]
            unmet[after] -= 1
            if unmet[after] == 0:
                ready[count] = after
                count += 1
    return count
