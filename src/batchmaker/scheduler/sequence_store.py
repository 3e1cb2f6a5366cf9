"""What sequences keep between their chunks: rows of nodes that have run, under node numbers of their own.

Stored nodes never change. A chunk begins from them. When all its values are computed, the nodes that it keeps are
stored under new numbers. Then the driver answers it, and says whether its caller got the result: if so, the old nodes
are freed, otherwise the new ones. So a chunk without a result leaves its sequence unchanged, whenever it loses it.
`SchedulerState.open`, completion, `Scheduler.decide` and `Scheduler.stored` use this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.errors import InvariantError
from batchmaker.scheduler import extents
from batchmaker.scheduler.arena import Arena
from batchmaker.scheduler.copies import earlier_node
from batchmaker.scheduler.events import SequenceId
from batchmaker.scheduler.layout import (
    DONE,
    FIRST_EDGE,
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
from batchmaker.scheduler.progress import free_rows
from batchmaker.scheduler.tables import state_at

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

    - in_use: first node -> stored nodes that still have a user.
    - undecided: for each sequence whose chunk has been computed and is not answered yet: what it kept before (None for
      nothing), and the nodes whose rows have moved to its new stored nodes.
    """

    __slots__ = ("_arena", "_latest", "_undecided", "in_use")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._latest: dict[SequenceId, StoredNodes] = {}
        self._undecided: dict[SequenceId, tuple[StoredNodes | None, Nodes]] = {}
        self.in_use: dict[int, StoredNodes] = {}  # by first node

    def latest(self, wanted: Sequence[tuple[SequenceId | None, int]]) -> list[StoredNodes | None]:
        """Return the stored nodes of the sequences of new requests. Who has a request in flight counts as a user.

        wanted: each sequence, None for no sequence, and the number of stored nodes that the request's graph begins
        from. InvariantError if a sequence keeps another number. Of one that keeps none it is None.
        """
        if self._undecided:
            self.decide([sequence for sequence, _ in wanted if sequence in self._undecided], ())
        found = list[StoredNodes | None]()
        for sequence, num_nodes in wanted:
            stored = None if sequence is None else self._latest.get(sequence)
            have = 0 if stored is None else stored.extent.num_nodes
            if sequence is not None and have != num_nodes:
                raise InvariantError(f"sequence {sequence} keeps {have} nodes; its next request counts on {num_nodes}")
            found.append(stored)
        return found

    def give_back(self, given: Sequence[StoredNodes]) -> None:
        """Count one user less of each. Without users, their numbers are freed, and the rows that they still have."""
        unused = list[tuple[int, int, int]]()
        for stored in given:
            stored.num_users -= 1
            if stored.num_users == 0:
                extent = stored.extent
                unused.append((extent.base, extent.first_subgraph, extent.num_nodes))
                del self.in_use[extent.base]
        if unused:
            free(self._arena.tables, np.array(unused, np.int64))

    def put(self, kept: Sequence[tuple[SequenceId, int, Nodes]]) -> tuple[list[StoredNodes], bool]:
        """Let sequences keep the rows of nodes, in this order. `decide` must follow for each.

        kept: the sequences, which are distinct, the slot of each one's request, and nodes as in `ChunkNodes.kept`. The
        nodes are distinct and done. They belong to the request, which has just been computed, or to the stored nodes
        from which it began. Returns the new stored nodes of the sequences that keep any, and whether the arena has
        grown.
        """
        arena, made, at = self._arena, list[StoredNodes](), 0
        places = np.array([(slot, len(nodes)) for _, slot, nodes in kept], np.int64)
        counts = places[:, 1]
        grown = arena.fit(NODES, counts)
        arena.fit(SUBGRAPHS, counts)
        nodes, where = move(arena.tables, places, np.concatenate([nodes for _, _, nodes in kept]))
        for (sequence, _, mine), (base, first) in zip(kept, where.tolist(), strict=True):
            self._undecided[sequence] = (self._latest.pop(sequence, None), nodes[at : at + len(mine)])
            at += len(mine)
            if len(mine):
                stored = StoredNodes(Extent(0, base, len(mine), first, len(mine)))
                self._latest[sequence] = self.in_use[base] = stored
                made.append(stored)
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


def bases_of(stored: Sequence[StoredNodes | None]) -> list[int]:
    """Return the first of each of these stored nodes; 0 for none."""
    return [0 if mine is None else mine.extent.base for mine in stored]


@compiled
def move(addresses: Nodes, places: Nodes, kept: Nodes) -> tuple[Nodes, Nodes]:
    """Move the rows of nodes to new stored nodes, for whose numbers there must be room.

    places: [sequences, 2] the slot of the request, and how many nodes it keeps. kept: see `SequenceStore.put`; those of
    all sequences, one sequence after the other. Returns the nodes whose rows have moved; and [sequences, 2] the first
    stored node, and the first subgraph.
    """
    state, nodes, where = state_at(addresses), np.empty(len(kept), np.int64), np.zeros(places.shape, np.int64)
    of_nodes, of_subgraphs, at = state.nodes, state.subgraphs, 0
    for which in range(len(places)):
        slot, count = places[which, 0], places[which, 1]
        if count == 0:
            continue
        base = extents.allocate(state.free, state.counts, NODES, of_nodes[FIRST_EDGE], count)
        first = extents.allocate(state.free, state.counts, SUBGRAPHS, of_subgraphs[HEAD], count)
        where[which, 0], where[which, 1] = base, first
        for i in range(count):
            node = earlier_node(state, slot, kept[at]) if kept[at] >= 0 else -1 - kept[at]
            row, type_id = of_nodes[ROW, node], of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]]
            of_nodes[ROW, node] = NOWHERE
            _store(of_nodes, of_subgraphs, base + i, first + i, type_id, row)
            nodes[at] = node
            at += 1
    return nodes, where


@compiled
def free(addresses: Nodes, places: Nodes) -> None:
    """Give back stored nodes and the rows that they have. places: [stored, 3] first node, first subgraph, and count."""
    state = state_at(addresses)
    owners, num_owners = np.empty(places[:, 2].sum(), np.int64), 0
    for which in range(len(places)):
        for node in range(places[which, 0], places[which, 0] + places[which, 2]):
            if state.nodes[ROW, node] != NOWHERE:
                owners[num_owners] = node
                num_owners += 1
    free_rows(state.nodes, state.subgraphs, state.types, state.pools, state.free_rows, owners[:num_owners])
    for which in range(len(places)):
        base, first, count = places[which, 0], places[which, 1], places[which, 2]
        extents.release(state.free, state.counts, NODES, state.nodes[FIRST_EDGE], base, count)
        extents.release(state.free, state.counts, SUBGRAPHS, state.subgraphs[HEAD], first, count)


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
