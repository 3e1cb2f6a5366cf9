"""Nodes that are admitted, and who reads whom among them: compiled loops over all graphs of a turn.

of_nodes, of_subgraphs, source, source_table, consumer: the arena's tables, which the loops change. An edge is a node
that is read and the node that reads it; of a run it counts as one from its last step, for a run is done as a whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled
from batchmaker.scheduler.arena import (
    DONE,
    END,
    EXTERNAL,
    FETCH,
    FIRST_EDGE,
    HELD,
    NOWHERE,
    NUM_EDGES,
    PENDING,
    REQUEST,
    ROW,
    STATE,
    SUBGRAPH,
    TYPE,
    USES,
    WAITING,
)

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


@compiled
def enter(nodes: Ids, lengths: Ids, slots: Ids, of_nodes: Ids) -> None:
    """Give new nodes their first state. nodes: `lengths` of each graph, one graph after the other. slots: [graphs]."""
    at = 0
    for graph in range(len(lengths)):
        for node in nodes[at : at + lengths[graph]]:
            of_nodes[STATE, node] = WAITING
            of_nodes[REQUEST, node] = slots[graph]
            of_nodes[ROW, node] = NOWHERE
            for field in (PENDING, USES, HELD, FETCH, NUM_EDGES):
                of_nodes[field, node] = 0
        at += lengths[graph]


@compiled
def feed(
    read: Ids,
    shifts: Ids,
    outputs: NDArray[np.int16],
    readers: Ids,
    value_tables: Ids,
    fed: Flags,
    of_nodes: Ids,
    of_subgraphs: Ids,
    source: Ids,
    source_table: Ids,
) -> Ids:
    """Write where single nodes find the inputs that other nodes compute; return the edges, [2, edges], port by port.

    read, outputs: [ports, readers] the node of each input, negative where there is none, and which output of it.
    shifts: [readers] what is added to the nodes that a reader reads.
    value_tables: [types, outputs] where those lie. fed: [types, ports], set for each input of a reader's type.
    """
    count = 0
    for port in range(read.shape[0]):
        for i in range(read.shape[1]):
            count += read[port, i] >= 0
    edges = np.empty((2, count), np.int64)
    count = 0
    for port in range(read.shape[0]):
        for i in range(read.shape[1]):
            node = read[port, i]
            if node < 0:
                continue
            node, reader = node + shifts[i], readers[i]
            source[port, reader] = node
            source_table[port, reader] = value_tables[of_subgraphs[TYPE, of_nodes[SUBGRAPH, node]], outputs[port, i]]
            fed[of_subgraphs[TYPE, of_nodes[SUBGRAPH, reader]], port] = True
            edges[0, count], edges[1, count] = node, reader
            count += 1
    return edges


@compiled
def count_edges(
    edges: Ids, nodes: Ids, lengths: Ids, place: Ids, of_nodes: Ids, of_subgraphs: Ids
) -> tuple[Ids, Ids, Ids]:
    """Count uses, unmet inputs and consumers of nodes that are new.

    edges: [2, edges]. nodes: the new ones, `lengths` of each graph, one graph after the other. place: [all nodes] -1,
    and so again afterwards.
    Returns [edges] the place among the new nodes of whom each edge waits for, -1 for a node of an earlier extent;
    [graphs] how many edges lead from nodes of each; and [2, ...] the edges from earlier nodes that are not done.
    """
    num_edges = edges.shape[1]
    producers, waiting = np.empty(num_edges, np.int64), np.empty((2, num_edges), np.int64)
    per_graph, num_waiting = np.zeros(len(lengths), np.int64), 0
    for i in range(len(nodes)):
        place[nodes[i]] = i
    for k in range(num_edges):
        node, reader = edges[0, k], edges[1, k]
        of_nodes[USES, node] += 1
        mine, other = of_nodes[SUBGRAPH, node], of_nodes[SUBGRAPH, reader]
        producer = of_subgraphs[END, mine] - 1 if of_subgraphs[END, mine] > 0 else node
        unmet = of_nodes[STATE, producer] != DONE
        if unmet and mine == other:
            of_nodes[PENDING, reader] += 1
        elif unmet:
            of_subgraphs[EXTERNAL, other] += 1
        producers[k] = place[producer]
        if producers[k] >= 0:
            of_nodes[NUM_EDGES, producer] += 1
        elif unmet:
            waiting[0, num_waiting], waiting[1, num_waiting] = producer, reader
            num_waiting += 1
    begin = 0
    for graph in range(len(lengths)):
        for i in range(begin, begin + lengths[graph]):
            per_graph[graph] += of_nodes[NUM_EDGES, nodes[i]]
            place[nodes[i]] = -1
        begin += lengths[graph]
    return producers, per_graph, waiting[:, :num_waiting]


@compiled
def write_edges(
    edges: Ids, producers: Ids, firsts: Ids, nodes: Ids, lengths: Ids, of_nodes: Ids, consumer: Ids
) -> None:
    """Store the consumers of each new node in the order of the edges; firsts: [graphs] where those of a graph begin.

    The rest is as `count_edges` takes and returns it.
    """
    following, begin = np.empty(len(nodes), np.int64), 0
    for graph in range(len(lengths)):
        at = firsts[graph]
        for i in range(begin, begin + lengths[graph]):
            of_nodes[FIRST_EDGE, nodes[i]] = following[i] = at
            at += of_nodes[NUM_EDGES, nodes[i]]
        begin += lengths[graph]
    for k in range(len(producers)):
        if producers[k] >= 0:
            consumer[following[producers[k]]] = edges[1, k]
            following[producers[k]] += 1
