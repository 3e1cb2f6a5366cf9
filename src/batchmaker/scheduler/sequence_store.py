"""What sequences keep between their requests: the rows of nodes that have run, under numbers of their own.

Stored nodes are never written to. A request of the sequence begins from them. When that request is answered, what it
wants to keep is stored anew and the old nodes are cleared. So a request that fails leaves the sequence as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.errors import InvariantError
from batchmaker.scheduler.arena import (
    DONE,
    HEAD,
    LANE,
    LANE_WORKER,
    NOWHERE,
    PIN,
    ROW,
    SIZE,
    SPAN,
    STATE,
    SUBGRAPH,
    TYPE,
    USES,
    Arena,
)
from batchmaker.scheduler.events import SequenceId
from batchmaker.scheduler.numbering import Extent

Nodes = NDArray[np.int64]


@dataclass(slots=True)
class StoredNodes:
    """Numbers with rows. num_users: the sequence, while it is its latest, and requests that have begun from it."""

    extent: Extent
    num_users: int = 1

    @property
    def nodes(self) -> Nodes:
        """Its node numbers, [extent.num_nodes]."""
        return np.arange(self.extent.base, self.extent.base + self.extent.num_nodes)


@final
class SequenceStore:
    """The stored nodes of all sequences. free_rows: frees the rows of nodes that each have one."""

    __slots__ = ("_arena", "_free_rows", "_latest", "in_use")

    def __init__(self, arena: Arena, free_rows: Callable[[Nodes], None]) -> None:
        self._arena = arena
        self._free_rows = free_rows
        self._latest: dict[SequenceId, StoredNodes] = {}
        self.in_use: dict[int, StoredNodes] = {}  # by first node

    def lend(self, sequence: SequenceId, num_nodes: int) -> StoredNodes | None:
        """Return the stored nodes of a sequence for a request that counts on `num_nodes` of them; None for 0."""
        stored = self._latest.get(sequence)
        have = 0 if stored is None else stored.extent.num_nodes
        if have != num_nodes:
            raise InvariantError(f"sequence {sequence} keeps {have} nodes; its next request counts on {num_nodes}")
        if stored is not None:
            stored.num_users += 1
        return stored

    def give_back(self, given: Sequence[StoredNodes]) -> None:
        """One user less of each; with the last one go the numbers, and the rows that nobody has taken over."""
        unused = []
        for stored in given:
            stored.num_users -= 1
            if stored.num_users == 0:
                unused.append(stored)
        if not unused:
            return
        arena, extents = self._arena, [stored.extent for stored in unused]
        nodes = np.concatenate([stored.nodes for stored in unused])
        owners = nodes[arena.row[nodes] != NOWHERE]
        if len(owners):
            self._free_rows(owners)
        for extent in extents:
            del self.in_use[extent.base]
            arena.nodes.release(extent.base, extent.num_nodes)
            arena.subgraphs.release(extent.first_subgraph, extent.num_subgraphs)

    def put(self, kept: Sequence[tuple[SequenceId, Nodes]]) -> tuple[list[StoredNodes], bool]:
        """Let sequences keep the rows of these nodes, in this order, and no others.

        kept: different sequences, each with distinct nodes, all done, of the request that has just been answered or of
        the stored nodes it began from. Returns the new ones of those that keep anything, and whether the arena has
        grown.
        """
        arena = self._arena
        before = [stored for sequence, _ in kept if (stored := self._latest.pop(sequence, None)) is not None]
        kept = [(sequence, nodes) for sequence, nodes in kept if len(nodes)]
        counts = [len(nodes) for _, nodes in kept]
        bases, firsts = arena.nodes.allocate_each(counts), arena.subgraphs.allocate_each(counts)
        grown = arena.fit_nodes()
        arena.fit_subgraphs()
        made = [StoredNodes(Extent(0, b, n, first, n)) for b, n, first in zip(bases, counts, firsts, strict=True)]
        if made:
            where = np.array([bases, firsts, counts], np.int64)
            move(arena.of_nodes, arena.of_subgraphs, where, np.concatenate([nodes for _, nodes in kept]))
        for (sequence, _), stored in zip(kept, made, strict=True):
            self._latest[sequence] = self.in_use[stored.extent.base] = stored
        self.give_back(before)
        return made, grown

    def close(self, sequence: SequenceId) -> None:
        """The sequence keeps nothing any more."""
        stored = self._latest.pop(sequence, None)
        if stored is not None:
            self.give_back((stored,))


@compiled
def move(of_nodes: Nodes, of_subgraphs: Nodes, where: Nodes, nodes: Nodes) -> None:
    """Give the rows of these nodes to stored nodes, which nobody may take over: a sequence is a reader of each.

    of_nodes, of_subgraphs: the arena's tables. where: [3, sequences] first node and first subgraph of each, and how
    many of the nodes are its own, one after the other.
    """
    at = 0
    for which in range(where.shape[1]):
        for i in range(where[2, which]):
            node, mine, subgraph = nodes[at], where[0, which] + i, where[1, which] + i
            of_nodes[:, mine] = 0
            of_nodes[STATE, mine], of_nodes[SUBGRAPH, mine], of_nodes[USES, mine] = DONE, subgraph, 1
            of_nodes[ROW, mine], of_nodes[ROW, node] = of_nodes[ROW, node], NOWHERE
            of_subgraphs[:, subgraph] = 0
            of_subgraphs[TYPE, subgraph] = of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]]
            of_subgraphs[HEAD, subgraph], of_subgraphs[SIZE, subgraph], of_subgraphs[SPAN, subgraph] = mine, 1, 1
            of_subgraphs[PIN, subgraph] = NOWHERE
            of_subgraphs[LANE, subgraph], of_subgraphs[LANE_WORKER, subgraph] = NOWHERE, NOWHERE
            at += 1
