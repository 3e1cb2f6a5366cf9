"""What sequences keep between their requests: the rows of nodes that have run, under numbers of their own.

A shelf is never written to. A request of the sequence begins from it; when that request is answered, what it wants to
keep goes onto a new shelf and the old one is cleared. So a request that fails leaves the sequence as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.errors import InvariantError
from batchmaker.scheduler.arena import DONE, NOWHERE, Arena
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

    def give_back(self, shelf: Shelf) -> None:
        """One user less; with the last one go the numbers, and the rows that nobody has taken over."""
        shelf.num_users -= 1
        if shelf.num_users:
            return
        nodes = shelf.nodes
        owners = nodes[self._arena.row[nodes] != NOWHERE]
        if len(owners):
            self._free_rows(owners)
        del self.in_use[shelf.extent.base]
        self._arena.nodes.release(shelf.extent.base, shelf.extent.num_nodes)
        self._arena.subgraphs.release(shelf.extent.first_subgraph, shelf.extent.num_subgraphs)

    def put(self, sequence: SequenceId, nodes: Nodes) -> tuple[Shelf | None, bool]:
        """Let a sequence keep the rows of these nodes, in this order, and no others.

        nodes: distinct, all done, of the request that has just been answered or of the shelf it began from. Returns
        the new shelf, None if nothing is kept, and whether the arena has grown.
        """
        shelf, grown = None, False
        before = self._latest.pop(sequence, None)
        if len(nodes):
            arena, count = self._arena, len(nodes)
            base, grown = arena.allocate_nodes(count)
            first_subgraph = arena.allocate_subgraphs(count)
            shelf = Shelf(Extent(0, base, count, first_subgraph, count))
            mine, subgraphs = shelf.nodes, np.arange(first_subgraph, first_subgraph + count)
            arena.type[subgraphs] = arena.type[arena.subgraph[nodes]]
            arena.head[subgraphs] = mine
            arena.size[subgraphs] = arena.span[subgraphs] = 1
            arena.subgraph[mine] = subgraphs
            arena.state[mine] = DONE
            arena.uses[mine] = 1  # the sequence is a reader, so no row is freed or taken over while it is kept
            arena.row[mine] = arena.row[nodes]
            arena.row[nodes] = NOWHERE
            self._latest[sequence] = self.in_use[base] = shelf
        if before is not None:
            self.give_back(before)
        return shelf, grown

    def close(self, sequence: SequenceId) -> None:
        """The sequence keeps nothing any more."""
        shelf = self._latest.pop(sequence, None)
        if shelf is not None:
            self.give_back(shelf)
