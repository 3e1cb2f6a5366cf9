"""Compiled loops over nodes: letting go of them, freeing their rows, and listing the outputs that go to the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.layout import (
    DONE,
    END,
    HELD,
    NOWHERE,
    NUM_FREE,
    POOL,
    ROW,
    ROWS_BEGIN,
    STATE,
    SUBGRAPH,
    TYPE,
    USES,
)

Ids = NDArray[np.int64]


@compiled
def free_rows(of_nodes: Ids, of_subgraphs: Ids, types: Ids, pools: Ids, rows: Ids, nodes: Ids) -> None:
    """Give the rows of these nodes back to their pools: by cell type, and in the order of the nodes within a type.

    The nodes are distinct, and each has a row. rows: State.free_rows.
    """
    if len(nodes) == 0:
        return
    first = of_subgraphs[TYPE, of_nodes[SUBGRAPH, nodes[0]]]
    most = first
    for node in nodes:
        type_id = of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]]
        first, most = min(first, type_id), max(most, type_id)
    for type_id in range(first, most + 1):
        pool = types[POOL, type_id]
        for node in nodes:
            if of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]] == type_id:
                rows[pools[ROWS_BEGIN, pool] + pools[NUM_FREE, pool]] = of_nodes[ROW, node]
                pools[NUM_FREE, pool] += 1
                of_nodes[ROW, node] = NOWHERE


@compiled
def let_go(places: Ids, of_nodes: Ids, of_subgraphs: Ids) -> tuple[Ids, Ids, Ids]:
    """Hold these nodes no longer, but for those on a worker and those in a run that goes on.

    places: [extents, 2] first node, and number of nodes. Returns the nodes whose rows nobody needs any more; the nodes
    that stay held, and for each of these the node whose end it waits for.
    """
    count = 0
    for k in range(len(places)):
        count += places[k, 1]
    unused, held, ends = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    num_unused, num_held = 0, 0
    for k in range(len(places)):
        for node in range(places[k, 0], places[k, 0] + places[k, 1]):
            end = of_subgraphs[END, of_nodes[SUBGRAPH, node]]
            tail = end - 1 if end > 0 else node
            has_row, is_done = of_nodes[ROW, node] != NOWHERE, of_nodes[STATE, tail] == DONE
            if has_row and not is_done and of_nodes[HELD, node] > 0:
                held[num_held], ends[num_held] = node, tail
                num_held += 1
                continue
            of_nodes[HELD, node] = 0
            if has_row and is_done and of_nodes[USES, node] == 0:
                unused[num_unused] = node
                num_unused += 1
    return unused[:num_unused], held[:num_held], ends[:num_held]


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
