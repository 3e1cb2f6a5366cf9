"""A closed mini-batch: the graphs of requests that are computed together, merged into one, node by node.

Batching policies are learnt from it and compared on it (ED-Batch, ICML 2023). A live engine never builds one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.errors import InvalidRequestError
from batchmaker.graph.cell_graph import CellGraph, NodeBlock, Run


@final
@dataclass(frozen=True, eq=False)
class MiniBatch:
    """Nodes and their sources. Every node comes after its sources.

    types: [nodes] cell types. sources: [edges]; the sources of node i, each once, are sources[starts[i] : starts[i +
    1]]. starts: [nodes + 1]. num_types: number of cell types.
    """

    types: Ints
    starts: Ints
    sources: Ints
    num_types: int

    def __len__(self) -> int:
        return len(self.types)

    @cached_property
    def depths(self) -> Ints:
        """Depths [nodes]: how many nodes must run one after another before each; 0 without sources."""
        return _longest(np.zeros(len(self), np.int64), self.starts, self.sources, 1)

    @cached_property
    def own_depths(self) -> Ints:
        """The largest number of nodes of a node's own type on any path to it, without the node itself: [nodes]."""
        return _longest(self.types, self.starts, self.sources, self.num_types)

    @cached_property
    def num_fed(self) -> Ints:
        """The number of consumers of each node: [nodes]."""
        return np.bincount(self.sources, minlength=len(self))

    @cached_property
    def fed(self) -> Ints:
        """The consumers of node 0, ascending, then those of node 1, and so on: [edges]."""
        fed = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return fed[np.argsort(self.sources, kind="stable")]

    @cached_property
    def turned(self) -> MiniBatch:
        """The same nodes with all edges reversed, numbered from the last: node i becomes `len - 1 - i`."""
        starts = np.concatenate(([0], self.num_fed[::-1])).cumsum(dtype=np.int64)
        return MiniBatch(self.types[::-1].copy(), starts, len(self) - 1 - self.fed[::-1], self.num_types)


def mini_batch(types: Sequence[int], sources: Sequence[Iterable[int]], num_types: int) -> MiniBatch:
    """Return the mini-batch of these nodes. Duplicate sources of a node count once.

    types: [nodes], below num_types. sources: the sources of each node. Raises InvalidRequestError if a node has itself
    or a later node as a source, as in every cyclic graph, or has an unknown type.
    """
    distinct = [sorted(set(fed)) for fed in sources]
    if len(distinct) != len(types):
        raise InvalidRequestError(f"got the types of {len(types)} nodes and the sources of {len(distinct)}")
    for node, (kind, fed) in enumerate(zip(types, distinct, strict=True)):
        if fed and (fed[-1] >= node or fed[0] < 0):
            wrong = fed[-1] if fed[-1] >= node else fed[0]
            raise InvalidRequestError(
                f"node {node} is fed by node {wrong}, expected one from 0 to {node - 1}: a graph without cycles, with "
                "its nodes in an order in which they can run"
            )
        if not 0 <= kind < num_types:
            raise InvalidRequestError(f"node {node} is of type {kind}, expected one from 0 to {num_types - 1}")
    starts, edges = _columns(distinct)
    return MiniBatch(np.array(types, np.int64), starts, edges, num_types)


def unrolled(graph: CellGraph, num_types: int) -> MiniBatch:
    """Return a request's graph node by node: each step of a run is a node whose source is the previous step."""
    types = [0] * graph.num_nodes
    sources: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    for part in graph.parts:
        if isinstance(part, Run):
            _unroll_run(part, graph.first, types, sources)
        else:
            _unroll_block(part, graph.first, types, sources)
    starts, read = graph.memory_edges()
    for node in range(graph.num_nodes):
        memories = read[starts[node] : starts[node + 1]] - graph.first
        sources[node] += memories[memories >= 0].tolist()
    for memory in graph.memories:
        if memory.own:
            for node in range(memory.first + 1 - graph.first, memory.first + memory.count - graph.first):
                sources[node].append(node - 1)
    return mini_batch(types, sources, num_types)


def merged(requests: Sequence[MiniBatch]) -> MiniBatch:
    """Return requests of one model as one mini-batch, their nodes one after another."""
    sizes = [len(request) for request in requests]
    first = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))[:-1]
    starts, sources = _joined([(r.starts, r.sources) for r in requests], first.tolist())
    types = np.concatenate([np.empty(0, np.int64), *(r.types for r in requests)])
    return MiniBatch(types, starts, sources, max((r.num_types for r in requests), default=0))


def _unroll_run(run: Run, before: int, types: list[int], sources: list[list[int]]) -> None:
    first = run.first - before
    types[first : first + run.length] = [int(run.type_id)] * run.length
    columns = [column[0] - before for column in run.sequences if column is not None]
    for step, fed in enumerate(np.stack(columns, axis=1).tolist() if columns else [[]] * run.length):
        sources[first + step] = [source for source in fed if source >= 0]
        if step and run.init:
            sources[first + step].append(first + step - 1)
    sources[first] += [source - before for source, _ in run.init if source >= before]


def _unroll_block(block: NodeBlock, before: int, types: list[int], sources: list[list[int]]) -> None:
    first = block.first - before
    types[first : first + block.count] = block.types.tolist()
    for position, fed in enumerate((block.sources - before).T.tolist()):
        sources[first + position] = [source for source in fed if source >= 0]


@compiled
def _longest(types: Ints, starts: Ints, sources: Ints, num_types: int) -> Ints:
    """Return the largest number of nodes of each node's type on any path to it, without the node itself."""
    longest = np.zeros((len(types), num_types), np.int64)
    own = np.zeros(len(types), np.int64)
    for node in range(len(types)):
        for edge in range(starts[node], starts[node + 1]):
            source = sources[edge]
            for kind in range(num_types):
                longest[node, kind] = max(longest[node, kind], longest[source, kind] + (kind == types[source]))
        own[node] = longest[node, types[node]]
    return own


def _columns(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64)))
    return starts, np.array([entry for row in rows for entry in row], np.int64)


def _joined(parts: Sequence[tuple[Ints, Ints]], first: Sequence[int]) -> tuple[Ints, Ints]:
    counts = [np.diff(starts) for starts, _ in parts]
    edges = [sources + number for (_, sources), number in zip(parts, first, strict=True)]
    starts = np.concatenate(([0], *counts)).cumsum(dtype=np.int64)
    return starts, np.concatenate([np.empty(0, np.int64), *edges])
