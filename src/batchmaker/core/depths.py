"""Depths of the nodes in flight. Kept only for policies with `needs_depth`, and updated with every event.

The scheduler's state calls it; policies read it as a `DepthView`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.core.arena import Arena
from batchmaker.core.layout import LEFT_DEPTHS, MINI_BATCH_DEPTHS, NODE_MASK
from batchmaker.core.numbering import Extent
from batchmaker.graph.cell_graph import CellGraph
from batchmaker.graph.depth import depths_of


@final
class Depths:
    """Depths by node, and counts and sums of depths by cell type and by request.

    - mini_batch: [2, types] how many nodes the mini-batch has, run or not, and the sum of their depths.
    - left: [2, types] the same of the nodes in flight that are not submitted.
    - left_of_slot: [2, types, slots] the same for each request.

    The depth of each node in flight (see `depths_of`) is in the arena's `depth_of`; the first two are in its `types`.

    A mini-batch is the requests that are in flight between two moments at which none is in flight.
    """

    __slots__ = ("_arena", "_members", "left_of_slot")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        arena.fit_depths()
        self.left_of_slot = np.zeros((2, 0, 64), np.int64)
        self._members: set[int] = set()

    @property
    def mini_batch(self) -> Ints:
        return self._arena.types[MINI_BATCH_DEPTHS : MINI_BATCH_DEPTHS + 2]

    @property
    def left(self) -> Ints:
        return self._arena.types[LEFT_DEPTHS : LEFT_DEPTHS + 2]

    def mean(self, type_id: int) -> float:
        """Return the mean depth of all nodes of a type in the mini-batch, run or not; 0 if it has none."""
        count, total = self.mini_batch[:, type_id].tolist()
        return total / count if count else 0.0

    def mean_left(self, type_id: int) -> float:
        """Return the mean depth of the nodes of a type that are in flight and not submitted; 0 if there are none."""
        count, total = self.left[:, type_id].tolist()
        return total / count if count else 0.0

    def lowest_ready(self, type_id: int) -> int:
        """Return the smallest depth among the ready nodes of a type that has some. Looks at all of them."""
        return _lowest(self._arena.depth_of, self._arena.ready_keys(type_id))

    def add_type(self) -> None:
        """Add a cell type."""
        column = np.zeros((2, 1, self.left_of_slot.shape[2]), np.int64)
        self.left_of_slot = np.concatenate((self.left_of_slot, column), axis=1)

    def admit(self, slot: int, graph: CellGraph, extents: Sequence[Extent]) -> None:
        """Note that a request has got these nodes. extents: of all nodes that it may refer to, the graph's own last."""
        *earlier, own = extents
        while slot >= self.left_of_slot.shape[2]:
            self.left_of_slot = np.concatenate((self.left_of_slot, np.zeros_like(self.left_of_slot)), axis=2)
        self._arena.fit_depths()
        of = self._arena.depth_of
        before = [of[e.base : e.base + e.num_nodes] for e in earlier]
        depth = depths_of(graph, np.concatenate(before) if before else np.empty(0, np.int64))
        of[own.base : own.base + own.num_nodes] = depth
        if not self._members:
            self.mini_batch[:] = 0
        self._members.add(slot)
        added = np.zeros((2, self._arena.types.shape[1]), np.int64)
        for run in graph.runs:
            steps = depth[run.first - graph.first : run.first - graph.first + run.length]
            added[:, run.type_id] += (run.length, steps.sum())
        for block in graph.blocks:
            nodes = depth[block.first - graph.first : block.first - graph.first + block.count]
            np.add.at(added[0], block.types, 1)
            np.add.at(added[1], block.types, nodes)
        self.mini_batch[:] += added
        self.left[:] += added
        self.left_of_slot[:, :, slot] += added

    def rest(self, nodes: Ints) -> None:
        """Note that a sequence keeps these nodes. Nodes that read only such nodes have depth 0."""
        self._arena.fit_depths()
        self._arena.depth_of[nodes] = -1

    def submitted(self, slots: Ints, type_id: int, nodes: Ints) -> None:
        """Note that these nodes of one type are on a worker. slots: [nodes] the slot of each node's request."""
        _submitted(self._arena.depth_of, self.left, self.left_of_slot, type_id, slots, nodes)

    def stopped(self, slot: int, type_id: int, first: int, end: int) -> None:
        """Note that a run has ended early: its nodes from `first` to before `end` will not be computed."""
        if slot in self._members:
            gone = (end - first, int(self._arena.depth_of[first:end].sum()))
            self.left[:, type_id] -= gone
            self.left_of_slot[:, type_id, slot] -= gone

    def leave(self, slot: int) -> None:
        """Note that a request has ended: its other nodes will not be submitted."""
        if slot in self._members:
            self._members.discard(slot)
            self.left[:] -= self.left_of_slot[:, :, slot]
            self.left_of_slot[:, :, slot] = 0


@compiled
def _lowest(of: Ints, keys: Ints) -> int:
    """Return the smallest depth among the keys, which must not be empty."""
    lowest = of[keys[0] & NODE_MASK]
    for key in keys:
        lowest = min(lowest, of[key & NODE_MASK])
    return int(lowest)


@compiled
def _submitted(of: Ints, left: Ints, left_of_slot: Ints, type_id: int, slots: Ints, nodes: Ints) -> None:
    """Subtract nodes from `left` and `left_of_slot` (see Depths). slots, nodes: [batch]."""
    for i in range(len(nodes)):
        depth = of[nodes[i]]
        left[0, type_id] -= 1
        left[1, type_id] -= depth
        left_of_slot[0, type_id, slots[i]] -= 1
        left_of_slot[1, type_id, slots[i]] -= depth
