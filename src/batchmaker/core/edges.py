"""Compiled loops of admission: first values of new nodes, and the edges between nodes, for all graphs of a turn.

of_nodes, of_subgraphs, source, source_table and consumer are the tables of the arena; the loops change them.

An edge is a pair of a node that is read and the node that reads it. If the first belongs to a run, the edge counts as
one from the last step of the run, because a run is done as a whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Flags, Ints
from batchmaker.compiled import compiled
from batchmaker.core.layout import (
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


@compiled
def enter(nodes: Ints, lengths: Ints, slots: Ints, of_nodes: Ints) -> None:
    """Write the first values of new nodes.

    nodes: those of all graphs, one graph after the other. lengths: [graphs] nodes of each. slots: [graphs].
    """
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
    read: Ints,
    shifts: Ints,
    outputs: NDArray[np.int16],
    readers: Ints,
    value_tables: Ints,
    fed: Flags,
    of_nodes: Ints,
    of_subgraphs: Ints,
    source: Ints,
    source_table: Ints,
) -> Ints:
    """Write the sources of single nodes that read other nodes; return the edges [2, edges], port by port.

    - read, outputs: [ports, readers] the node that feeds each input, and the number of its output. Negative if no node
      feeds it.
    - shifts: [readers] what to add to `read` to get a node number.
    - readers: [readers] the nodes that read.
    - value_tables: [types, outputs] the table of each output.
    - fed: [types, ports] set to True for each type and input that a node feeds.
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
def follows(of_subgraphs: Ints, mine: int, other: int, own_type_follows: bool) -> bool:
    """Whether nodes of subgraph `other` wait for those of `mine` that they read only until these are submitted.

    That is so within a subgraph. own_type_follows: of two single nodes of one type, too; else they wait until these are
    done.
    """
    if mine == other:
        return True
    single = of_subgraphs[END, mine] == 0 and of_subgraphs[END, other] == 0
    return own_type_follows and single and of_subgraphs[TYPE, mine] == of_subgraphs[TYPE, other]


@compiled
def count_edges(
    edges: Ints, nodes: Ints, lengths: Ints, place: Ints, of_nodes: Ints, of_subgraphs: Ints, own_type_follows: bool
) -> tuple[Ints, Ints, Ints]:
    """Count the uses, unmet inputs and consumers of new nodes.

    - edges: [2, edges].
    - nodes: the new nodes of all graphs, one graph after the other. lengths: [graphs] nodes of each.
    - place: [all nodes] scratch; all -1 before and after the call.
    - own_type_follows: see `follows`.

    Returns:

    - [edges] the place, among the new nodes, of the node whose completion the edge waits for; -1 for a node of an
      earlier extent.
    - [graphs] the number of edges from the nodes of each graph.
    - [2, waiting] edges from nodes of earlier extents that are not done.
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
        if unmet and place[producer] >= 0 and follows(of_subgraphs, mine, other, own_type_follows):
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
    edges: Ints, producers: Ints, firsts: Ints, nodes: Ints, lengths: Ints, of_nodes: Ints, consumer: Ints
) -> None:
    """Store the consumers of each new node, in the order of the edges.

    firsts: [graphs] the first edge number of each graph. For the others see `count_edges`.
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
