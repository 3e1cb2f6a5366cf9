"""What sequences keep between their chunks: rows of nodes that have run, under node numbers of their own.

Stored nodes never change. A chunk begins from them. When all its values are computed, the nodes that it keeps are
stored under new numbers. Then the driver answers it, and says whether its caller got the result: if so, the old nodes
are freed, otherwise the new ones. So a chunk without a result leaves its sequence unchanged, whenever it loses it.
`SchedulerState.open`, completion, `Scheduler.decide` and `Scheduler.stored` use this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.errors import InvariantError
from batchmaker.scheduler.arena import Arena
from batchmaker.scheduler.events import SequenceId
from batchmaker.scheduler.layout import (
    DONE,
    HEAD,
    LANE,
    LANE_WORKER,
    NODES,
    NOWHERE,
    PIN,
    ROW,
    SIZE,
    SPAN,
    STATE,
    SUBGRAPH,
    SUBGRAPHS,
    TYPE,
    USES,
)
from batchmaker.scheduler.numbering import Extent

Nodes = NDArray[np.int64]


@dataclass(slots=True)
class StoredNodes:
    """Node numbers with rows.

    num_users: the sequence, while these are its latest stored nodes, and the requests in flight that began from them.
    """

    extent: Extent
    num_users: int = 1

    @property
    def nodes(self) -> Nodes:
        """The node numbers: [extent.num_nodes]."""
        return np.arange(self.extent.base, self.extent.base + self.extent.num_nodes)


@final
class SequenceStore:
    """The stored nodes of all sequences.

    - free_rows: frees the rows of given nodes; each of them has one.
    - in_use: first node -> stored nodes that still have a user.
    - undecided: for each sequence whose chunk has been computed and is not answered yet: what it kept before (None for
      nothing), and the nodes whose rows have moved to its new stored nodes.
    """

    __slots__ = ("_arena", "_free_rows", "_latest", "_undecided", "in_use")

    def __init__(self, arena: Arena, free_rows: Callable[[Nodes], None]) -> None:
        self._arena = arena
        self._free_rows = free_rows
        self._latest: dict[SequenceId, StoredNodes] = {}
        self._undecided: dict[SequenceId, tuple[StoredNodes | None, Nodes]] = {}
        self.in_use: dict[int, StoredNodes] = {}  # by first node

    def lend(self, wanted: Sequence[tuple[SequenceId, int]]) -> list[StoredNodes | None]:
        """Return the stored nodes of sequences for new requests, and count each request as a user.

        wanted: each sequence, and the number of stored nodes that the request's graph begins from. InvariantError if a
        sequence keeps another number. Of one that keeps none it is None.
        """
        if self._undecided:
            self.decide([sequence for sequence, _ in wanted if sequence in self._undecided], ())
        lent = [self._latest.get(sequence) for sequence, _ in wanted]
        for stored, (sequence, num_nodes) in zip(lent, wanted, strict=True):
            have = 0 if stored is None else stored.extent.num_nodes
            if have != num_nodes:
                raise InvariantError(f"sequence {sequence} keeps {have} nodes; its next request counts on {num_nodes}")
            if stored is not None:
                stored.num_users += 1
        return lent

    def give_back(self, given: Sequence[StoredNodes]) -> None:
        """Count one user less of each. Without users, their numbers are freed, and the rows that they still have."""
        unused = []
        for stored in given:
            stored.num_users -= 1
            if stored.num_users == 0:
                unused.append(stored)
        if not unused:
            return
        arena = self._arena
        places = [(one.extent.base, one.extent.first_subgraph, one.extent.num_nodes) for one in unused]
        bases, firsts, counts = np.array(places, np.int64).T.copy()
        ends = np.cumsum(counts)
        nodes = np.repeat(bases + counts - ends, counts) + np.arange(ends[-1])
        owners = nodes[arena.row[nodes] != NOWHERE]
        if len(owners):
            self._free_rows(owners)
        for base, _, _ in places:
            del self.in_use[base]
        arena.release(NODES, bases, counts)
        arena.release(SUBGRAPHS, firsts, counts)

    def put(self, kept: Sequence[tuple[SequenceId, Nodes]]) -> tuple[list[StoredNodes], bool]:
        """Let sequences keep the rows of these nodes, in this order. `decide` must follow for each.

        kept: (sequence, nodes); the sequences are distinct. The nodes are distinct and done. They belong to the request
        that has just been computed, or to the stored nodes from which it began. Returns the new stored nodes of the
        sequences that keep any, and whether the arena has grown.
        """
        arena = self._arena
        for sequence, nodes in kept:
            self._undecided[sequence] = (self._latest.pop(sequence, None), nodes)
        kept = [(sequence, nodes) for sequence, nodes in kept if len(nodes)]
        counts = np.array([len(nodes) for _, nodes in kept], np.int64)
        grown = arena.fit(NODES, counts)
        arena.fit(SUBGRAPHS, counts)
        where = np.stack((arena.allocate(NODES, counts), arena.allocate(SUBGRAPHS, counts), counts))
        made = [StoredNodes(Extent(0, base, count, first, count)) for base, first, count in where.T.tolist()]
        if made:
            move(arena.nodes, arena.subgraphs, where, np.concatenate([nodes for _, nodes in kept]))
        for (sequence, _), stored in zip(kept, made, strict=True):
            self._latest[sequence] = self.in_use[stored.extent.base] = stored
        return made, grown

    def restore(self, sequence: SequenceId, types: Sequence[int], rows: Sequence[int]) -> tuple[StoredNodes, bool]:
        """Let a sequence that keeps nothing keep new nodes: of each its type, and a row that was taken for it.

        Returns the stored nodes, and whether the arena has grown. At least one.
        """
        arena, count = self._arena, len(types)
        counts = np.array([count])
        grown = arena.fit(NODES, counts)
        arena.fit(SUBGRAPHS, counts)
        base, first = int(arena.allocate(NODES, counts)[0]), int(arena.allocate(SUBGRAPHS, counts)[0])
        stored = StoredNodes(Extent(0, base, count, first, count))
        settle(arena.nodes, arena.subgraphs, base, first, np.array(types, np.int64), np.array(rows, np.int64))
        self._latest[sequence] = self.in_use[base] = stored
        return stored, grown

    def kept(self, sequence: SequenceId) -> Nodes:
        """Return the nodes that a sequence keeps, of which no request is in flight."""
        stored = self._latest.get(sequence)
        return np.empty(0, np.int64) if stored is None else stored.nodes

    def decide(self, answered: Sequence[SequenceId], unanswered: Sequence[SequenceId]) -> None:
        """Free what the answered sequences kept before, and let the others keep that again instead of the new nodes."""
        unused = [stored for sequence in answered if (stored := self._undecided.pop(sequence)[0]) is not None]
        for sequence in unanswered:
            before, nodes = self._undecided.pop(sequence)
            made = self._latest.pop(sequence, None)
            if made is not None:
                unused.append(made)
            if before is not None:
                self._latest[sequence] = before
                if made is not None:
                    self._move_back(before, made, nodes)
        self.give_back(unused)

    def _move_back(self, before: StoredNodes, made: StoredNodes, nodes: Nodes) -> None:
        """Return the rows of earlier stored nodes that new ones have taken over. nodes: [made] where each was from."""
        row, first = self._arena.row, before.extent.base
        was_stored = (nodes >= first) & (nodes < first + before.extent.num_nodes)
        row[nodes[was_stored]] = row[made.nodes[was_stored]]
        row[made.nodes[was_stored]] = NOWHERE

    def close(self, sequence: SequenceId) -> None:
        """Let the sequence keep nothing."""
        if sequence in self._undecided:
            self.decide((sequence,), ())
        stored = self._latest.pop(sequence, None)
        if stored is not None:
            self.give_back((stored,))


@compiled
def move(of_nodes: Nodes, of_subgraphs: Nodes, where: Nodes, nodes: Nodes) -> None:
    """Move the rows of these nodes to stored nodes.

    - of_nodes, of_subgraphs: the tables of the arena.
    - where: [3, sequences] the first stored node, the first subgraph, and the number of nodes of each sequence.
    - nodes: the nodes of all sequences, one sequence after the other.
    """
    at = 0
    for which in range(where.shape[1]):
        for i in range(where[2, which]):
            node = nodes[at]
            row, type_id = of_nodes[ROW, node], of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]]
            of_nodes[ROW, node] = NOWHERE
            _store(of_nodes, of_subgraphs, where[0, which] + i, where[1, which] + i, type_id, row)
            at += 1


@compiled
def settle(of_nodes: Nodes, of_subgraphs: Nodes, base: int, first: int, types: Nodes, rows: Nodes) -> None:
    """Make stored nodes from `base` on, with subgraphs from `first` on, of these types and with these rows."""
    for i in range(len(types)):
        _store(of_nodes, of_subgraphs, base + i, first + i, types[i], rows[i])


@compiled
def _store(of_nodes: Nodes, of_subgraphs: Nodes, node: int, subgraph: int, type_id: int, row: int) -> None:
    """Write the columns of a stored node, a subgraph of its own.

    Its uses are 1: the sequence itself reads it. So no other node takes over its row.
    """
    of_nodes[:, node] = 0
    of_nodes[STATE, node], of_nodes[SUBGRAPH, node], of_nodes[USES, node] = DONE, subgraph, 1
    of_nodes[ROW, node] = row
    of_subgraphs[:, subgraph] = 0
    of_subgraphs[TYPE, subgraph] = type_id
    of_subgraphs[HEAD, subgraph], of_subgraphs[SIZE, subgraph], of_subgraphs[SPAN, subgraph] = node, 1, 1
    of_subgraphs[PIN, subgraph] = NOWHERE
    of_subgraphs[LANE, subgraph], of_subgraphs[LANE_WORKER, subgraph] = NOWHERE, NOWHERE
