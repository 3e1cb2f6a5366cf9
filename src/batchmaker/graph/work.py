"""The work of a cell graph by cell type, for policies and predictors."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from batchmaker.graph.cell_graph import CellGraph, NodeBlock, Run, Work


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
        for type_id, count in zip(*np.unique(block.types, return_counts=True), strict=True):
            counts[int(type_id)] += int(count)
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
    column = {type_id: i for i, type_id in enumerate(types)}
    depth = np.zeros((graph.num_nodes + 1, len(types)), np.int64)  # the last row: values from outside
    outside = graph.num_nodes
    for part in graph.parts:
        at = part.first - graph.first
        if isinstance(part, Run):
            init = [source - graph.first for source, _ in part.init if source >= graph.first]
            sequences = [nodes[0] - graph.first for nodes in part.sequences if nodes is not None]
            fed = np.concatenate([np.array(init, np.int64), *sequences])
            fed = fed[fed >= 0]
            depth[at : at + part.length] = depth[fed].max(axis=0) if len(fed) else 0
            depth[at : at + part.length, column[int(part.type_id)]] += np.arange(1, part.length + 1)
        else:
            _block_paths(part, at, graph.first, outside, column, depth)
    longest: NDArray[np.int64] = depth.max(axis=0)
    return longest


def _block_paths(
    block: NodeBlock, at: int, first: int, outside: int, column: dict[int, int], depth: NDArray[np.int64]
) -> None:
    local = np.where(block.sources >= first, block.sources - first, outside)
    own = np.array([column[type_id] for type_id in block.types.tolist()])
    positions = np.arange(block.count)
    if not ((local >= at) & (local < at + block.count)).any():  # no edge inside: all at once
        if len(local):
            depth[at : at + block.count] = depth[local].max(axis=0)
        depth[at + positions, own] += 1
        return
    for i, sources in enumerate(local.T.tolist()):
        row = depth[at + i]
        for source in sources:
            np.maximum(row, depth[source], out=row)
        row[own[i]] += 1
