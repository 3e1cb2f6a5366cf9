"""Ranks of requests, from their priorities and marks; and queues of ready nodes ordered by rank.

Each cell type has one RankedQueue. `Urgency` sets the marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.graph.spec import TypeId
from batchmaker.scheduler.arena import Arena
from batchmaker.scheduler.ready import EMPTY, NODE_MASK, Keys, ReadyQueue

# Marks of a request: it belongs to the cohort; it is short of time (see `Urgency`).
MEMBER: Final = 1
HURRIED: Final = 2
_ALL_MARKS: Final = 4


def as_member(rank: int) -> int:
    """Return the rank that a request of this rank has with the mark MEMBER."""
    return ((rank + MEMBER) | MEMBER) - MEMBER


def priority_of(rank: int) -> int:
    """Return the priority of requests of this rank, whatever their marks."""
    return (rank + MEMBER) // _ALL_MARKS


@final
class Priorities:
    """The rank of each request in flight, by slot. A larger rank is served first; the usual rank is 0.

    The rank is 4 * priority + marks - MEMBER, so marks order only requests of equal priority. A request has the mark
    MEMBER until it is taken away. So if all requests have priority 0 and are members, all have the usual rank.
    """

    __slots__ = ("_num_unusual", "_of_slot", "arena")

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._of_slot = np.zeros(256, np.int64)
        self._num_unusual = 0

    def enter(self, slot: int, priority: int) -> None:
        """Note that a request with this priority has arrived."""
        if priority == 0:
            return
        self._fit(slot)
        self._of_slot[slot] = _ALL_MARKS * priority
        self._num_unusual += 1

    def mark(self, slot: int, mark: int, on: bool) -> bool:
        """Set a mark of a request, or clear it; return whether its rank has changed.

        If so, `requeue` must be called on every queue.
        """
        self._fit(slot)
        before = int(self._of_slot[slot])
        marked = before + MEMBER  # of rank 0 MEMBER is the only mark
        after = (marked | mark if on else marked & ~mark) - MEMBER
        self._of_slot[slot] = after
        self._num_unusual += (after != 0) - (before != 0)
        return after != before

    def _fit(self, slot: int) -> None:
        if slot >= len(self._of_slot):
            bigger = np.zeros(max(slot + 1, 2 * len(self._of_slot)), np.int64)
            bigger[: len(self._of_slot)] = self._of_slot
            self._of_slot = bigger

    @property
    def differ(self) -> bool:
        """Whether any request has a rank other than 0."""
        return self._num_unusual > 0

    def leave(self, slot: int) -> None:
        """Note that a request has gone and its slot is free."""
        if self._num_unusual and slot < len(self._of_slot) and self._of_slot[slot] != 0:
            self._of_slot[slot] = 0
            self._num_unusual -= 1

    def of(self, keys: Keys) -> NDArray[np.int64] | None:
        """Return the rank of each ready node, or None if all requests in flight have rank 0."""
        return _ranks(self.arena.request, self._of_slot, keys) if self._num_unusual else None

    def split(self, keys: Keys) -> list[tuple[int, Keys]]:
        """Return the ranks of these ready nodes, ascending, each with its nodes in their order."""
        ranks = self.of(keys)
        if ranks is None:
            return [(0, keys)]
        distinct = sorted(set(ranks.tolist()))
        return [(rank, keys if len(distinct) == 1 else keys[ranks == rank]) for rank in distinct]


@compiled
def _ranks(request: NDArray[np.int64], of_slot: NDArray[np.int64], keys: Keys) -> NDArray[np.int64]:
    """Return the rank of each key. request: [nodes]. of_slot: [slots]; the rank of slots beyond it is 0."""
    ranks = np.zeros(len(keys), np.int64)
    for i in range(len(keys)):
        slot = request[keys[i] & NODE_MASK]
        if slot < len(of_slot):
            ranks[i] = of_slot[slot]
    return ranks


@final
class RankedQueue:
    """The ready nodes of one cell type: larger ranks first, and within a rank as in ReadyQueue.

    There is one ReadyQueue for rank 0, and one for each other rank that has ready nodes. nonempty: a set, shared by all
    queues, of the types that have ready nodes. Each queue keeps its own type in it up to date.
    """

    __slots__ = ("_nonempty", "_others", "_priorities", "_type_id", "_usual")

    def __init__(self, priorities: Priorities, type_id: TypeId, nonempty: set[TypeId]) -> None:
        self._priorities = priorities
        self._type_id = type_id
        self._nonempty = nonempty
        self._usual = ReadyQueue()
        self._others: dict[int, ReadyQueue] = {}

    def __len__(self) -> int:
        if not self._others:
            return len(self._usual)
        return len(self._usual) + sum(map(len, self._others.values()))

    @property
    def highest(self) -> int:
        """The highest rank among its nodes. The queue must not be empty."""
        return max(self._ranks())

    @property
    def lowest(self) -> int:
        """The lowest rank among its nodes. The queue must not be empty."""
        return min(self._ranks())

    @property
    def first(self) -> int:
        """The key of the node that has been ready longest, whatever its rank. The queue must not be empty."""
        return min(queue.first for queue in self._in_order() if len(queue))

    def append(self, keys: Keys) -> None:
        """Add the first nodes of subgraphs that are newer than all others. keys: ascending."""
        if len(keys) == 0:
            return
        self._nonempty.add(self._type_id)
        for rank, part in self._priorities.split(keys):
            self._queue(rank).append(part)

    def merge(self, keys: Keys) -> None:
        """Add more nodes of subgraphs that were appended before."""
        if len(keys) == 0:
            return
        self._nonempty.add(self._type_id)
        for rank, part in self._priorities.split(keys):
            self._queue(rank).merge(part)

    def take(
        self, limit: int, allowed: Callable[[Keys], NDArray[np.bool_]] | None = None, *, by_age: bool = False
    ) -> Keys:
        """Remove and return up to `limit` nodes, in order. Nodes for which the mask `allowed(keys)` is False stay.

        by_age: those that have been ready longest, in that order, whatever their ranks.
        """
        if not self._others:
            keys = self._usual.take(limit, allowed)
            if not len(self._usual):
                self._nonempty.discard(self._type_id)
            return keys
        if by_age:
            return self._take_by_age(limit, allowed)
        taken: list[Keys] = []
        for queue in self._in_order():
            taken.append(queue.take(limit, allowed))
            limit -= len(taken[-1])
            if limit == 0:
                break
        self._forget_empty()
        return np.concatenate(taken)

    def _take_by_age(self, limit: int, allowed: Callable[[Keys], NDArray[np.bool_]] | None) -> Keys:
        taken = EMPTY
        queues = [queue for queue in self._in_order() if len(queue)]
        for queue in sorted(queues, key=lambda queue: queue.first):
            if len(taken) == limit and queue.first > taken[-1]:
                break
            taken = np.sort(np.concatenate((taken, queue.take(limit, allowed))))
            taken, more = taken[:limit], taken[limit:]
            self.merge(more)
        self._forget_empty()
        return taken

    def discard(self, unwanted: Callable[[Keys], NDArray[np.bool_]]) -> int:
        """Remove the nodes for which the mask `unwanted(keys)` is True; return their number."""
        count = sum(queue.discard(unwanted) for queue in self._in_order())
        self._forget_empty()
        return count

    def requeue(self) -> None:
        """Move the nodes whose requests have another rank now to the queue of that rank. Looks at all waiting nodes."""
        if not len(self):
            return
        moved = []
        for rank, queue in [*self._others.items(), (0, self._usual)]:
            keys = queue.keys()
            ranks = self._priorities.of(keys)
            elsewhere = np.not_equal(0 if ranks is None else ranks, np.full(len(keys), rank))
            if elsewhere.any():
                moved.append(keys[elsewhere])
                queue.refill(keys[~elsewhere])
        if moved:
            for rank, part in self._priorities.split(np.concatenate(moved)):
                queue = self._queue(rank)
                queue.refill(np.sort(np.concatenate((queue.keys(), part))))
        self._forget_empty()

    def renumber(self) -> None:
        """Update the keys: subgraphs have other sequence numbers in the arena now, in the same order."""
        arena = self._priorities.arena
        for queue in self._in_order():
            queue.renumber(arena.sequence, arena.subgraph)

    def keys(self) -> Keys:
        """Return all keys, in order."""
        return self._usual.keys() if not self._others else np.concatenate([q.keys() for q in self._in_order()])

    def _ranks(self) -> list[int]:
        """Return the ranks that have nodes."""
        return [*self._others, 0] if len(self._usual) else list(self._others)

    def _queue(self, rank: int) -> ReadyQueue:
        if rank == 0:
            return self._usual
        if rank not in self._others:
            self._others[rank] = ReadyQueue()
        return self._others[rank]

    def _in_order(self) -> list[ReadyQueue]:
        ranked = {**self._others, 0: self._usual}
        return [ranked[priority] for priority in sorted(ranked, reverse=True)]

    def _forget_empty(self) -> None:
        for priority in [priority for priority, queue in self._others.items() if not len(queue)]:
            del self._others[priority]
        if not len(self):
            self._nonempty.discard(self._type_id)
