"""The queue of ready nodes of one cell type and rank, in the order in which their subgraphs were released."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled

Keys = NDArray[np.int64]
"""Ready nodes as sortable numbers: the sequence number of the subgraph, then the 36 bits of the node number."""

NODE_BITS = 36
NODE_MASK = (1 << NODE_BITS) - 1
EMPTY: Keys = np.empty(0, np.int64)

SEQUENCE_LIMIT: Final = 1 << 62 - NODE_BITS
"""Sequence numbers are below this: half of what fits above the bits of a node. See `SchedulerState.places`."""


def nodes_of(keys: Keys) -> NDArray[np.int64]:
    """Return the node numbers in keys."""
    return keys & NODE_MASK


@final
class ReadyQueue:
    """Ready nodes, sorted by subgraph and then by node. New subgraphs are only added at the end.

    It has two parts. `front` is one small sorted array; nodes of subgraphs that already run are merged into it. `back`
    is a queue of arrays, in order, with the nodes of newer subgraphs. A batch is taken from the front, and the front is
    refilled from the back. So the cost of a batch depends on its size, not on the number of waiting nodes.
    """

    __slots__ = ("_back", "_back_size", "_front")

    def __init__(self) -> None:
        self._front: Keys = EMPTY
        self._back: deque[Keys] = deque()
        self._back_size = 0

    def __len__(self) -> int:
        return len(self._front) + self._back_size

    @property
    def first(self) -> int:
        """The smallest key. The queue must not be empty."""
        return int(self._front[0] if len(self._front) else self._back[0][0])

    def append(self, keys: Keys) -> None:
        """Add the first nodes of subgraphs that are newer than all others. keys: ascending."""
        if len(keys):
            self._back.append(keys)
            self._back_size += len(keys)

    def merge(self, keys: Keys) -> None:
        """Add more nodes of subgraphs that were appended before. keys: in any order; may be changed."""
        if len(keys) == 0:
            return
        if len(self._front):
            keys = np.concatenate((keys, self._front))
        keys.sort(kind="stable")
        self._front = keys
        if self._back and keys[-1] > self._back[0][0]:  # their request has changed its rank
            self.refill(np.sort(self.keys()))

    def refill(self, keys: Keys) -> None:
        """Replace the contents by these nodes. keys: ascending."""
        self._front = keys
        self._back.clear()
        self._back_size = 0

    def renumber(self, sequence: NDArray[np.int64], subgraph: NDArray[np.int64]) -> None:
        """Update the keys: subgraphs have other sequence numbers now, in the same order.

        sequence: [subgraphs]. subgraph: [nodes].
        """
        self._front = _renumbered(self._front, sequence, subgraph)
        self._back = deque(_renumbered(keys, sequence, subgraph) for keys in self._back)

    def take(self, limit: int, allowed: Callable[[Keys], NDArray[np.bool_]] | None = None) -> Keys:
        """Remove and return up to `limit` nodes, in order. Nodes for which the mask `allowed(keys)` is False stay."""
        self._refill(limit)
        if allowed is None:
            taken, self._front = self._front[:limit], self._front[limit:]
            return taken
        taken, rest = _split(self._front, allowed(self._front), limit)
        while len(taken) < limit and self._back:
            self._refill(2 * len(self._front) + limit)
            taken, rest = _split(self._front, allowed(self._front), limit)
        self._front = rest
        return taken

    def discard(self, unwanted: Callable[[Keys], NDArray[np.bool_]]) -> int:
        """Remove the nodes for which the mask `unwanted(keys)` is True; return their number."""
        before = len(self)
        self._front = self._front[~unwanted(self._front)]
        kept = [keys[~unwanted(keys)] for keys in self._back]
        self._back = deque(keys for keys in kept if len(keys))
        self._back_size = sum(len(keys) for keys in self._back)
        return before - len(self)

    def keys(self) -> Keys:
        """Return all keys, in order."""
        return np.concatenate((self._front, *self._back)) if self._back else self._front

    def _refill(self, size: int) -> None:
        """Move arrays from the back to the front until the front has at least `size` nodes, if there are so many."""
        if len(self._front) >= size or not self._back:
            return
        parts = [self._front]
        total = len(self._front)
        while self._back and total < size:
            part = self._back.popleft()
            if total + len(part) > 2 * size:
                last = part[size - total - 1] >> NODE_BITS
                cut = int(np.searchsorted(part, (last + 1) << NODE_BITS))  # all nodes of a subgraph go together
                if cut < len(part):
                    self._back.appendleft(part[cut:])
                part = part[:cut]
            self._back_size -= len(part)
            total += len(part)
            parts.append(part)
        self._front = np.concatenate(parts)


@compiled
def _split(keys: Keys, mask: NDArray[np.bool_], limit: int) -> tuple[Keys, Keys]:
    """Return the first `limit` keys whose mask is True, and all other keys; both in order."""
    taken = np.empty(min(limit, len(keys)), np.int64)
    rest = np.empty(len(keys), np.int64)
    num_taken = num_left = 0
    for i in range(len(keys)):
        if mask[i] and num_taken < limit:
            taken[num_taken] = keys[i]
            num_taken += 1
        else:
            rest[num_left] = keys[i]
            num_left += 1
    return taken[:num_taken], rest[:num_left]


@compiled
def _renumbered(keys: Keys, sequence: NDArray[np.int64], subgraph: NDArray[np.int64]) -> Keys:
    """Return the keys of the same nodes with the present sequence numbers of their subgraphs."""
    found = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        node = keys[i] & NODE_MASK
        found[i] = (sequence[subgraph[node]] << NODE_BITS) | node
    return found
