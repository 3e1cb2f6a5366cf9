"""Counts of the units that wait for others of their own type, in compiled loops over the edges of a graph.

A unit is a single node or a run, under the number of its last node. The scheduler treats it as one. A unit of type a is
in ED-Batch's Frontier(G^a) if no ancestor of its type is left to run. A unit *blocks* type a if it is left and is of
type a, or if it has an ancestor that is. `blocks[u, a]` counts the edges into u from units that block a. So u is in the
frontier of its type while `blocks[u, type of u]` is 0. Every edge is visited at most once for each type, and the memory
is 4 bytes for a node and type. Only units that are left count; ancestors always run first.

Late edges lead to nodes that were added after the unit's consumers had been written. state, stack: by node, as in the
scheduler's arena: below 2 if it is not submitted; scratch.
"""

from __future__ import annotations

from typing import Any, Final

from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled

Array = NDArray[Any]

Graph = tuple[Ints, Ints, Array, Ints, Ints, Ints]
"""The graph, as the scheduler's arena has it: subgraph, end, type_of, first_edge, num_edges, consumer.

By node: subgraph, first_edge, num_edges. By subgraph: end (one past the last node of a run, 0 for single nodes),
type_of. consumer: [edges] nodes that a unit feeds; for a run, one node stands for all of it.
"""

Counters = tuple[Array, Array, Ints]
"""What is left: left, blocks, counts.

left: by node, whether it is a unit that has not run. blocks: [nodes, types] int32. counts: [types] the sizes of the
frontiers.
"""

LateLists = tuple[Ints, Ints, Ints]
"""Lists of late edges, chained: late_first, late_edges, late_free.

late_first: [nodes] a unit's first late edge or -1. late_edges: [2, room] the next late edge of the same unit (-1:
none), and the consumer. late_free: [2] the first unused entry, chained in the same way, and the number of unused
entries.
"""

SUBMITTED: Final = 2  # the first state of nodes that are no longer left


@compiled
def _block(blocks: Array, unit: int, kind: int, after: int) -> None:
    """Count one more edge into `after`, from a unit that is left."""
    for other in range(blocks.shape[1]):
        if other == kind or blocks[unit, other] > 0:
            blocks[after, other] += 1


@compiled
def enter(
    counted: bool,
    bases: Ints,
    sizes: Ints,
    gone: Ints,
    late: Ints,
    state: Array,
    graph: Graph,
    counters: Counters,
    late_lists: LateLists,
) -> int:
    """Count the units of new extents, each after its sources; return the number of units.

    Extent i is the nodes from bases[i] to before bases[i] + sizes[i]. gone: units among them that are not left,
    whatever their state. late: [2, edges] units that may be left, and new nodes that they feed outside their consumers;
    there must be room for these edges. counted: these units were counted before; otherwise they are new.
    """
    subgraph, end, type_of, first_edge, num_edges, consumer = graph
    left, blocks, counts = counters
    late_first, late_edges, late_free = late_lists
    units, num_kinds = 0, blocks.shape[1]
    for i in range(len(bases)):
        for node in range(bases[i], bases[i] + sizes[i]):
            last = end[subgraph[node]]
            left[node] = last in (0, node + 1) and state[node] < SUBMITTED
            late_first[node] = -1
            for kind in range(num_kinds):
                blocks[node, kind] = 0
    for unit in gone:
        left[unit] = False
    for i in range(late.shape[1]):
        unit = late[0, i]
        if left[unit]:
            edge = late_free[0]
            late_free[0] = late_edges[0, edge]
            late_free[1] -= 1
            late_edges[0, edge] = late_first[unit]
            last = end[subgraph[late[1, i]]]
            late_edges[1, edge] = late[1, i] if last == 0 else last - 1
            late_first[unit] = edge
            if counted:
                _block(blocks, unit, type_of[subgraph[unit]], late_edges[1, edge])
    for i in range(len(bases)):
        for unit in range(bases[i], bases[i] + sizes[i]):
            if not left[unit]:
                continue
            units += 1
            kind = type_of[subgraph[unit]]
            counts[kind] += blocks[unit, kind] == 0
            for edge in range(first_edge[unit], first_edge[unit] + num_edges[unit]):
                after = consumer[edge]
                last = end[subgraph[after]]
                if last > 0:
                    after = last - 1
                for other in range(num_kinds):  # one more edge into `after` from a unit that is left
                    if other == kind or blocks[unit, other] > 0:
                        blocks[after, other] += 1
            edge = late_first[unit]
            while edge >= 0:
                _block(blocks, unit, kind, late_edges[1, edge])
                edge = late_edges[0, edge]
    return units


@compiled
def run(
    nodes: Ints,
    kind: int,
    stack: Ints,
    graph: Graph,
    counters: Counters,
    late_lists: LateLists,
) -> int:
    """Remove units of one type from the units that are left; return how many were left.

    nodes: the last node of each unit. Each unit must be in its type's frontier.
    """
    subgraph, end, type_of, first_edge, num_edges, consumer = graph
    left, blocks, counts = counters
    late_first, late_edges, late_free = late_lists
    units = 0
    for node in nodes:
        if not left[node]:
            continue
        units += 1
        left[node] = False
        counts[kind] -= 1
        depth = 1
        stack[0] = node
        while depth > 0:
            depth -= 1
            unit = stack[depth]
            edge, last_edge, late = first_edge[unit], first_edge[unit] + num_edges[unit], late_first[unit]
            while edge < last_edge or late >= 0:
                if edge < last_edge:
                    after = consumer[edge]
                    edge += 1
                    last = end[subgraph[after]]
                    if last > 0:
                        after = last - 1
                else:
                    after = late_edges[1, late]
                    late = late_edges[0, late]
                blocks[after, kind] -= 1
                if blocks[after, kind] == 0:  # it no longer waits for this type
                    if type_of[subgraph[after]] == kind:
                        counts[kind] += left[after]
                    else:
                        stack[depth] = after
                        depth += 1
        if late_first[node] >= 0:
            _forget_late(node, late_first, late_edges, late_free)
    return units


@compiled
def _forget_late(unit: int, late_first: Ints, late_edges: Ints, late_free: Ints) -> None:
    edge = late_first[unit]
    late_first[unit] = -1
    while edge >= 0:
        following = late_edges[0, edge]
        late_edges[0, edge] = late_free[0]
        late_free[0] = edge
        late_free[1] += 1
        edge = following


@compiled
def withdraw(
    bases: Ints,
    sizes: Ints,
    graph: Graph,
    counters: Counters,
    late_lists: LateLists,
) -> int:
    """Remove all units of these extents, and with them their consumers; return how many were left."""
    subgraph, _, type_of, _, _, _ = graph
    left, blocks, counts = counters
    late_first, late_edges, late_free = late_lists
    units = 0
    for i in range(len(bases)):
        for unit in range(bases[i], bases[i] + sizes[i]):
            if left[unit]:
                units += 1
                left[unit] = False
                kind = type_of[subgraph[unit]]
                counts[kind] -= blocks[unit, kind] == 0
                _forget_late(unit, late_first, late_edges, late_free)
    return units
