"""What sequences keep between their chunks: rows of nodes that have run, under node numbers of their own.

Stored nodes never change. A chunk begins from them. When all its values are computed, the nodes that it keeps are
stored under new numbers. Then the driver answers it, and says whether its caller got the result: if so, the old nodes
are freed, otherwise the new ones. So a chunk without a result leaves its sequence unchanged, whenever it loses it.
`SchedulerState.open`, completion, `Scheduler.decide` and `Scheduler.stored` use this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled, compiled_within
from batchmaker.core import extents
from batchmaker.core.addresses import State, state_at
from batchmaker.core.arena import Arena
from batchmaker.core.copies import earlier_node
from batchmaker.core.events import RequestArrived, SequenceId
from batchmaker.core.layout import (
    DONE,
    FIRST_EDGE,
    HEAD,
    KEEPS,
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
from batchmaker.core.numbering import Extent
from batchmaker.core.progress import free_rows
from batchmaker.errors import InvariantError

LIST_WORDS: Final = 1 << 16
"""How long all lists of nodes that requests keep may be together before those are dropped that nobody needs."""


@dataclass(slots=True)
class StoredNodes:
    """Consecutive node numbers with rows. base: the first. first_subgraph: that of the first.

    num_users: the sequence, while these are its latest stored nodes, and the requests in flight that began from them.
    """

    base: int
    first_subgraph: int
    num_nodes: int
    num_users: int = 1

    @property
    def extent(self) -> Extent:
        """The nodes as the local nodes from 0 on of a request."""
        return Extent(0, self.base, self.num_nodes, self.first_subgraph, self.num_nodes)

    @property
    def nodes(self) -> Ints:
        """The node numbers: [num_nodes]."""
        return np.arange(self.base, self.base + self.num_nodes)


@final
class KeptLists:
    """Lists of the nodes that sequences will keep, for compiled loops.

    `State.keeps` has the length of each and then its nodes, as in `ChunkNodes`. Equal lists are one. That of no
    nodes is at 0.
    """

    __slots__ = ("_arena", "_end", "_most", "_places")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.clear()

    def clear(self) -> None:
        """Forget all lists. Each that is still needed must be asked for again."""
        self._places = {b"": 0}
        self._end, self._most = 1, LIST_WORDS

    @property
    def is_full(self) -> bool:
        """Whether there may be many lists that nobody needs any more."""
        return self._end > self._most

    def places_of(self, lists: Sequence[Ints]) -> list[int]:
        """Return where lists are."""
        starts, places = list[int](), self._places
        for nodes in lists:
            key = nodes.tobytes()
            place = places.get(key)
            starts.append(self._enter(key, nodes) if place is None else place)
        return starts

    def _enter(self, key: bytes, nodes: Ints) -> int:
        place, arena = self._end, self._arena
        self._end = end = place + 1 + len(nodes)
        if end > len(arena.keeps):
            arena.keeps = np.concatenate((arena.keeps, np.zeros(max(end, len(arena.keeps)), np.int64)))
        arena.keeps[place], arena.keeps[place + 1 : end] = len(nodes), nodes
        self._places[key] = place
        return place

    def settle(self) -> None:
        """Let there be room for as many lists again as there are now."""
        self._most = max(LIST_WORDS, 2 * self._end)


@final
class SequenceStore:
    """The stored nodes of all sequences.

    - in_use: first node -> stored nodes that still have a user.
    - undecided: for each sequence whose chunk has been computed and is not answered yet, what it kept before; None for
      nothing.
    """

    __slots__ = ("_arena", "_latest", "_undecided", "in_use")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._latest: dict[SequenceId, StoredNodes] = {}
        self._undecided: dict[SequenceId, StoredNodes | None] = {}
        self.in_use: dict[int, StoredNodes] = {}  # by first node

    def latest(self, events: Sequence[RequestArrived]) -> tuple[list[StoredNodes | None], list[int]]:
        """Return what the sequences of new requests keep, and the first node of each; None and 0 if nothing.

        Who has a request in flight counts as a user. InvariantError if a sequence keeps another number of nodes than
        the request's graph begins from. Requests outside sequences have nothing.
        """
        if self._undecided:
            self.decide(
                [mine for event in events if (mine := event.sequence) in self._undecided and mine is not None], ()
            )
        latest, bases = list[StoredNodes | None](), list[int]()
        for event in events:
            stored = None
            if event.sequence is not None:
                stored, wanted = self._latest.get(event.sequence), event.graph.first
                have = 0 if stored is None else stored.num_nodes
                if have != wanted:
                    said = f"sequence {event.sequence} keeps {have} nodes; its next request counts on {wanted}"
                    raise InvariantError(said)
            latest.append(stored)
            bases.append(0 if stored is None else stored.base)
        return latest, bases

    def give_back(self, all_stored: Sequence[StoredNodes]) -> None:
        """Count one user less of each. Without users, their numbers are freed, and the rows that they still have."""
        unused = list[tuple[int, int, int]]()
        for stored in all_stored:
            stored.num_users -= 1
            if stored.num_users == 0:
                unused.append((stored.base, stored.first_subgraph, stored.num_nodes))
                del self.in_use[stored.base]
        if unused:
            free(self._arena.tables, np.array(unused, np.int64))

    def put(self, keeping: Sequence[tuple[SequenceId, int, int, int]]) -> list[StoredNodes]:
        """Note what sequences keep after requests that have just been computed. `decide` must follow for each.

        keeping: the sequences, which are distinct; of each its first new stored node, the first subgraph (see
        `store_kept`), and the number of nodes. Returns the new stored nodes of those that keep any.
        """
        made = list[StoredNodes]()
        for sequence, base, first, count in keeping:
            self._undecided[sequence] = self._latest.pop(sequence, None)
            if count:
                stored = self._latest[sequence] = self.in_use[base] = StoredNodes(base, first, count)
                made.append(stored)
        return made

    def restore(self, sequence: SequenceId, types: Sequence[int], rows: Sequence[int]) -> tuple[StoredNodes, bool]:
        """Let a sequence that keeps nothing keep new nodes: of each its type, and a row that was taken for it.

        Returns the stored nodes, and whether the arena has grown. At least one.
        """
        arena, count = self._arena, len(types)
        counts, capacity = np.array([count]), arena.node_capacity
        base, first = int(arena.allocate(NODES, counts)[0]), int(arena.allocate(SUBGRAPHS, counts)[0])
        stored = StoredNodes(base, first, count)
        settle(arena.nodes, arena.subgraphs, base, first, np.array(types, np.int64), np.array(rows, np.int64))
        self._latest[sequence] = self.in_use[base] = stored
        return stored, arena.node_capacity > capacity

    def nodes_of(self, sequence: SequenceId) -> Ints:
        """Return the nodes that a sequence keeps, of which no request is in flight."""
        stored = self._latest.get(sequence)
        return np.empty(0, np.int64) if stored is None else stored.nodes

    def decide(self, answered: Sequence[SequenceId], unanswered: Sequence[SequenceId]) -> None:
        """Free what the answered sequences kept before, and let the others keep that again instead of the new nodes."""
        unused = [stored for sequence in answered if (stored := self._undecided.pop(sequence)) is not None]
        for sequence in unanswered:
            before = self._undecided.pop(sequence)
            made = self._latest.pop(sequence, None)
            if made is not None:
                unused.append(made)
            if before is not None:
                self._latest[sequence] = before
                if made is not None:
                    self._move_back(before, made)
        self.give_back(unused)

    def _move_back(self, before: StoredNodes, made: StoredNodes) -> None:
        """Return the rows of earlier stored nodes that new ones have taken over."""
        row, first = self._arena.row, before.base
        nodes = self._arena.first_edge[made.nodes]
        was_stored = (nodes >= first) & (nodes < first + before.num_nodes)
        row[nodes[was_stored]] = row[made.nodes[was_stored]]
        row[made.nodes[was_stored]] = NOWHERE

    def close(self, sequence: SequenceId) -> None:
        """Let the sequence keep nothing."""
        if sequence in self._undecided:
            self.decide((sequence,), ())
        stored = self._latest.pop(sequence, None)
        if stored is not None:
            self.give_back((stored,))


@compiled_within
def store_kept(state: State, slots: Ints) -> Ints:
    """Move the rows that the sequences of these computed requests keep to new stored nodes.

    There must be room for the numbers. Returns [2, requests] the first stored node of each, and its first subgraph.
    """
    where, of_nodes, of_subgraphs = np.zeros((2, len(slots)), np.int64), state.nodes, state.subgraphs
    for which in range(len(slots)):
        slot = slots[which]
        at = state.requests[KEEPS, slot]
        count = state.keeps[at]
        if count == 0:
            continue
        base = extents.allocate(state.free, state.counts, NODES, of_nodes[FIRST_EDGE], count)
        first = extents.allocate(state.free, state.counts, SUBGRAPHS, of_subgraphs[HEAD], count)
        where[0, which], where[1, which] = base, first
        for i in range(count):
            number = state.keeps[at + 1 + i]
            node = earlier_node(state, slot, number) if number >= 0 else -1 - number
            row, type_id = of_nodes[ROW, node], of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]]
            of_nodes[ROW, node] = NOWHERE
            _store(of_nodes, of_subgraphs, base + i, first + i, type_id, row)
            of_nodes[FIRST_EDGE, base + i] = node
    return where


@compiled
def free(addresses: Ints, places: Ints) -> None:
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
def settle(of_nodes: Ints, of_subgraphs: Ints, base: int, first: int, types: Ints, rows: Ints) -> None:
    """Make stored nodes from `base` on, with subgraphs from `first` on, of these types and with these rows."""
    for i in range(len(types)):
        _store(of_nodes, of_subgraphs, base + i, first + i, types[i], rows[i])


@compiled
def _store(of_nodes: Ints, of_subgraphs: Ints, node: int, subgraph: int, type_id: int, row: int) -> None:
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
