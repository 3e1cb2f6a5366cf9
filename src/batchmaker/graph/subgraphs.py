"""Splitting a cell graph into subgraphs: connected nodes of one type (BatchMaker section 4.3).

A run is a subgraph of its own. Single nodes belong together when they have the same type and an edge connects them,
unless that could make two subgraphs wait for each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph, Run


def split(graph: CellGraph, *, node_by_node: bool = False) -> tuple[NDArray[np.int32], int]:
    """Number the subgraphs of a graph. node_by_node: no single nodes are joined.

    Returns (subgraph of each of the graph's nodes [num_nodes], number of subgraphs). Numbers start at 0 and follow
    the order of each subgraph's first node.
    """
    if len(graph.blocks) == 0:
        return _runs_only(graph)
    root = np.arange(graph.num_nodes, dtype=np.int32)
    for run in graph.runs:
        root[run.first - graph.first : run.first - graph.first + run.length] = run.first - graph.first
    if node_by_node:
        pass
    elif _needs_union(graph):
        _union_edges(graph, root)
    else:
        for block in graph.blocks:
            if block.connected:
                root[block.first - graph.first : block.first - graph.first + block.count] = block.first - graph.first
    roots, numbers = np.unique(root, return_inverse=True)
    return numbers.astype(np.int32), len(roots)


def _runs_only(graph: CellGraph) -> tuple[NDArray[np.int32], int]:
    lengths = [run.length for run in graph.runs]
    return np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), len(lengths)


def _needs_union(graph: CellGraph) -> bool:
    """Whether an edge joins nodes of one type in a way that no block has already declared."""
    declared = [block for block in graph.blocks if block.connected]
    if len(declared) != len({int(block.types[0]) for block in declared}):
        return True
    connected_types = {int(block.types[0]) for block in declared}
    types = _types(graph)
    for block in graph.blocks:
        if block.connected:
            continue
        if connected_types and not connected_types.isdisjoint(block.types.tolist()):
            return True
        local = block.sources - graph.first
        inside = local >= 0
        if np.any(types[np.where(inside, local, 0)][inside] == np.broadcast_to(block.types, local.shape)[inside]):
            return True
    return False


def _types(graph: CellGraph) -> NDArray[np.int16]:
    """Cell type per node; runs hold -1, since they never join another subgraph."""
    types = np.full(graph.num_nodes, -1, np.int16)
    for block in graph.blocks:
        types[block.first - graph.first : block.first - graph.first + block.count] = block.types
    return types


def _union_edges(graph: CellGraph, root: NDArray[np.int32]) -> None:
    """Join the ends of edges between single nodes of one type; `root` becomes each node's smallest relative.

    An edge joins only nodes of one level, the number of changes of subgraph on the longest way to the node. Every other
    edge leads to a higher level, so no two subgraphs wait for each other (a -> b -> c with a -> c, where a and c are of
    one type and b of another, is three subgraphs).
    """
    types = _types(graph).tolist()
    parent = root.tolist()
    level = _levels(graph, types)

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for block in graph.blocks:
        local = (block.sources - graph.first).tolist()
        for port in local:
            for position, source in enumerate(port):
                node = block.first - graph.first + position
                if source >= 0 and types[source] == types[node] and level[source] == level[node]:
                    a, b = find(source), find(node)
                    parent[max(a, b)] = min(a, b)
    for node in range(graph.num_nodes):
        if types[node] >= 0:
            root[node] = find(node)


def _levels(graph: CellGraph, types: list[int]) -> list[int]:
    """Level of each node; types: per node, -1 in runs. All steps of a run have the level of the run."""
    level = [0] * graph.num_nodes
    for part in graph.parts:
        first = part.first - graph.first
        if isinstance(part, Run):
            columns = [column[0] for column in part.sequences if column is not None]
            init = np.array([source for source, _ in part.init], np.int64)
            sources = (np.concatenate([*columns, init]) - graph.first).tolist()
            height = max((level[source] + 1 for source in sources if source >= 0), default=0)
            level[first : first + part.length] = [height] * part.length
            continue
        for port in (part.sources - graph.first).T.tolist():
            inside = [source for source in port if source >= 0]
            level[first] = max((level[s] + (types[s] != types[first]) for s in inside), default=0)
            first += 1
    return level
