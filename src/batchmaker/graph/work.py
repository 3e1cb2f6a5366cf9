"""The work of a cell graph by cell type, for policies and predictors."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from batchmaker.compiled import compiled, int64s
from batchmaker.graph.cell_graph import CellGraph, Run, Work

_NO_TYPE: Final = 1 << 15  # above every type id


def work_of(graph: CellGraph) -> Work:
    """Return the work of a graph or of an extension. Computed once per graph."""
    if graph.known_work is None:
        graph.known_work = _count(graph)
    return graph.known_work


@cache
def _of_one_node(type_id: int) -> Work:
    one = np.ones(1, np.int64)
    return Work(np.array([type_id], np.int64), one, one)


def _count(graph: CellGraph) -> Work:
    if graph.num_nodes == 1 and graph.blocks:  # what a function that waits adds each time
        return _of_one_node(int(graph.blocks[0].types[0]))
    kinds = {int(run.type_id) for run in graph.runs}
    if not graph.blocks and len(kinds) == len(graph.runs):  # one chain of each type
        chains = sorted(graph.runs, key=lambda run: run.type_id)
        nodes = np.array([run.length for run in chains], np.int64)
        return Work(np.array([run.type_id for run in chains], np.int64), nodes, nodes)
    low, high = min(kinds, default=_NO_TYPE), max(kinds, default=-1)
    for block in graph.blocks:
        low, high = _stretch(block.types, low, high)
    low = min(low, high + 1)
    depth = np.zeros((graph.num_nodes, high + 1 - low), np.int64)
    counts = np.zeros((2, high + 1 - low), np.int64)  # nodes, and the longest path
    starts, read = graph.memory_edges()
    for part in graph.parts:
        at = part.first - graph.first
        if isinstance(part, Run):
            _add_run(part, at, graph.first, low, depth, read[starts[at] : starts[at + 1]])
            counts[0, part.type_id - low] += part.length
            counts[1] = np.maximum(counts[1], depth[at + part.length - 1])
        else:
            _add_block(part.types, int64s(part.sources), at, graph.first, low, depth, counts, starts, read)
    types = counts[0].nonzero()[0]
    return Work(types + low, *counts[:, types])


@compiled
def _stretch(types: NDArray[np.int16], low: int, high: int) -> tuple[int, int]:
    """Return the lowest and the highest of these types and two more."""
    for i in range(len(types)):
        low, high = min(low, int(types[i])), max(high, int(types[i]))
    return low, high


def _add_run(run: Run, at: int, first: int, low: int, depth: NDArray[np.int64], read: NDArray[np.int64]) -> None:
    """Write the rows of a run's steps, which all wait for what feeds any of them; see `_add_block`.

    read: the nodes of its memories.
    """
    init = [source - first for source, _ in run.init if source >= first]
    sequences = [nodes[0] - first for nodes in run.sequences if nodes is not None]
    fed = np.concatenate([np.array(init, np.int64), *sequences, read - first])
    fed = fed[fed >= 0]
    depth[at : at + run.length] = depth[fed].max(axis=0) if len(fed) else 0
    depth[at : at + run.length, run.type_id - low] += np.arange(1, run.length + 1)


@compiled
def _add_block(
    types: NDArray[np.int16],
    sources: NDArray[np.int64],
    at: int,
    first: int,
    low: int,
    depth: NDArray[np.int64],
    counts: NDArray[np.int64],
    starts: NDArray[np.int64],
    read: NDArray[np.int64],
) -> None:
    """Write the rows of a block's nodes: nodes of each type on the longest path that ends there, themselves included.

    types, sources: see NodeBlock. at: the block's first row. first: the number of the graph's first node; earlier ones
    do not count. low: the type of the first column. depth: [nodes, types]. counts: [2, types] nodes of each type, and
    the most on any path. Both are updated. starts, read: see CellGraph.memory_edges.
    """
    num_types = depth.shape[1]
    for i in range(len(types)):
        node = at + i
        for k in range(sources.shape[0]):
            source = sources[k, i] - first
            if source >= 0:
                for kind in range(num_types):
                    depth[node, kind] = max(depth[node, kind], depth[source, kind])
        for k in range(starts[node], starts[node + 1]):
            source = read[k] - first
            if source >= 0:
                for kind in range(num_types):
                    depth[node, kind] = max(depth[node, kind], depth[source, kind])
        depth[node, types[i] - low] += 1
        counts[0, types[i] - low] += 1
        for kind in range(num_types):
            counts[1, kind] = max(counts[1, kind], depth[node, kind])
