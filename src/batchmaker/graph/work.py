"""The work of a cell graph by cell type, for policies and predictors."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled, int64s
from batchmaker.graph.cell_graph import CellGraph, Run, Work


def work_of(graph: CellGraph) -> Work:
    """Return the work of a graph or of an extension. Computed once per graph."""
    if graph.known_work is None:
        graph.known_work = _count(graph)
    return graph.known_work


def _count(graph: CellGraph) -> Work:
    counts: dict[int, int] = defaultdict(int)
    for run in graph.runs:
        counts[int(run.type_id)] += run.length
    for block in graph.blocks:
        for type_id, count in enumerate(np.bincount(block.types).tolist()):
            if count:
                counts[type_id] += count
    types = sorted(counts)
    nodes = np.array([counts[type_id] for type_id in types], np.int64)
    if len(graph.parts) == len(types) and all(isinstance(part, Run) for part in graph.parts):
        steps = nodes  # one chain of each type
    elif int(nodes.sum()) == len(types):
        steps = nodes  # one node of each type
    else:
        steps = _longest_paths(graph, types)
    return Work(np.array(types, np.int64), nodes, steps)


def _longest_paths(graph: CellGraph, types: list[int]) -> NDArray[np.int64]:
    """Return, per type, the largest number of its nodes on any path. One pass over the nodes in their order."""
    depth = np.zeros((graph.num_nodes, len(types)), np.int64)
    for part in graph.parts:
        at = part.first - graph.first
        if isinstance(part, Run):
            init = [source - graph.first for source, _ in part.init if source >= graph.first]
            sequences = [nodes[0] - graph.first for nodes in part.sequences if nodes is not None]
            fed = np.concatenate([np.array(init, np.int64), *sequences])
            fed = fed[fed >= 0]
            depth[at : at + part.length] = depth[fed].max(axis=0) if len(fed) else 0
            depth[at : at + part.length, types.index(part.type_id)] += np.arange(1, part.length + 1)
        else:
            columns = np.searchsorted(types, part.types)
            _count_paths(int64s(part.sources), int64s(columns), at, graph.first, depth)
    longest: NDArray[np.int64] = depth.max(axis=0)
    return longest


@compiled
def _count_paths(
    sources: NDArray[np.int64], columns: NDArray[np.int64], at: int, first: int, depth: NDArray[np.int64]
) -> None:
    """Write the rows of a block's nodes: nodes of each type on the longest path that ends there, themselves included.

    sources: [inputs, count] see NodeBlock. columns: [count] each node's column of `depth`. at: the block's first row.
    first: the number of the graph's first node; earlier ones do not count.
    """
    for i in range(len(columns)):
        for k in range(sources.shape[0]):
            source = sources[k, i] - first
            if source >= 0:
                for column in range(depth.shape[1]):
                    depth[at + i, column] = max(depth[at + i, column], depth[source, column])
        depth[at + i, columns[i]] += 1
