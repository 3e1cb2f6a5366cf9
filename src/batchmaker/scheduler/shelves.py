"""What sequences keep between their requests: the rows of nodes that have run, under numbers of their own.

A shelf is never written to. A request of the sequence begins from it; when that request is answered, what it wants to
keep goes onto a new shelf and the old one is cleared. So a request that fails leaves the sequence as it was.
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
class Shelf:
    """Numbers with rows. num_users: the sequence, while it is its latest, and requests that have begun from it."""

    extent: Extent
    num_users: int = 1

    @property
    def nodes(self) -> Nodes:
        """Its node numbers, [extent.num_nodes]."""
        return np.arange(self.extent.base, self.extent.base + self.extent.num_nodes)


@final
class Shelves:
    """The shelves in use. free_rows: frees the rows of nodes that each have one."""

    __slots__ = ("_arena", "_free_rows", "_latest", "in_use")

    def __init__(self, arena: Arena, free_rows: Callable[[Nodes], None]) -> None:
        self._arena = arena
        self._free_rows = free_rows
        self._latest: dict[SequenceId, Shelf] = {}
        self.in_use: dict[int, Shelf] = {}  # by first node

    def lend(self, sequence: SequenceId, num_nodes: int) -> Shelf | None:
        """Return the latest shelf of a sequence for a request that counts on `num_nodes` nodes; None if on none."""
        shelf = self._latest.get(sequence)
        have = 0 if shelf is None else shelf.extent.num_nodes
        if have != num_nodes:
            raise InvariantError(f"sequence {sequence} keeps {have} nodes; its next request counts on {num_nodes}")
        if shelf is not None:
            shelf.num_users += 1
        return shelf

    def give_back(self, shelves: Sequence[Shelf]) -> None:
        """One user less of each; with the last one go the numbers, and the rows that nobody has taken over."""
        unused = []
        for shelf in shelves:
            shelf.num_users -= 1
            if shelf.num_users == 0:
                unused.append(shelf)
        if not unused:
            return
        arena, extents = self._arena, [shelf.extent for shelf in unused]
        nodes = np.concatenate([shelf.nodes for shelf in unused])
        owners = nodes[arena.row[nodes] != NOWHERE]
        if len(owners):
            self._free_rows(owners)
        for extent in extents:
            del self.in_use[extent.base]
            arena.nodes.release(extent.base, extent.num_nodes)
            arena.subgraphs.release(extent.first_subgraph, extent.num_subgraphs)

    def put(self, kept: Sequence[tuple[SequenceId, Nodes]]) -> tuple[list[Shelf], bool]:
        """Let sequences keep the rows of these nodes, in this order, and no others.

        kept: different sequences, each with distinct nodes, all done, of the request that has just been answered or of
        the shelf it began from. Returns the new shelves of those that keep anything, and whether the arena has grown.
        """
        arena = self._arena
        before = [shelf for sequence, _ in kept if (shelf := self._latest.pop(sequence, None)) is not None]
        kept = [(sequence, nodes) for sequence, nodes in kept if len(nodes)]
        counts = [len(nodes) for _, nodes in kept]
        bases, firsts = arena.nodes.allocate_each(counts), arena.subgraphs.allocate_each(counts)
        grown = arena.fit_nodes()
        arena.fit_subgraphs()
        shelves = [Shelf(Extent(0, b, n, first, n)) for b, n, first in zip(bases, counts, firsts, strict=True)]
        if shelves:
            where = np.array([bases, firsts, counts], np.int64)
            move(arena.of_nodes, arena.of_subgraphs, where, np.concatenate([nodes for _, nodes in kept]))
        for (sequence, _), shelf in zip(kept, shelves, strict=True):
            self._latest[sequence] = self.in_use[shelf.extent.base] = shelf
        self.give_back(before)
        return shelves, grown

    def close(self, sequence: SequenceId) -> None:
        """The sequence keeps nothing any more."""
        shelf = self._latest.pop(sequence, None)
        if shelf is not None:
            self.give_back((shelf,))


@compiled
def move(of_nodes: Nodes, of_subgraphs: Nodes, where: Nodes, nodes: Nodes) -> None:
    """Give the rows of these nodes to nodes of shelves, which nobody may take over: a sequence is a reader of each.

    of_nodes, of_subgraphs: the arena's tables. where: [3, shelves] first node and first subgraph of each, and how many
    of the nodes are its own, one after the other.
    """
    at = 0
    for shelf in range(where.shape[1]):
        for i in range(where[2, shelf]):
            node, mine, subgraph = nodes[at], where[0, shelf] + i, where[1, shelf] + i
            of_nodes[:, mine] = 0
            of_nodes[STATE, mine], of_nodes[SUBGRAPH, mine], of_nodes[USES, mine] = DONE, subgraph, 1
            of_nodes[ROW, mine], of_nodes[ROW, node] = of_nodes[ROW, node], NOWHERE
            of_subgraphs[:, subgraph] = 0
            of_subgraphs[TYPE, subgraph] = of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]]
            of_subgraphs[HEAD, subgraph], of_subgraphs[SIZE, subgraph], of_subgraphs[SPAN, subgraph] = mine, 1, 1
            of_subgraphs[PIN, subgraph] = NOWHERE
            of_subgraphs[LANE, subgraph], of_subgraphs[LANE_WORKER, subgraph] = NOWHERE, NOWHERE
            at += 1
