"""Lanes: the dense places that hold the state of running chains on one worker.

A batch in lanes 0 to n-1 is a slice of the lane tables. So a batch whose members do not change copies nothing. If a
chain leaves, the chain in the last lane moves into its lane. A chain that joins takes the next free lane. `find_steps`
gives out the lanes; completion frees them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.layout import END, LANE, LANE_WORKER, NOBODY, NOWHERE, OPEN_ENDED, SUBGRAPH

Rows = NDArray[np.int64]


@compiled
def seat(
    occupant: Rows, nodes: Rows, subgraphs: Rows, worker: int, batch: Rows
) -> tuple[int, bool, Rows, Rows, Rows, Rows]:
    """Give a lane to every chain of a batch. The lanes are 0 to n-1 if no chain outside the batch is in one of them.

    Otherwise every chain keeps its lane, and new chains take free lanes. A chain that ends with this step is no
    occupant afterwards, so its lane is free from the next step on.

    batch: nodes of distinct subgraphs; a single node is a chain of length one. nodes, subgraphs: the tables of the
    arena.

    Returns:

    - How many lanes are needed if there are too few; otherwise 0. If it is not 0, nothing has changed, and the other
      results mean nothing.
    - Whether the lanes are 0 to n-1.
    - [batch] the nodes, ordered by lane if the lanes are 0 to n-1.
    - [batch] their lanes.
    - [batch] the lanes in which their state was before; NOBODY if they had none.
    - [batch] the workers of these earlier lanes.
    """
    count, capacity = len(batch), len(occupant)
    here = np.empty(count, np.int64)  # the lane on this worker, or NOBODY, by index in `batch`
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
