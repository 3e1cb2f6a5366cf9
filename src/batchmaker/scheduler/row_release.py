"""Compiled loops over nodes: freeing their rows, and listing the outputs that go to the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import NOWHERE, ROW, SUBGRAPH, TYPE

Ids = NDArray[np.int64]


@compiled
def vacate(of_nodes: Ids, subgraphs: Ids, num_types: int, nodes: Ids) -> tuple[Ids, Ids]:
    """Take the rows of these nodes away. Each of the nodes has a row.

    Returns the rows [nodes], grouped by the cell type of their node and in the order of the nodes within a type; and
    [types + 1] the index at which the rows of each type begin, with the number of all rows at the end.
    """
    begins = np.zeros(num_types + 1, np.int64)
    for i in range(len(nodes)):
        begins[subgraphs[TYPE, of_nodes[SUBGRAPH, nodes[i]]] + 1] += 1
    for i in range(num_types):
        begins[i + 1] += begins[i]
    rows = np.empty(len(nodes), np.int64)
    place = begins.copy()
    for i in range(len(nodes)):
        node = nodes[i]
        mine = subgraphs[TYPE, of_nodes[SUBGRAPH, node]]
        rows[place[mine]] = of_nodes[ROW, node]
        place[mine] += 1
        of_nodes[ROW, node] = NOWHERE
    return rows, begins


@compiled
def marked(marks: Ids, output: int) -> Ids:
    """Return the positions at which this output goes to the host. marks: [positions] bits of outputs."""
    positions = np.empty(len(marks), np.int64)
    count = 0
    for i in range(len(marks)):
        if marks[i] >> output & 1:
            positions[count] = i
            count += 1
    return positions[:count]
