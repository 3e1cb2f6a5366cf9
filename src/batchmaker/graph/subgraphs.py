"""Splitting a cell graph into subgraphs: connected nodes of one type (BatchMaker section 4.3).

A run is a subgraph of its own. Single nodes belong together when they have the same type and an edge connects them,
unless that could make two subgraphs wait for each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.graph.cell_graph import CellGraph, Run

Roots = NDArray[np.int32]
Types = NDArray[np.int16]


def split(graph: CellGraph, *, node_by_node: bool = False) -> tuple[NDArray[np.int32], int]:
    """Number the subgraphs of a graph. node_by_node: single nodes are never joined.

    Returns (subgraph of each of the graph's nodes [num_nodes], number of subgraphs). Numbers start at 0 and follow the
    order of each subgraph's first node.
    """
    if len(graph.blocks) == 0:
        return _runs_only(graph)
    root = np.arange(graph.num_nodes, dtype=np.int32)
    for run in graph.runs:
        root[run.first - graph.first : run.first - graph.first + run.length] = run.first - graph.first
    if not node_by_node:
        types = _types(graph)
        if _needs_union(graph, types):
            _union_edges(graph, types, root)
        else:
            for block in graph.blocks:
                if block.connected:
                    root[block.first - graph.first : block.first - graph.first + block.count] = (
                        block.first - graph.first
                    )
    return root, _number(root)


def _runs_only(graph: CellGraph) -> tuple[NDArray[np.int32], int]:
    lengths = [run.length for run in graph.runs]
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), len(lengths)


def _needs_union(graph: CellGraph, types: Types) -> bool:
    """Whether an edge joins nodes of one type outside blocks declared as connected. types: as from `_types`."""
    connected_types = {int(block.types[0]) for block in graph.blocks if block.connected}
    if len(connected_types) != sum([block.connected for block in graph.blocks]):
        return True
    for block in graph.blocks:
        if block.connected:
            continue
        if connected_types and not connected_types.isdisjoint(block.types.tolist()):
            return True
        if _joins_alike(block.first - graph.first, graph.first, block.sources, types):
            return True
    return False


def _types(graph: CellGraph) -> Types:
    """Cell type per node; runs hold -1, since they never join another subgraph."""
    types = np.full(graph.num_nodes, -1, np.int16)
    for block in graph.blocks:
        types[block.first - graph.first : block.first - graph.first + block.count] = block.types
    return types


def _union_edges(graph: CellGraph, types: Types, root: Roots) -> None:
    """Join the ends of edges between single nodes of one type; `root` becomes the smallest node of each group.

    An edge joins only nodes of one level. The level of a node is the number of changes of subgraph on the longest path
    to it. Every other edge leads to a higher level, so no two subgraphs wait for each other. Example: a -> b -> c with
    a -> c, where a and c are of one type and b of another, is three subgraphs.
    """
    level = _levels(graph, types)
    for block in graph.blocks:
        _join(block.first - graph.first, graph.first, block.sources, types, level, root)


def _levels(graph: CellGraph, types: Types) -> Roots:
    """Level of each node; types: per node, -1 in runs. All steps of a run have the level of the run."""
    level = np.zeros(graph.num_nodes, np.int32)
    starts, read = graph.memory_edges()
    for part in graph.parts:
        first = part.first - graph.first
        if isinstance(part, Run):
            columns = [column[0] for column in part.sequences if column is not None]
            init = np.array([source for source, _ in part.init], np.int64)
            sources = np.concatenate([*columns, init, read[starts[first] : starts[first + 1]]]) - graph.first
            sources = sources[sources >= 0]
            level[first : first + part.length] = level[sources].max() + 1 if len(sources) else 0
        else:
            _raise_levels(first, graph.first, part.sources, types, starts, read, level)
    return level


@compiled
def _joins_alike(first: int, shift: int, sources: Ints, types: Types) -> bool:
    """Whether an edge within a graph leads to a node of a block from a node of its type.

    first: the block's first node in the graph. sources: [inputs, nodes of the block]; they are in the graph from
    `shift` on. types: by node of the graph.
    """
    for k in range(sources.shape[0]):
        for i in range(sources.shape[1]):
            source = sources[k, i] - shift
            if source >= 0 and types[source] == types[first + i]:
                return True
    return False


@compiled
def _raise_levels(first: int, shift: int, sources: Ints, types: Types, starts: Ints, read: Ints, level: Roots) -> None:
    """Write the levels of a block's nodes. A node is never joined with one of its memories.

    level: by node of the graph. starts, read: see CellGraph.memory_edges. The rest is as for `_joins_alike`.
    """
    for i in range(sources.shape[1]):
        highest = 0
        for k in range(sources.shape[0]):
            source = sources[k, i] - shift
            if source >= 0:
                highest = max(highest, level[source] + (types[source] != types[first + i]))
        for k in range(starts[first + i], starts[first + i + 1]):
            source = read[k] - shift
            if source >= 0:
                highest = max(highest, level[source] + 1)
        level[first + i] = highest


@compiled
def _join(first: int, shift: int, sources: Ints, types: Types, level: Roots, root: Roots) -> None:
    """Join nodes of a block with sources of their type and level.

    root: by node, a smaller node of the group or the node.
    """
    for i in range(sources.shape[1]):
        node = first + i
        for k in range(sources.shape[0]):
            source = sources[k, i] - shift
            if source >= 0 and types[source] == types[node] and level[source] == level[node]:
                a, b = _smallest(source, root), _smallest(node, root)
                root[max(a, b)] = min(a, b)


@compiled
def _number(root: Roots) -> int:
    """Replace each node's group by the number of the group; return the number of groups.

    root: [nodes] a smaller node of the group, or the node itself. Numbers follow the order of the smallest nodes.
    """
    count = 0
    for node in range(len(root)):
        relative = root[node]
        if relative == node:
            root[node] = count
            count += 1
        else:
            root[node] = root[relative]  # smaller, so its number is known
    return count


@compiled
def _smallest(node: int, root: Roots) -> int:
    while root[node] != node:
        root[node] = root[root[node]]
        node = root[node]
    return node
