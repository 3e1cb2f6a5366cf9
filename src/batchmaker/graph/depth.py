"""The depth of nodes: the number of nodes that must run one after another before each."""

from __future__ import annotations

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.graph.cell_graph import CellGraph, Run


def depths_of(graph: CellGraph, earlier: Ints) -> Ints:
    """Return the depth of each node of a graph [num_nodes]: 0 without sources, else one more than its deepest source's.

    earlier: [graph.first] depths of the nodes before an extension; empty for a request's first graph.
    """
    depth = np.concatenate((earlier, np.zeros(graph.num_nodes + 1, np.int64)))
    depth[-1] = -1  # for sources that are negative numbers, not nodes
    starts, read = graph.memory_edges()
    for part in graph.parts:
        at = part.first - graph.first
        if isinstance(part, Run):
            _run_depths(part, depth, read[starts[at] : starts[at + 1]])
        else:
            _deepen(part.first, np.ascontiguousarray(part.sources), starts[at:], read, depth)
    return depth[graph.first : -1]


def _run_depths(run: Run, depth: Ints, read: Ints) -> None:
    """Make each step deeper than the previous one and than its sources. read: the nodes of its memories."""
    reached = np.full(run.length, -1, np.int64)
    reached[0] = max((int(depth[max(source, -1)]) for source, _ in run.init), default=-1)
    reached[0] = max(int(reached[0]), int(depth[read].max(initial=-1)))
    for column in run.sequences:
        if column is not None:
            reached = np.maximum(reached, depth[column[0]])
    steps = np.arange(run.length)
    depth[run.first : run.first + run.length] = np.maximum.accumulate(reached + 1 - steps) + steps


@compiled
def _deepen(first: int, sources: Ints, starts: Ints, read: Ints, depth: Ints) -> None:
    """Make each node of a block deeper than its sources.

    first: its first node. sources: [inputs, nodes of the block]. starts, read: see CellGraph.memory_edges; `starts`
    from the block's first node on.
    """
    for i in range(sources.shape[1]):
        deepest = -1
        for k in range(sources.shape[0]):
            if sources[k, i] >= 0:
                deepest = max(deepest, depth[sources[k, i]])
        for k in range(starts[i], starts[i + 1]):
            deepest = max(deepest, depth[read[k]])
        depth[first + i] = deepest + 1
