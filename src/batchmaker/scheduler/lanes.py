"""Lanes: the dense places in which running chains keep their state on one worker.

A batch that fills lanes 0 to n-1 is a slice of the state tables, so an unchanged batch copies nothing. When a chain
leaves, the chain in the last lane moves into the hole; one that joins takes the next free lane.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import END, LANE, LANE_WORKER, NOWHERE, OPEN_ENDED, SUBGRAPH
from batchmaker.scheduler.commands import Rows

NOBODY = -1


@final
class LaneMap:
    """Who sits in which lane of one cell type on one worker. Occupants are subgraph numbers.

    num_reserved: rows that the lane tables have.
    """

    __slots__ = ("num_reserved", "occupant")

    def __init__(self) -> None:
        self.num_reserved = 0
        self.occupant: NDArray[np.int64] = np.full(64, NOBODY, np.int64)

    @property
    def capacity(self) -> int:
        return len(self.occupant)

    def leave(self, lanes: Rows) -> None:
        """Empty these lanes: their chains have ended or gone to another worker."""
        self.occupant[lanes] = NOBODY

    def grow(self, capacity: int) -> None:
        """Have at least so many lanes, and at least twice those of before."""
        capacity = max(capacity, 2 * self.capacity)
        grown = np.full(capacity, NOBODY, np.int64)
        grown[: self.capacity] = self.occupant
        self.occupant = grown


@compiled
def seat(
    occupant: Rows, nodes: Rows, subgraphs: Rows, worker: int, batch: Rows
) -> tuple[int, bool, Rows, Rows, Rows, Rows]:
    """Give every chain of a batch a lane, dense from 0 where chains outside the batch do not sit in the way.

    batch: nodes of distinct subgraphs; a single node is a chain of one. nodes, subgraphs: the arena's tables. Where
    others are in the way everybody stays, and newcomers take free lanes. Chains that end with this step have left their
    lanes, which are free from the next step on.
    Returns how many lanes there must be, if there are not enough; then nothing is changed and the rest means nothing.
    Else 0; whether the lanes are 0 to n-1; and, [batch] each: the nodes, in order of lane where they are; their lanes;
    the lanes where their state lies until now, NOBODY if they have none yet; and the workers whose lanes these are.
    """
    count, capacity = len(batch), len(occupant)
    here = np.empty(count, np.int64)  # the lane of each on this worker, by its place in `batch`
    taken = np.zeros(count, np.bool_)
    num_seated = 0
    for i in range(count):
        mine = nodes[SUBGRAPH, batch[i]]
        here[i] = subgraphs[LANE, mine] if subgraphs[LANE_WORKER, mine] == worker else NOBODY
        num_seated += here[i] != NOBODY
        if 0 <= here[i] < count:
            taken[here[i]] = True
    is_dense = count <= capacity
    for k in range(min(count, capacity)):
        is_dense &= taken[k] or occupant[k] == NOBODY
    lanes, ordered = np.empty(count, np.int64), np.empty(count, np.int64)
    before, home = np.empty(count, np.int64), np.empty(count, np.int64)
    new = np.empty(count, np.int64)
    next_free = 0
    for i in range(count):
        new[i] = here[i]
        if here[i] == NOBODY or (is_dense and here[i] >= count):
            while next_free < capacity and (taken[next_free] if is_dense else occupant[next_free] != NOBODY):
                next_free += 1
            if next_free == capacity:
                return capacity + count - num_seated, False, ordered, lanes, before, home
            new[i] = next_free
            next_free += 1
    for i in range(count):
        mine = nodes[SUBGRAPH, batch[i]]
        position = new[i] if is_dense else i
        ordered[position], lanes[position] = batch[i], new[i]
        before[position] = subgraphs[LANE, mine] if subgraphs[LANE_WORKER, mine] != NOWHERE else NOBODY
        home[position] = subgraphs[LANE_WORKER, mine]
        if here[i] != NOBODY and here[i] != new[i]:
            occupant[here[i]] = NOBODY
    for i in range(count):
        node, lane = ordered[i], lanes[i]
        mine = nodes[SUBGRAPH, node]
        if not subgraphs[OPEN_ENDED, mine] and (subgraphs[END, mine] == 0 or node + 1 == subgraphs[END, mine]):
            occupant[lane], subgraphs[LANE, mine], subgraphs[LANE_WORKER, mine] = NOBODY, NOWHERE, NOWHERE
        else:
            occupant[lane], subgraphs[LANE, mine], subgraphs[LANE_WORKER, mine] = mine, lane, worker
    return 0, is_dense, ordered, lanes, before, home
