"""Where the rows of a step come from and where they go to: compiled loops over its rows.

Arrays that belong to the arena or the tables are named as there; all numbers are int64. Arrays that are returned are
fresh.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import NOWHERE, NodeArrays
from batchmaker.scheduler.commands import ZERO_TABLE

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@compiled
def find_input(nodes: NodeArrays, is_host: Flags, port: int, node: int) -> tuple[int, int]:
    """Return the table and the row in which a node finds one input. is_host: [tables]."""
    table = nodes.source_table[port, node]
    own = table == ZERO_TABLE or is_host[table]
    return table, node if own else nodes.row[nodes.source[port, node]]


@compiled
def take_over(nodes: NodeArrays, is_host: Flags, value_ports: Ids, first_table: int, end_table: int, node: int) -> bool:
    """Let a node have the row of its first child, where nobody else reads that and its row is of the same pool.

    value_ports: ascending. first_table, end_table: the tables of the pool. Returns whether it has; then the child has
    no row any more.
    """
    if len(value_ports) == 0:
        return False
    child, table = nodes.source[value_ports[0], node], nodes.source_table[value_ports[0], node]
    if not first_table <= table < end_table or nodes.held[child]:
        return False
    mine = 0
    for port in value_ports:
        mine += nodes.source[port, node] == child and not is_host[nodes.source_table[port, node]]
    if nodes.uses[child] != mine:
        return False
    nodes.row[node] = nodes.row[child]
    nodes.row[child] = NOWHERE
    return True


@compiled
def vacate(row: Ids, subgraph: Ids, type_id: NDArray[np.int16], num_types: int, nodes: Ids) -> tuple[Ids, Ids]:
    """These nodes, each of which has a row, have none any more.

    row, subgraph: [nodes]. type_id: [subgraphs], the arena's `type`.
    Returns their rows by the type of the node, in their order within it; [types + 1] where each type's begin, and how
    many they are.
    """
    begins = np.zeros(num_types + 1, np.int64)
    for node in nodes:
        begins[type_id[subgraph[node]] + 1] += 1
    for i in range(num_types):
        begins[i + 1] += begins[i]
    rows = np.empty(len(nodes), np.int64)
    place = begins.copy()
    for node in nodes:
        mine = type_id[subgraph[node]]
        rows[place[mine]] = row[node]
        place[mine] += 1
        row[node] = NOWHERE
    return rows, begins


@compiled
def marked(marks: Ids, output: int) -> Ids:
    """Return the positions at which this output goes to the host. marks: [positions]."""
    positions = np.empty(len(marks), np.int64)
    count = 0
    for i in range(len(marks)):
        if marks[i] >> output & 1:
            positions[count] = i
            count += 1
    return positions[:count]
